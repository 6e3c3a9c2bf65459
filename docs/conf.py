"""Sphinx configuration. `sphinx-build -W -n docs docs/_build/html` builds the site; pages need no network to be read."""

import base64
import hashlib
import json
import os
import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # messages

# notebooks run in kernels that inherit these
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.pop("MPLBACKEND", None)  # theirs draws figures into the page
os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")

project = "numpyro_ebm"
author = "the numpyro_ebm authors"
version = release = installed_version("numpyro_ebm")
copyright = "the numpyro_ebm authors, Apache License 2.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",
    "sphinx_copybutton",
    "sphinx_design",
    "messages",
]
exclude_patterns = ["_build"]
nitpicky = True
default_role = "code"  # single backticks in docstrings
toc_object_entries_show_parents = "hide"

# pages
myst_enable_extensions = ["amsmath", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
# MyST's own way to keep MathJax off prose, given here as MathJax takes it
myst_update_mathjax = False
suppress_warnings = ["config.cache"]  # of functions in this file

# notebooks
nb_execution_mode = "cache"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True

# reference
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
autodoc_inherit_docstrings = False
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Attributes", "params_style")]  # several names a line
nitpick_ignore = [
    ("py:class", "Axes"),
    # types of returned kernels, which are used through init and step alone
    ("py:class", "numpyro_ebm.kernels.langevin.AdjustedLangevin"),
    ("py:class", "numpyro_ebm.kernels.transformed.TransformedState"),
]
nitpick_ignore_regex = [
    # libraries whose inventories a build would have to fetch
    (r"py:.*", r"(jax|numpyro|optax|numpy|arviz|xarray|matplotlib|flax|orbax|collections|os|typing)(\..*)?"),
]

# theme
html_theme = "sphinx_book_theme"
html_title = "numpyro_ebm"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["custom.css"]
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navigation_with_keys": False,
    "navbar_persistent": [],
}
html_context = {"default_mode": "auto"}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def skip_member(app, what, name, obj, skip, options):
    """Leave out fields of named tuples, which their classes' docstrings list, and what serves JAX alone."""
    if type(obj).__name__ == "_tuplegetter" or name in ("tree_flatten", "tree_unflatten"):
        return True
    return None


def write_gallery(app, exception):
    """Write pictures that one page takes from another one's notebook, which MyST-NB refers to but may not write."""
    if exception is not None or app.builder.format != "html":
        return
    images = Path(app.outdir) / "_images"
    for store in (Path(app.outdir).parent / "jupyter_execute").rglob("*.glue.json"):
        for output in json.loads(store.read_text()).values():
            picture = base64.b64decode(output["data"].get("image/png", ""))
            if picture:
                (images / f"{hashlib.sha256(picture).hexdigest()}.png").write_bytes(picture)


def setup(app):
    app.connect("build-finished", write_gallery)
    app.connect("autodoc-skip-member", skip_member)
    return {"parallel_read_safe": True}
