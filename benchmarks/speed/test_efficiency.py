"""Time per effective sample of fitted energies: MALA against NumPyro's NUTS and BlackJAX's.

A turn is a whole run of `NUM_CHAINS` chains side by side, warm-up included, compiled before. Effective samples are ArviZ's (bulk), of
the coordinate that has the fewest.
"""

import functools

import arviz as az
import blackjax
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from conftest import Contest
from flax import linen as nn
from jax import lax, random
from numpyro.contrib.module import flax_module
from numpyro.infer import NUTS, SVI, Trace_ELBO
from sklearn.datasets import load_wine, make_moons

import numpyro_ebm as ebm

NUM_CHAINS, NUM_WARMUP, NUM_SAMPLES = 32, 500, 500


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (64, 64):
            x = nn.silu(nn.Dense(width)(x))
        return nn.Dense(1)(x)[..., 0]


@functools.cache
def moons() -> ebm.EnergyBased:
    """A network's energy of two moons, in the plane."""

    def model(x):
        energy = flax_module("energy", Network(), input_shape=(2,))
        with numpyro.plate("data", x.shape[0], subsample_size=256):
            batch = numpyro.subsample(x, event_dim=1)
            numpyro.sample("x", ebm.EnergyBased(energy, dist.Normal(0, 2).expand([2]).to_event(1)), obs=batch)

    x = jnp.asarray(make_moons(10_000, noise=0.1, random_state=0)[0] - [0.5, 0.25], jnp.float32)
    estimated = ebm.estimate(model, ebm.ContrastiveDivergence())
    svi = SVI(estimated, lambda x: None, optax.adam(1e-3), Trace_ELBO())
    result = svi.run(random.key(0), 2_000, x, progress_bar=False)
    return ebm.fitted_distribution(model, result.params, x)


@functools.cache
def wines() -> ebm.EnergyBased:
    """An F1 energy of 13 measurements of wines, standardised."""

    def model(x):
        energy = ebm.f1_energy("energy", dim=13, num_neurons=64, radius=5.0, bias=True)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(energy, dist.Normal(0, 1).expand([13]).to_event(1)), obs=x)

    x = load_wine().data
    x = jnp.asarray((x - x.mean(0)) / x.std(0), jnp.float32)
    dual = ebm.DualSGDA(model, step_size=0.02, num_chains=1_000)
    return ebm.fitted_distribution(model, dual.run(random.key(0), 2_000, x, progress_bar=False).params, x)


def effective(draws) -> float:
    """Of draws of shape ``(chains, draws, coordinates)``."""
    return float(np.min(az.ess(az.convert_to_dataset(np.asarray(draws)))["x"]))


def by_numpyro(fit, make_kernel):
    distribution = fit()

    def model():
        numpyro.sample("x", distribution)

    kernel = make_kernel(model)

    def move(state, _):
        state = kernel.sample(state, (), {})
        return state, state.z["x"]

    # MCMC.run draws the same, but compiles its loop anew on each call
    start = kernel.init(random.split(random.key(1), NUM_CHAINS), NUM_WARMUP, None, (), {})
    chains = jax.jit(lambda state: lax.scan(move, state, None, NUM_WARMUP + NUM_SAMPLES)[1][NUM_WARMUP:])
    return counted(lambda: jnp.swapaxes(jax.block_until_ready(chains(start)), 0, 1))


def by_blackjax(fit):
    distribution = fit()
    logdensity, (dim,) = distribution.unnormalized_log_prob, distribution.event_shape

    @jax.jit
    @jax.vmap
    def chain(key):
        key_start, key_warmup, key_draws = random.split(key, 3)
        warmup = blackjax.window_adaptation(blackjax.nuts, logdensity, target_acceptance_rate=0.8)
        (state, parameters), _ = warmup.run(key_warmup, random.normal(key_start, (dim,)), NUM_WARMUP)
        nuts = blackjax.nuts(logdensity, **parameters)

        def move(state, key):
            state = nuts.step(key, state)[0]
            return state, state.position

        return lax.scan(move, state, random.split(key_draws, NUM_SAMPLES))[1]

    return counted(lambda: jax.block_until_ready(chain(random.split(random.key(1), NUM_CHAINS))))


def counted(work):
    """The same work, which tells effective samples: counted once, as the keys are the same."""
    num = effective(work())

    def counting():
        work()
        return num

    return counting


CONTESTS = {
    f"effective samples of {name}": Contest(
        {
            "numpyro_ebm, MALA": functools.partial(by_numpyro, fit, ebm.MALA),
            "NumPyro, NUTS": functools.partial(by_numpyro, fit, NUTS),
            "BlackJAX, NUTS": functools.partial(by_blackjax, fit),
        },
        "effective sample",
        {},
    )
    for name, fit in (
        ("two moons, a 2-64-64-1 network", moons),
        ("wines, an F1 energy of 13 coordinates", wines),
    )
}


def test_run(race, contest, turn, contender):
    race(CONTESTS[contest], contest, contender)
