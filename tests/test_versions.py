"""Releases that are too old are refused on import, newer ones than tested are named once."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from numpyro_ebm import versions

ROOT = Path(__file__).parents[1]


def installed(monkeypatch, **releases):
    newest = {name: newest for name, (_, newest) in versions.TESTED.items()}
    monkeypatch.setattr(versions, "version", lambda name: (newest | releases)[name])


@pytest.mark.case("A18")
@pytest.mark.parametrize(("name", "release"), [("blackjax", "1.3.9"), ("jax", "0.8.3"), ("numpyro", "0.9")])
def test_what_is_too_old_is_refused(monkeypatch, name, release):
    installed(monkeypatch, **{name: release})
    oldest, newest = versions.TESTED[name]
    with pytest.raises(ImportError, match=f"needs {name} {oldest} to {newest}, found {release}"):
        versions.check_versions()


@pytest.mark.case("A18")
def test_the_oldest_and_newest_pass(monkeypatch):
    versions.check_versions()
    installed(monkeypatch)
    versions.check_versions()
    installed(monkeypatch, **{name: oldest for name, (oldest, _) in versions.TESTED.items()})
    versions.check_versions()
    installed(monkeypatch, jax="0.12.7rc1", blackjax="1.7.1.post2")
    versions.check_versions()


@pytest.mark.case("A18")
def test_newer_ones_are_named_in_one_warning(monkeypatch):
    installed(monkeypatch, blackjax="2.0", jax="0.13.0.dev1")
    with pytest.warns(
        UserWarning, match=r"not tested with jax 0.13.0.dev1 .*, blackjax 2.0 \(tested: 1.4 to 1.7\)"
    ) as found:
        versions.check_versions()
    assert len(found) == 1


@pytest.mark.case("A18")
def test_the_check_is_made_on_import():
    """In a process of its own, where BlackJAX says to be old."""
    program = (
        "import importlib.metadata as metadata; real = metadata.version\n"
        "metadata.version = lambda name: '1.3' if name == 'blackjax' else real(name)\n"
        "import numpyro_ebm"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 1
    assert "ImportError: numpyro_ebm needs blackjax 1.4 to 1.7, found 1.3" in run.stderr


def test_oldest_releases_are_those_that_are_installed():
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert {f"{name}>={oldest}" for name, (oldest, _) in versions.TESTED.items()} <= set(wanted)
