"""Quadrature against normalisers that are known."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.distributions import constraints
from numpyro.infer import SVI, Trace_ELBO

import numpyro_ebm as ebm

FLAT = dist.ImproperUniform(constraints.real, (), ())
PLANE = dist.Normal(1, 2).expand([2]).to_event(1)

# each with log Z
CASES = {
    "normal": (lambda: ebm.EnergyBased(lambda x: 4 * x**2, dist.Normal(0, 1)), -np.log(3), {}),
    "off centre": (lambda: ebm.EnergyBased(lambda x: 3 * x, dist.Normal(100, 0.1)), -300 + 0.045, {}),
    "interval": (lambda: ebm.EnergyBased(lambda x: 3 * x, dist.Uniform(0, 1)), np.log((1 - np.exp(-3)) / 3), {}),
    "half-line": (lambda: ebm.EnergyBased(lambda x: 0.7 * x, dist.Exponential(1.0)), -np.log(1.7), {}),
    "plane": (
        lambda: ebm.EnergyBased(lambda x: jnp.sum((x - 1) ** 2) / 2, PLANE),
        -np.log(5),
        {},
    ),
    "batch": (
        lambda: ebm.EnergyBased(lambda x: jnp.array([1.0, 4.0]) * x**2, dist.Normal(0, 1)),
        -np.log([3, 9]) / 2,
        {},
    ),
    "batch of bases": (
        lambda: ebm.EnergyBased(lambda x: x, dist.Normal(jnp.array([[0.0], [5.0]]), 1.0)),
        np.array([[0.5], [-4.5]]),
        {},
    ),
    "S^2": (lambda: ebm.EnergyBased(lambda x: -2 * x[2], ebm.SphereUniform(3)), np.log(np.sinh(2) / 2), {}),
    "S^2, sideways": (lambda: ebm.EnergyBased(lambda x: -2 * x[0], ebm.SphereUniform(3)), np.log(np.sinh(2) / 2), {}),
    "S^1": (lambda: ebm.EnergyBased(lambda x: -2 * x[0], ebm.SphereUniform(2)), np.log(np.i0(2.0)), {}),
    "flat": (lambda: ebm.EnergyBased(lambda x: x**2 / 2, FLAT), np.log(2 * np.pi) / 2, {"bounds": (-9, 9)}),
    "flat interval": (
        lambda: ebm.EnergyBased(lambda x: x, dist.ImproperUniform(constraints.interval(0.0, 10.0), (), ())),
        np.log(1 - np.exp(-10)),
        {},
    ),
    "heavy tails": (lambda: ebm.EnergyBased(lambda x: x**2 / 2, dist.Cauchy(0, 1)), None, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_log_normalizer_is_exact(name):
    with jax.enable_x64(True):
        make, exact, options = CASES[name]
        log_z = ebm.Quadrature(**options).log_normalizer(make())
        if exact is None:  # E exp(-x^2 / 2) of a Cauchy: e^{1/2} erfc(1 / sqrt 2)
            exact = 0.5 + float(jnp.log(jax.scipy.special.erfc(jnp.sqrt(0.5))))
        assert log_z.shape == make().batch_shape
        np.testing.assert_allclose(log_z, exact, atol=1e-6)


def test_its_gradient_trains_to_the_maximum_of_the_likelihood():
    x = random.exponential(random.key(0), (50,)) / 3

    def model(x):
        theta = numpyro.param("theta", 1.0)
        with numpyro.plate("data", 50):
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x, dist.Exponential(1.0)), obs=x)

    svi = SVI(ebm.estimate(model, ebm.Quadrature()), lambda x: None, optax.adam(3e-2), Trace_ELBO())
    result = svi.run(random.key(0), 800, x, progress_bar=False)
    theta = 1 / float(x.mean()) - 1
    assert float(result.params["theta"]) == pytest.approx(theta, rel=1e-3)
    # here the loss is the negative log-likelihood itself
    exact = dist.Exponential(1 + result.params["theta"]).log_prob(x).sum()
    np.testing.assert_allclose(-svi.evaluate(result.state, x), exact, rtol=1e-4)


@pytest.mark.slow
def test_a_guide_gets_the_exact_posterior_of_an_energy_that_depends_on_a_latent():  # 5 s
    """Unlike that of chains, this gradient is exact at each draw of the guide."""
    from numpyro.infer.autoguide import AutoNormal

    x = random.normal(random.key(0), (50,)) * 0.6

    def model(x):
        theta = numpyro.sample("theta", dist.Gamma(1, 1))
        with numpyro.plate("data", 50):
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2 / 2, dist.Normal(0, 20.0)), obs=x)

    estimated = ebm.estimate(model, ebm.Quadrature())
    guide = AutoNormal(estimated)
    svi = SVI(estimated, guide, optax.adam(1e-2), Trace_ELBO())
    params = svi.run(random.key(0), 3000, x, progress_bar=False).params
    draws = guide.sample_posterior(random.key(1), params, sample_shape=(4000,))["theta"]
    shape, rate = 1 + 25, 1 + float(jnp.sum(x**2)) / 2
    assert float(draws.mean()) == pytest.approx(shape / rate, rel=0.05)
    assert float(draws.std()) == pytest.approx(np.sqrt(shape) / rate, rel=0.15)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ebm.Quadrature(0), "num_points must be a positive integer"),
        (lambda: ebm.Quadrature(5), "at least 10"),
        (
            lambda: ebm.Quadrature().log_normalizer(ebm.EnergyBased(lambda x: 0 * x, dist.Cauchy(1000.0, 1.0))),
            "the nodes miss the base Cauchy",
        ),
        (lambda: ebm.Quadrature(bounds=(1, 0)), "low < high"),
        (lambda: ebm.Quadrature(bounds=3), "bounds must be"),
        (lambda: ebm.Quadrature().log_normalizer(CASES["flat"][0]()), "which ImproperUniform lacks: say where"),
        (
            lambda: ebm.Quadrature().log_normalizer(
                ebm.EnergyBased(lambda x: x[0], dist.Normal(0, 1).expand([3]).to_event(1))
            ),
            "one or two dimensions",
        ),
        (
            lambda: ebm.Quadrature().log_normalizer(ebm.EnergyBased(lambda x: x[0], ebm.SphereUniform(4))),
            "one in 4 dimensions",
        ),
        (
            lambda: ebm.Quadrature(bounds=(0, 1)).log_normalizer(CASES["S^2"][0]()),
            "bounds are for R",
        ),
    ],
)
def test_what_it_can_not_do_is_said(make, message):
    with pytest.raises(ValueError, match=message):
        make()
