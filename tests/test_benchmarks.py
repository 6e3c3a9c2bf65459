"""What the long scripts promise, for a few seeds."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_two_moons_stay_put_for_20_000_updates():
    """200 s, of one seed; the script runs ten."""
    command = [sys.executable, "benchmarks/two_moons.py", "--seeds", "1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": ""}  # the tests' own flags would slow it down
    run = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
    lines = run.stdout.splitlines()
    _, held_out, gap, largest, *_ = map(float, lines[-1].split())
    assert held_out > -1.09
    assert gap < 1.5
    assert largest < 100
