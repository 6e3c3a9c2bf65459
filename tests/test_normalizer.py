"""Tempered SMC: draws of the model, whatever its modes."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import Predictive

import numpyro_ebm as ebm
from tests.statistics import assert_mean


def bimodal(x):
    """N(-3, 1/2) and N(3, 1/2), of weights 1/4 and 3/4, over N(0, 3)."""
    parts = jnp.stack([jnp.log(0.25) - 2 * (x + 3) ** 2, jnp.log(0.75) - 2 * (x - 3) ** 2])
    return -jax.nn.logsumexp(parts, axis=0) + dist.Normal(0, 3).log_prob(x)


CASES = {
    "narrow": (lambda: ebm.EnergyBased(lambda x: 4 * x**2, dist.Normal(0, 1)), lambda x: x**2, 1 / 9, -np.log(3)),
    "bimodal": (
        lambda: ebm.EnergyBased(bimodal, dist.Normal(0, 3)),
        lambda x: x > 0,
        0.75,
        np.log(np.pi / 2) / 2,
    ),
    "interval": (
        lambda: ebm.EnergyBased(lambda x: 3 * x, dist.Uniform(0, 1)),
        lambda x: x,
        1 / 3 - 1 / (np.exp(3) - 1),
        np.log((1 - np.exp(-3)) / 3),
    ),
    "sphere": (
        lambda: ebm.EnergyBased(lambda x: -2 * x[2], ebm.SphereUniform(3)),
        lambda x: x[..., 2],
        1 / np.tanh(2) - 1 / 2,
        np.log(np.sinh(2) / 2),
    ),
    "batch": (
        lambda: ebm.EnergyBased(lambda x: jnp.array([1.0, 2.0]) * x, dist.Normal(jnp.array([0.0, 100.0]), 1.0)),
        lambda x: x,
        np.array([-1.0, 98.0]),
        np.array([0.5, -198.0]),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [n if n == "sphere" else pytest.param(n, marks=pytest.mark.slow) for n in CASES])
def test_particles_are_draws_of_the_model(name):  # 25 s
    make, statistic, truth, log_z = CASES[name]
    d = make()
    runs = [ebm.smc_sampler(d, random.key(seed), num_particles=1000, num_moves=15) for seed in range(20)]
    means = np.stack([np.mean(statistic(run.particles), 0) for run in runs])
    assert_mean(means.reshape(4, 5, *means.shape[1:]), truth)
    estimates = np.stack([run.log_normalizer for run in runs])
    assert_mean(np.exp(estimates - log_z).reshape(4, 5, *estimates.shape[1:]), 1.0)


@pytest.mark.slow
@pytest.mark.case("A2")
def test_predictive_draws_through_particles():  # 5 s
    d = CASES["narrow"][0]()
    fitted = d.with_sampler(ebm.smc_sampler(d, random.key(0), num_particles=20_000))

    def model():
        with numpyro.plate("rows", 5):
            numpyro.sample("x", fitted)

    draws = Predictive(model, num_samples=4000)(random.key(1))["x"]
    assert draws.shape == (4000, 5)
    assert_mean(draws.T[:, :, None] ** 2, 1 / 9)


@pytest.mark.slow  # 12 s
def test_predictive_draws_classes_of_a_joint_energy():
    joint = ebm.JointEnergy(lambda x: jnp.array([3.0, -3.0]) * x, dist.Normal(0, 1))
    d = joint.conditional(jnp.array([0, 1, 1]))
    draws = d.with_sampler(ebm.smc_sampler(d, random.key(0))).sample(random.key(1), (1000,))
    np.testing.assert_allclose(draws.mean(0), [3, -3, -3], atol=0.25)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ebm.smc_sampler(
                ebm.EnergyBased(lambda x: x**2, dist.ImproperUniform(constraints.real, (), ())), random.key(0)
            ),
            "starts from the base",
        ),
        (
            lambda: ebm.smc_sampler(ebm.EnergyBased(lambda x: jnp.log(x), dist.Normal(-5, 0.1)), random.key(0)),
            "did not get from the base to the model",
        ),
        (lambda: ebm.smc_sampler(CASES["narrow"][0](), random.key(0), num_particles=0), "num_particles"),
        (
            lambda: ebm.smc_sampler(CASES["narrow"][0](), random.key(0), num_particles=10)(
                random.key(0), CASES["sphere"][0](), (3,)
            ),
            "the particles have shape",
        ),
    ],
)
def test_what_it_can_not_do_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
