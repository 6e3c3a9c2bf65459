"""The releases that this library stands on."""

import re
import warnings
from importlib.metadata import version

#: For each library the oldest release that works, and the newest that is tested (and all patches of it).
TESTED = {
    "numpyro": ("0.22", "0.22"),
    "jax": ("0.9", "0.12"),
    "blackjax": ("1.4", "1.7"),
    "arviz": ("0.23", "1.3"),
}


def check_versions() -> None:
    """Raise `ImportError` below the oldest release that works; warn above the newest that is tested."""
    too_new = []
    for name, (oldest, newest) in TESTED.items():
        installed = version(name)
        if _numbers(installed) < _numbers(oldest):
            raise ImportError(
                f"numpyro_ebm needs {name} {oldest} to {newest}, found {installed}: pip install --upgrade '{name}>={oldest}'"
            )
        if _numbers(installed)[: len(_numbers(newest))] > _numbers(newest):
            too_new.append(f"{name} {installed} (tested: {oldest} to {newest})")
    if too_new:
        warnings.warn(
            f"numpyro_ebm is not tested with {', '.join(too_new)}: should something go wrong, try a tested release",
            stacklevel=3,
        )


def _numbers(release):
    """The leading numbers of a release, without those of pre-releases."""
    return tuple(int(part) for part in re.match(r"\d+(\.\d+)*", release)[0].split("."))  # type: ignore[index]
