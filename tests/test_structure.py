"""The order of modules, and what the package exports."""

import ast
import re
from pathlib import Path

import pytest

import numpyro_ebm

ROOT = Path(numpyro_ebm.__file__).parent
ORDER = [
    "versions",
    "energies",
    "distributions",
    "joint",
    "kernels",
    "pool",
    "estimators",
    "handlers",
    "checkpoint",
    "monitor",
    "infer",
    "normalizer",
    "diagnostics",
    "plots",
]
MODULES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")


def part(name):
    return name.split(".")[1] if name.count(".") else None


def imported(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    assert own in ORDER, f"{path} is a part that the order does not know"
    for module, name in imported(path):
        if module.split(".")[0] != "numpyro_ebm":
            continue
        other = part(module) or name
        assert other in ORDER, f"{path} imports {other} from the package itself"
        assert ORDER.index(other) <= ORDER.index(own), f"{path} imports {module}, which stands after it"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_private_crosses_a_module_border(path):
    for module, name in imported(path):
        if module.startswith("numpyro_ebm") and name is not None:
            assert not name.startswith("_"), f"{path} imports {name} from {module}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_are_small(path):
    assert len(path.read_text().splitlines()) <= 450


def test_every_public_name_has_a_docstring():
    names = [name for name in vars(numpyro_ebm) if not name.startswith("_")]
    for name in names:
        assert getattr(numpyro_ebm, name).__doc__, name


def test_every_case_from_the_field_has_a_test():
    texts = [path.read_text() for path in Path(__file__).parent.rglob("test_*.py")]
    marked = {
        case for text in texts for ids in re.findall(r"mark\.case\((.*?)\)", text) for case in re.findall(r"A\d+", ids)
    }
    assert {f"A{number}" for number in range(1, 20)} <= marked
