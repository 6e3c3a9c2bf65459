"""Divergences against closed forms: normals, and von Mises-Fisher densities of unknown normaliser."""

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from scipy.special import ive
from scipy.stats import norm

import numpyro_ebm as ebm
from tests.statistics import BOUND


def normal(scale):
    """A normal of that scale as an energy on a standard normal."""
    return ebm.EnergyBased(lambda x: x**2 / 2 * (1 / scale**2 - 1), dist.Normal(0, 1))


def vmf(concentration):
    return ebm.EnergyBased(lambda x: -concentration * x[0], ebm.SphereUniform(3))


def vmf_divergence(a, b):
    def log_z(k):
        return k + np.log(-np.expm1(-2 * k) / (2 * k))

    return (a - b) * (1 / np.tanh(a) - 1 / a) - log_z(a) + log_z(b)


@pytest.mark.slow
@pytest.mark.parametrize("known", [True, False])
def test_divergence_of_normals(known):  # 12 s
    p, q = (dist.Normal(0, 0.8) if known else normal(0.8)), dist.Normal(0, 1)
    kl = ebm.kl_divergence(p, q, random.key(0))
    assert kl.reliable
    assert 0 < kl.stderr < 0.01
    assert abs(kl.value - (0.64 / 2 - 0.5 - np.log(0.8))) < 4 * kl.stderr


@pytest.mark.slow
def test_divergence_of_von_mises_fisher():  # 7 s
    kl = ebm.kl_divergence(vmf(4.0), vmf(2.0), random.key(1))
    assert kl.reliable
    assert abs(kl.value - vmf_divergence(4.0, 2.0)) < 4 * kl.stderr


@pytest.mark.slow
def test_z_scores_of_divergences():
    """20 s. Stated errors are those seen: the mean of z over seeds, and their scatter."""
    truth = np.log(0.8) + 1 / 1.28 - 0.5
    runs = [
        ebm.kl_divergence(dist.Normal(0, 1), dist.Normal(0, 0.8), random.key(seed), num_draws=2_000)
        for seed in range(200)
    ]
    z = np.array([(run.value - truth) / run.stderr for run in runs])
    assert abs(z.mean()) < BOUND / np.sqrt(200)
    assert 0.75 < z.std() < 1.25


def test_total_variation_of_normals():
    tv = ebm.total_variation(dist.Normal(0, 1), dist.Normal(0.5, 1), random.key(0))
    assert abs(tv.value - (2 * norm.cdf(0.25) - 1)) < 4 * tv.stderr
    assert tv.stderr < 0.01


def test_densities_that_are_equal():
    p = vmf(3.0)
    for distance in (ebm.kl_divergence, ebm.total_variation):
        assert abs(distance(p, p, random.key(0)).value) < 1e-6


@pytest.mark.slow
def test_what_is_elsewhere_is_not_reliable():  # 5 s
    kl = ebm.kl_divergence(normal(0.05), dist.Normal(0, 1), random.key(0))
    assert not kl.reliable
    assert "Pareto" in kl.reason


@pytest.mark.slow
def test_offsets_do_not_matter():  # 7 s
    p = ebm.EnergyBased(lambda x: -4.0 * x[0] + 1e3, ebm.SphereUniform(3))
    kl = ebm.kl_divergence(p, vmf(2.0), random.key(1))
    assert abs(kl.value - vmf_divergence(4.0, 2.0)) < 4 * kl.stderr + 1e-3


def test_bessel_agrees():
    """The closed form of this test against SciPy's Bessel function of order 1/2."""
    k = 3.0
    assert np.isclose(k + np.log(-np.expm1(-2 * k) / (2 * k)), np.log(ive(0.5, k) * np.sqrt(np.pi / (2 * k))) + k)


def test_other_events_are_refused():
    with pytest.raises(ValueError, match="same events"):
        ebm.kl_divergence(dist.Normal(0, 1), vmf(1.0), random.key(0))
    with pytest.raises(TypeError, match="p must be a distribution"):
        ebm.total_variation(jnp.zeros(3), vmf(1.0), random.key(0))
