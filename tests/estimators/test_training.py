"""Estimators train beside guides, and networks of every library."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import linen, nnx
from jax import random
from numpyro.contrib.module import (
    eqx_module,
    flax_module,
    nnx_module,
    random_eqx_module,
    random_flax_module,
    random_nnx_module,
)
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_ebm as ebm

X = random.normal(random.key(0), (12, 2))
BASE = dist.Normal(0, 1).expand([2]).to_event(1)
POINTS = jnp.linspace(-2.0, 2.0, 40) + 0.5
EXACT = 1 / float(jnp.mean((POINTS - 0.5) ** 2)) - 1 / 9


def with_a_latent(x):
    """The energy's parameter, and a latent variable that has nothing to do with it."""
    theta = numpyro.param("theta", 0.1, constraint=dist.constraints.positive)
    loc = numpyro.sample("loc", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(loc, 1), obs=1.0)
    with numpyro.plate("data", 40, subsample_size=20):
        batch = numpyro.subsample(x, event_dim=0)
        numpyro.sample("x", ebm.EnergyBased(lambda x: theta * (x - 0.5) ** 2 / 2, dist.Normal(0.5, 3.0)), obs=batch)


def by_hand(x):
    loc = numpyro.param("q_loc", 0.0)
    numpyro.sample("loc", dist.Normal(loc, numpyro.param("q_scale", 1.0, constraint=dist.constraints.positive)))


@pytest.mark.slow
@pytest.mark.parametrize("guide", ["AutoNormal", "by hand"])
@pytest.mark.parametrize("loss", [Trace_ELBO(), TraceMeanField_ELBO()], ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("stable_update", [False, True])
@pytest.mark.parametrize("name", ["contrastive", "score", "quadrature"])
def test_svi_trains_beside_a_guide(name, stable_update, loss, guide):  # 6 s each
    estimator = {
        "contrastive": ebm.ContrastiveDivergence(ebm.ChainPool(pool_size=64, num_steps=5)),
        "score": ebm.ScoreMatching(),
        "quadrature": ebm.Quadrature(100),
    }[name]
    estimated = ebm.estimate(with_a_latent, estimator)
    q = AutoNormal(estimated) if guide == "AutoNormal" else by_hand
    svi = SVI(estimated, q, optax.adam(optax.cosine_decay_schedule(5e-2, 600)), loss)
    result = svi.run(random.key(0), 600, POINTS, progress_bar=False, stable_update=stable_update)
    assert abs(float(result.params["theta"]) - EXACT) < 0.12
    loc = result.params["loc_auto_loc" if guide == "AutoNormal" else "q_loc"]
    assert abs(float(loc) - 0.5) < 0.25


def networks():
    import equinox

    linen_net = linen.Sequential([linen.Dense(8), jnp.tanh, linen.Dense(1)])
    return {
        "flax": (flax_module, random_flax_module, (linen_net,), {"input_shape": (2,)}),
        "nnx": (nnx_module, random_nnx_module, (nnx.Linear(2, 1, rngs=nnx.Rngs(0)),), {}),
        "equinox": (
            eqx_module,
            random_eqx_module,
            (equinox.nn.MLP(2, 1, 8, 1, activation=jnp.tanh, key=random.key(0)),),
            {},
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flax", "nnx", "equinox"])
@pytest.mark.parametrize("is_random", [False, True], ids=["parameters", "random"])
def test_networks_of_numpyro_train(kind, is_random):  # 15 s each
    """Towards a normal at 1.5: the loss's chains follow the data."""
    module, random_module, args, options = networks()[kind]
    x = X * 0.3 + 1.5

    def model(x):
        if is_random:
            energy = random_module("net", *args, prior=dist.Normal(0, 1), **options)
        else:
            energy = module("net", *args, **options)
        with numpyro.plate("data", 12):
            numpyro.sample("x", ebm.EnergyBased(energy, BASE), obs=x)

    estimated = ebm.estimate(model, ebm.ContrastiveDivergence(ebm.ChainPool(pool_size=64, num_steps=5)))
    guide = AutoNormal(estimated, init_scale=0.01) if is_random else lambda x: None
    svi = SVI(estimated, guide, optax.adam(3e-2), Trace_ELBO())
    state = svi.run(random.key(0), 150, x, progress_bar=False).state
    position = state.mutable_state["x$chains"]["state"].position
    assert np.all(position.mean(0) > 0.7)


@pytest.mark.slow
def test_batches_of_energies_of_another_size_are_refused_in_words():  # 5 s
    def model(x, c):
        theta = numpyro.param("theta", 0.3)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * c * x, dist.Normal(0, 1)), obs=x)

    svi = SVI(
        ebm.estimate(model, ebm.ContrastiveDivergence(ebm.ChainPool(pool_size=20, num_steps=2))),
        lambda x, c: None,
        optax.sgd(0.1),
        Trace_ELBO(),
    )
    c = jnp.arange(12.0)
    state = svi.init(random.key(0), X[:, 0], c)
    with pytest.raises(ValueError, match=r"site 'x'.*shape \(12,\) so far, but now .* \(5,\)"):
        svi.update(state, X[:5, 0], c[:5])


@pytest.mark.slow
@pytest.mark.parametrize(("num_steps", "low", "high"), [(1, 0.4, 1.2), (20, 0.27, 0.38), (100, 0.27, 0.32)])
def test_a_guide_of_a_latent_in_the_energy_converges_as_moves_grow(num_steps, low, high):  # 20 s each
    """x given theta is N(theta, 1), and the prior N(0, 1): with 11 observations the posterior has sd 1 / sqrt(12)."""
    x = random.normal(random.key(0), (11,)) + 0.5

    def model(x):
        theta = numpyro.sample("theta", dist.Normal(0, 1))
        with numpyro.plate("data", 11):
            numpyro.sample("x", ebm.EnergyBased(lambda x: -theta * x, dist.Normal(0, 1)), obs=x)

    pool = ebm.ChainPool(ebm.kernels.mala(0.3), 256, num_steps=num_steps)
    estimated = ebm.estimate(model, ebm.ContrastiveDivergence(pool))
    guide = AutoNormal(estimated)
    svi = SVI(estimated, guide, optax.adam(optax.cosine_decay_schedule(2e-2, 3000, 0.01)), Trace_ELBO())
    params = svi.run(random.key(0), 3000, x, progress_bar=False).params
    assert abs(float(params["theta_auto_loc"]) - float(x.sum()) / 12) < 0.1
    assert low < float(params["theta_auto_scale"]) < high
