"""Who sees a training's progress."""

import os
import pty
import subprocess
import sys
import termios
from pathlib import Path

import pytest

PROGRAM = """
import numpyro, numpyro.distributions as dist, numpyro_ebm as ebm
from jax import numpy as jnp, random

def model(x):
    loc = numpyro.param("loc", 0.0)
    with numpyro.plate("data", len(x)):
        numpyro.sample("x", ebm.EnergyBased(lambda x: loc * x, dist.Normal(0, 1)), obs=x)

dual = ebm.DualSGDA(model, step_size=1e-2, num_chains=10)
dual.run(random.key(0), 3, jnp.ones(4), progress_bar={bar})
"""
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONWARNINGS": "ignore"}


def in_a_terminal(program):
    """What the program writes to a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    with subprocess.Popen([sys.executable, "-c", program], env=ENVIRONMENT, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        written = b""
        try:
            while part := os.read(ours, 4096):
                written += part
        except OSError:  # Linux's way to say that the other end is closed
            pass
    os.close(ours)
    assert process.returncode == 0, written.decode()
    return written.decode()


def test_terminals_show_loss_acceptance_and_restarts():
    shown = in_a_terminal(PROGRAM.format(bar=True))
    for what in ("3/3", "loss ", "acceptance ", "restarts 0"):
        assert what in shown
    assert in_a_terminal(PROGRAM.format(bar=False)) == ""


def test_logs_are_left_alone():
    run = subprocess.run([sys.executable, "-c", PROGRAM.format(bar=True)], env=ENVIRONMENT, capture_output=True)
    assert run.returncode == 0
    assert run.stdout + run.stderr == b""


@pytest.mark.slow
def test_notebooks_show_it():
    """Budget: 20 seconds."""
    nbclient = pytest.importorskip(
        "nbclient", reason="notebooks are run by what pip install 'numpyro_ebm[docs]' brings"
    )
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(PROGRAM.format(bar=True))])
    nbclient.NotebookClient(notebook, resources={"metadata": {"path": str(Path(__file__).parents[2])}}).execute()
    shown = str(notebook.cells[0].outputs)
    assert "3/3" in shown
    assert "acceptance " in shown
