"""Every public name stands in the reference, with a docstring."""

import importlib
import inspect
import re
from pathlib import Path
from types import ModuleType

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


def test_every_public_name_has_a_docstring():
    missing = [
        name
        for name, value in public(numpyro_ebm)
        if (inspect.isclass(value) or callable(value)) and not (value.__doc__ or "").strip()
    ]
    assert not missing


def test_the_reference_shows_nothing_that_is_gone():
    for name in documented():
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), name
