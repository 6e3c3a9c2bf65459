"""Code on pages that do not run as notebooks runs here, each page from top to bottom."""

import contextlib
import re
from pathlib import Path

import numpyro
import pytest

DOCS = Path(__file__).parents[2] / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

#: What pages take for granted.
PRELUDE = """
import arviz as az, jax, jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist, optax
import numpyro_ebm as ebm
from flax import nnx
from jax import random
from numpyro.contrib.module import nnx_module
from numpyro.infer import MCMC, NUTS, SVI, Gibbs, Trace_ELBO

key, rngs = random.key(0), nnx.Rngs(0)
base = dist.Normal(0, 1).expand([2]).to_event(1)
flat = dist.ImproperUniform(dist.constraints.real, (), ())

def on_sphere(x):
    energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=5.0)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(energy, base=ebm.SphereUniform(3)), obs=x)

def trained(x):
    global model, dual, result
    model = on_sphere
    dual = ebm.DualSGDA(model, step_size=1e-2, num_chains=100)
    result = dual.run(random.key(0), 20, x)
    return ebm.fitted_distribution(model, result.params, x)
"""
ON_SPHERE = "x = held_out = ebm.SphereUniform(3).sample(random.key(7), (60,)); fitted = other = trained(x)\n"
IN_PLANE = "fitted = ebm.EnergyBased(lambda x: jnp.sum(x**2) / 2, base)\n"
#: What one page says in words.
SETUP = {
    "estimators": IN_PLANE + "network = nnx.Linear(2, 3, rngs=rngs); observed, scale = jnp.ones(2), 0.5\n",
    "howto/devices": "x = ebm.SphereUniform(15).sample(key, (60,))\n"
    "class dual: run = staticmethod(lambda key, steps, x: None)\n",
    "howto/divergence": ON_SPHERE,
    "howto/mixing": IN_PLANE,
    "howto/networks": "points = jnp.zeros((4, 2))\n",
    "howto/supports": "fitted = ebm.EnergyBased(lambda x: x**2 / 2, flat)\n",
    "trust": ON_SPHERE,
}
#: Before a page's block: names that it uses for something else than the block before.
BETWEEN = {
    ("howto/devices", 1): "dual = ebm.DualSGDA(model, step_size=1e-2, num_chains=50)\n",
    ("howto/networks", 4): ON_SPHERE + "points = x\n",
    ("trust", 3): "x = random.normal(key, (50,))\n",
    ("trust", 4): """
y = 3 + random.normal(random.key(1), (50,))
def model(x, y):
    theta, location = numpyro.sample("theta", dist.Gamma(1, 1)), numpyro.sample("location", dist.Normal(0, 10))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2 / 2, flat), obs=x)
        numpyro.sample("y", dist.Normal(location, 1), obs=y)
""",
}
PAGES = [
    str(page.relative_to(DOCS).with_suffix("")) for page in sorted(DOCS.rglob("*.md")) if BLOCK.search(page.read_text())
]


def reduced(code):
    """The code at sizes of a test."""
    return re.sub(r"\b\d+_000\b", "50", code.replace("100_000", "300"))


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.filterwarnings("ignore")  # of chains that are too short, and goes on from a checkpoint
def test_code_runs(page, tmp_path, monkeypatch):
    """Budget: 20 seconds each."""
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(PRELUDE + SETUP.get(page, ""), names)
    # networks are declared inside of a model
    inside = numpyro.handlers.seed(rng_seed=0) if page == "howto/networks" else contextlib.nullcontext()
    for i, code in enumerate(BLOCK.findall((DOCS / f"{page}.md").read_text())):
        with inside:
            exec(compile(BETWEEN.get((page, i), "") + reduced(code), f"{page}.md, block {i}", "exec"), names)
