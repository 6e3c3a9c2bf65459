"""What holds for whole runs: keys, traces, leaks and types."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC

import numpyro_ebm as ebm
from tests.contracts.parts import CALLS, F1, ON_SPHERE, X3, Quadratic, checking_leaks, counted, counted_relu


class Run(NamedTuple):
    """``make()`` returns a function of a key and of data that returns arrays.

    Attributes
    ----------
    make
        Makes a trainer or a sampler.
    x
        Data.
    traces
        Calls of the energy in each later run: 1 where a distribution is made, which looks at its shapes, and those outside of
        compiled functions; None where NumPyro traces each run.
    """

    make: Callable
    x: jax.Array
    traces: int | None = 0


def neurons(x):
    energy = ebm.f1_energy("energy", dim=3, num_neurons=4, radius=2.0, activation=counted_relu)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=x)


def doubly_intractable(x):
    theta = numpyro.sample("theta", dist.Gamma(2, 1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(lambda x: counted(theta) * x, dist.Uniform(0, 1)), obs=x)


def posterior(x):
    z = numpyro.sample("z", dist.Normal(0, 1).expand([3]).to_event(1))
    numpyro.sample("x", dist.Normal(counted(z), 1).to_event(1).expand([x.shape[0]]).to_event(1), obs=x)


def dual():
    trainer = ebm.DualSGDA(neurons, step_size=1e-2, num_chains=6, restart_prob=0.5)

    def call(key, x):
        result = trainer.run(key, 3, x, progress_bar=False)
        return result.params, result.losses

    return call


def mcmc(kernel, model):
    def make():
        sampler = MCMC(kernel(model), num_warmup=5, num_samples=5, progress_bar=False)

        def call(key, x):
            sampler.run(key, x)
            return sampler.get_samples()

        return call

    return make


def flow():
    made = ebm.MMDFlow(ebm.SphereUniform(3), radius=2.0, step_size=1e-2, num_chains=6)
    return lambda key, x: made.run(key, 3, x)


def normalizer(method, **options):
    def call(key, x):
        d = ebm.EnergyBased(Quadratic(jnp.mean(x**2)), dist.Normal(0, 1).expand([3]).to_event(1))
        z = ebm.log_normalizer(d, key, method, **options)
        return z.value, z.stderr, z.particles

    return lambda: call


def sampled(key, x):
    d = ebm.EnergyBased(Quadratic(jnp.mean(x**2)), dist.Normal(0, 1).expand([3]).to_event(1))
    key_run, key_draw = random.split(key)
    return ebm.smc_sampler(d, key_run, num_particles=320, num_moves=2)(key_draw, d, (5,))


def gap(key, x):
    found = ebm.duality_gap(ebm.EnergyBased(F1, ebm.SphereUniform(3)), x, key, num_particles=320, num_bootstrap=1)
    return found.value, found.stderr, found.neuron


KERNELS = {
    "MALA": (ebm.MALA, posterior),
    "ULA": (ebm.ULA, posterior),
    "Exchange": (ebm.Exchange, doubly_intractable),
}
RUNS = {
    "MMDFlow": Run(flow, ON_SPHERE),
    "importance": Run(normalizer("importance", num_draws=1000), X3, traces=1),
    "DualSGDA": Run(dual, ON_SPHERE),
    "MALA": Run(mcmc(*KERNELS["MALA"]), X3, traces=None),
    "Exchange": Run(mcmc(*KERNELS["Exchange"]), jnp.array([0.25, 0.5]), traces=None),
    "SMC": Run(normalizer("smc", num_particles=320, num_moves=2), X3, traces=1),
    "smc_sampler": Run(lambda: sampled, X3, traces=1),
    "duality_gap": Run(lambda: gap, ON_SPHERE, traces=4),
}
INITIALISES = "NumPyro's initialize_model draws from the key that it traces the model with"
MOVES = "BlackJAX's SMC scans over split keys under vmap, which JAX's check takes for reuse"
REUSED = dict.fromkeys(["MALA", "Exchange"], INITIALISES) | dict.fromkeys(["SMC", "smc_sampler", "duality_gap"], MOVES)
FAST = {"MMDFlow", "importance"}
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]
KEYS = [name if name in FAST | {"DualSGDA"} else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


@pytest.mark.case("A15", "A16")
@pytest.mark.parametrize("name", KEYS)
def test_same_key_same_result_and_nothing_is_traced_twice(name):
    """5 to 20 s each."""
    run = RUNS[name]
    call = run.make()
    first = call(random.key(0), run.x)
    traced = len(CALLS)
    again, other, _ = call(random.key(0), run.x), call(random.key(1), run.x), call(random.key(2), run.x[::-1])
    assert run.traces is None or len(CALLS) == traced + 3 * run.traces
    old = run.make()(random.PRNGKey(0), run.x)
    assert same(first, again)
    assert same(first, old)
    assert not same(first, other)


@pytest.mark.case("A16")
@pytest.mark.parametrize("name", NAMES)
def test_no_key_is_used_twice_and_no_tracer_leaks(name):
    """5 to 20 s each."""
    run = RUNS[name]
    with jax.debug_key_reuse(name not in REUSED), checking_leaks():
        run.make()(random.key(0), run.x)


@pytest.mark.case("A16")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["MALA", "ULA", "Exchange"])
def test_moves_of_mcmc_use_no_key_twice(name):
    """5 s each."""
    make, model = KERNELS[name]
    kernel, x = make(model), X3[:, 0] ** 2 / 4 if name == "Exchange" else X3
    state = kernel.init(random.key(0), 5, None, (x,), {})
    with jax.debug_key_reuse(True):
        jax.jit(kernel.sample)(state, (x,), {})


@pytest.mark.case("A17")
@pytest.mark.parametrize("name", NAMES)
def test_double_precision_stays_double(name):
    """5 to 20 s each."""
    run = RUNS[name]
    with jax.enable_x64(True):
        x = np.asarray(run.x, np.float64)
        if run.x is ON_SPHERE:
            x = x / np.linalg.norm(x, axis=-1, keepdims=True)
        for leaf in jax.tree.leaves(run.make()(random.key(0), x)):
            assert not jnp.issubdtype(jnp.result_type(leaf), jnp.floating) or jnp.result_type(leaf) == jnp.float64
