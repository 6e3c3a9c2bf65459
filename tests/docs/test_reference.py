"""Every public name stands in the reference, with a docstring of numpydoc's form."""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

import pytest

import numpyro_ebm

PAGES = Path(__file__).parents[2] / "docs" / "reference"
_DIRECTIVE = re.compile(
    r"\.\. (?P<kind>currentmodule|module|automodule|autoclass|autofunction|autoexception|autodata|py:data):: (?P<name>[\w.]+)"
)


def documented():
    """Full names of what the reference's pages show."""
    names = set()
    for page in PAGES.glob("*.rst"):
        module = ""
        for line in page.read_text().splitlines():
            found = _DIRECTIVE.match(line.strip())
            if found is None:
                continue
            kind, name = found["kind"], found["name"]
            if kind in ("currentmodule", "module"):
                module = name
            elif kind == "automodule":
                if importlib.util.find_spec(name) is not None:
                    shown = importlib.import_module(name)
                    names |= {f"{name}.{each}" for each in getattr(shown, "__all__", vars(shown))}
            else:
                names.add(name if name.startswith("numpyro_ebm.") else f"{module}.{name}")
    return names


def public(module):
    """Full names of what a module exports, and of what its public sub-modules do."""
    for name in module.__all__ if hasattr(module, "__all__") else _own(module):
        value = getattr(module, name)
        if isinstance(value, ModuleType):
            yield from public(value)
        else:
            yield f"{module.__name__}.{name}", value


def _own(module):
    return [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and not name.startswith("_")
    ]


def test_every_public_name_is_in_the_reference():
    missing = sorted({name for name, _ in public(numpyro_ebm)} - documented())
    assert not missing, f"add to docs/reference: {', '.join(missing)}"


@pytest.mark.slow
def test_every_public_name_has_parameters_returns_and_an_example():
    """Budget: 10 seconds. Examples run as doctests."""
    validate = pytest.importorskip(
        "numpydoc.validate", reason="docstrings are read by what pip install 'numpyro_ebm[docs]' brings"
    )
    # summary, parameters (missing and unknown), returned values, examples
    held = {"GL08", "SS01", "PR01", "PR02", "RT01", "EX01"}
    faults = []
    for name, value in public(numpyro_ebm):
        if callable(value):
            found = validate.validate(name)
            # fields of named tuples are attributes
            ignored = {"PR01"} if hasattr(value, "_fields") and "Attributes" in value.__doc__ else set()
            faults += [f"{name}: {text}" for code, text in found["errors"] if code in held - ignored]
            assert ">>> " in value.__doc__, name
    assert not faults, "\n".join(faults)


def test_every_public_method_has_a_docstring():
    missing = [
        f"{name}.{method}"
        for name, value in public(numpyro_ebm)
        if inspect.isclass(value)
        for method, defined in vars(value).items()
        if inspect.isfunction(defined) and not method.startswith("_") and not inspect.getdoc(getattr(value, method))
    ]
    assert not missing


def test_the_reference_shows_nothing_that_is_gone():
    for name in documented():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
