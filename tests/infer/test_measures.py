"""The flow of measures on the circle: what it keeps, and where it comes to rest."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import numpyro_ebm as ebm

ANGLES = 2 * np.pi * np.arange(32) / 32
DATA = np.exp(np.cos(2 * ANGLES) + np.cos(ANGLES - 0.5))
DATA /= DATA.sum()


def test_masses_stay_positive_and_in_the_ball():
    dynamics = ebm.MeasureDynamics(DATA, 2.0, timescale=30.0, pull=0.5)
    state = dynamics.init()
    for _ in range(50):
        state = dynamics.step(state)
        assert all(bool(jnp.all(mass >= 0)) for mass in state[:3])
        assert abs(float(state.particles.sum()) - 1) < 1e-5
        assert float((state.positive + state.negative).sum()) < 2.0 * (1 + 1e-5)


def test_a_gibbs_measure_is_stationary():
    """Particles of a fixed energy: its Gibbs measure does not move, another one goes there."""
    with jax.enable_x64(True):
        dynamics = ebm.MeasureDynamics(DATA, 5.0, timescale=1e-9)
        neurons = jnp.zeros(32).at[3].set(2.0)
        state = dynamics.init()._replace(positive=neurons, negative=jnp.zeros(32))
        gibbs = dynamics.gibbs(dynamics.energy(state))
        there = dynamics.step(state._replace(particles=gibbs))
        assert np.allclose(there.particles, gibbs, atol=1e-12)
        went, _ = dynamics.run(3_000, state)
        assert np.allclose(went.particles, gibbs, atol=1e-6)


def test_the_flow_closes_the_duality_gap():
    dynamics = ebm.MeasureDynamics(DATA, 5.0, timescale=10.0)
    _, history = dynamics.run(5_000)
    gap = np.asarray(history.dual - history.primal)
    assert gap.min() > -1e-5
    assert gap[-1] < 1e-2 * gap[0]
    # the log-likelihood is what divergence is short of the data's own entropy
    entropy = np.sum(DATA * np.log(DATA * 32))
    assert np.allclose(history.primal, entropy - np.asarray(history.divergence), atol=1e-4)


def test_a_run_goes_on():
    dynamics = ebm.MeasureDynamics(DATA, 5.0)
    whole, _ = dynamics.run(20)
    half, _ = dynamics.run(10)
    both, _ = dynamics.run(10, half)
    assert np.allclose(whole.particles, both.particles, atol=1e-6)


@pytest.mark.parametrize(
    ("data", "options", "match"),
    [
        (np.array([0.5, 0.5, 0.0]), {}, "positive probabilities"),
        (np.ones(8), {}, "positive probabilities"),
        (DATA, {"radius": -1.0}, "radius"),
        (DATA, {"timescale": 0.0}, "timescale"),
        (DATA, {"pull": -1.0}, "pull"),
        (DATA, {"num_neurons": 0}, "num_neurons"),
    ],
)
def test_bad_input(data, options, match):
    with pytest.raises(ValueError, match=match):
        ebm.MeasureDynamics(data, **({"radius": 1.0} | options))
