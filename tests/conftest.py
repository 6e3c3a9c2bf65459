"""Two host devices, so that chain_method="parallel" runs in parallel; ArviZ imported once before workers start."""

import os
import warnings
from pathlib import Path

# most of the suite's time is XLA's compiling, which takes two thirds as long without its optimisation
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import numpyro
import pytest

numpyro.set_host_device_count(2)

# ArviZ 0.x notes in a file that it has warned today: workers that import it at once would race for that file
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import arviz  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def forget_what_was_compiled():
    """Each executable takes memory maps, of which Linux gives a process 65,530: a whole suite's take more."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and len(maps.read_text().splitlines()) > 30_000:
        jax.clear_caches()
