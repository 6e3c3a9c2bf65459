"""The MMD flow: its kernel, and its agreement with maximum likelihood in the lazy ball."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random

import numpyro_ebm as ebm
from tests.statistics import BOUND

SPHERE = ebm.SphereUniform(3)


def cap(num, seed=0):
    """Draws about one pole."""
    x = random.normal(random.key(seed), (num, 3)) * 0.6 + jnp.array([1.0, 0.0, 0.0])
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def test_kernel_is_the_mean_over_features():
    features = SPHERE.sample(random.key(0), (200_000,))
    for seed in range(3):
        x, y = random.normal(random.key(seed + 1), (2, 3))
        products = jax.nn.relu(features @ x) * jax.nn.relu(features @ y)
        assert abs(float(ebm.arc_cosine_kernel(x, y)) - float(products.mean())) < BOUND * float(
            products.std()
        ) / np.sqrt(200_000)


def test_kernel_is_differentiable_where_both_are_equal():
    x = jnp.array([1.0, 2.0, 3.0])
    gradient = jax.grad(ebm.arc_cosine_kernel)(x, x)
    # k(x, y) is linear in x's length, and k(x, x) = |x|^2 / 2d
    assert np.allclose(gradient, x / 6, atol=1e-5)
    assert np.all(np.isfinite(jax.grad(ebm.arc_cosine_kernel)(x, jnp.zeros(3))))


@pytest.mark.slow
def test_witness_is_an_energy():  # 8 s
    x = cap(50)
    energy = ebm.infer.MMDWitness(SPHERE.sample(random.key(0), (40,)), x, 3.0, ebm.arc_cosine_kernel)
    points = cap(6, seed=1).reshape(2, 3, 3)
    assert energy(points).shape == (2, 3)
    assert np.allclose(energy(points)[1, 2], energy(points[1, 2]), atol=1e-6)
    d = ebm.EnergyBased(energy, SPHERE)
    assert d.score(points).shape == (2, 3, 3)


@pytest.mark.slow
def test_particles_sample_the_energy_of_the_ball():
    """20 s. At a fixed radius the flow ends where maximum likelihood over the F2 ball does: b = R / MMD, and nu = exp(-f)."""
    x = cap(500)
    flow = ebm.MMDFlow(SPHERE, radius=3.0, step_size=2e-2, num_chains=1_000)
    result = flow.run(random.key(1), 300, x)
    fitted = ebm.EnergyBased(result.energy, SPHERE)
    exact = ebm.smc_sampler(fitted, random.key(2), 4_000).particles
    for moment in (lambda x: x, lambda x: x**2):
        means = [moment(sample).mean(0) for sample in (result.particles, exact)]
        assert np.all(np.abs(means[0] - means[1]) < BOUND / np.sqrt(1_000))
    assert np.isclose(result.inverse_temperatures[-1], 3.0 / result.discrepancies[-1], rtol=1e-4)


def test_without_noise_the_discrepancy_falls():
    flow = ebm.MMDFlow(SPHERE, inverse_temperature=np.inf, step_size=1.0, num_chains=100)
    result = flow.run(random.key(0), 200, cap(200))
    assert result.discrepancies[-1] < 0.1 * result.discrepancies[0]
    assert np.all(np.diff(np.asarray(result.discrepancies)) < 1e-3)
    assert np.allclose(jnp.linalg.norm(result.particles, axis=-1), 1, atol=1e-5)


@pytest.mark.slow
def test_on_euclidean_space():  # 10 s
    def gaussian(x, y):
        return jnp.exp(-jnp.sum((x - y) ** 2) / 2)

    base = dist.Normal(0, 2).expand([2]).to_event(1)
    x = random.normal(random.key(0), (200, 2)) * 0.5 + 1.0
    flow = ebm.MMDFlow(base, gaussian, radius=10.0, step_size=1e-2, num_chains=200)
    result = flow.run(random.key(1), 600, x)
    assert np.all(np.abs(result.particles.mean(0) - 1.0) < 0.5)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({}, "either radius or inverse_temperature"),
        ({"radius": 1.0, "inverse_temperature": 1.0}, "either"),
        ({"radius": -1.0}, "radius"),
        ({"inverse_temperature": -1.0}, "inverse_temperature"),
        ({"radius": 1.0, "step_size": 0.0}, "step_size"),
        ({"radius": 1.0, "num_chains": 0}, "num_chains"),
        ({"radius": 1.0, "base": dist.Uniform(0, 1).expand([2]).to_event(1)}, "R\\^d and the unit sphere"),
        ({"radius": 1.0, "base": dist.Normal(0, 1)}, "over vectors"),
    ],
)
def test_bad_input(options, match):
    options = {"base": SPHERE, "step_size": 1e-2, "num_chains": 10} | options
    with pytest.raises(ValueError, match=match):
        ebm.MMDFlow(options.pop("base"), **options)


def test_bad_data():
    flow = ebm.MMDFlow(SPHERE, radius=1.0, step_size=1e-2, num_chains=10)
    with pytest.raises(ValueError, match="x"):
        flow.run(random.key(0), 2, jnp.ones((4, 3)))
