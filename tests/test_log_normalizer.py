"""log Z with its error, against known normalisers."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import constraints
from scipy.special import gammaln, ive
from scipy.stats import norm

import numpyro_ebm as ebm
from tests.statistics import BOUND, assert_coverage

FLAT = dist.ImproperUniform(constraints.real, (), ())
FLAT_PLANE = dist.ImproperUniform(constraints.independent(constraints.real, 1), (), (2,))


def gaussian(dim, offset=0.0):
    base = dist.Normal(0, 1).expand([dim]).to_event(1)
    return ebm.EnergyBased(lambda x: 4 * jnp.sum(x**2) + offset, base), -dim / 2 * np.log(9) - offset


def von_mises_fisher(dim, concentration):
    """log of the mean of exp(concentration * x[0]) over the uniform distribution on the sphere."""
    order = dim / 2 - 1
    bessel = np.log(ive(order, concentration)) + concentration
    d = ebm.EnergyBased(lambda x: -concentration * x[0], ebm.SphereUniform(dim))
    return d, bessel - order * np.log(concentration / 2) + gammaln(dim / 2)


def on_interval(theta):
    d = ebm.EnergyBased(lambda x: theta * x, dist.Uniform(0, 1))
    return d, np.log(-np.expm1(-theta) / theta)


def truncated_exponential():
    """On x > 0, cut off at 2."""
    d = ebm.EnergyBased(lambda x: 3 * x, dist.Uniform(0, 2))
    return d, np.log(-np.expm1(-6) / 6)


KNOWN = {
    "gaussian 1": gaussian(1),
    "gaussian 10": gaussian(10),
    "von Mises-Fisher S^2": von_mises_fisher(3, 5.0),
    "von Mises-Fisher S^14": von_mises_fisher(15, 10.0),
    "truncated exponential": truncated_exponential(),
    "interval": on_interval(-2.0),
    "up": gaussian(1, 1e4),
    "down": gaussian(2, -1e4),
}
SMALL = [name for name in KNOWN if "10" not in name and "14" not in name]


@pytest.mark.slow
@pytest.mark.parametrize("name", KNOWN)
def test_the_interval_of_smc_covers_the_truth(name):  # 200 seeds, up to 60 s
    d, truth = KNOWN[name]
    num = 800 if name == "gaussian 10" else 1_600
    runs = [ebm.log_normalizer(d, random.key(seed), num_particles=num) for seed in range(200)]
    assert_coverage([abs(run.value - truth) < 1.96 * run.stderr for run in runs], 0.95)
    assert sum(run.reliable for run in runs) >= 196


@pytest.mark.parametrize("name", SMALL)
def test_quadrature_is_exact(name):
    d, truth = KNOWN[name]
    z = ebm.log_normalizer(d, random.key(0), method="quadrature")
    assert z.reliable
    assert z.value == pytest.approx(truth, rel=1e-6)


def test_quadrature_of_kinks():
    """|x - 0.3| on N(0, 1), by the normal distribution function."""
    a = 0.3
    left = np.exp(0.5 - a) * norm.cdf(a - 1)
    right = np.exp(0.5 + a) * norm.sf(a + 1)
    exact = np.log(left + right)
    z = ebm.log_normalizer(ebm.EnergyBased(lambda x: jnp.abs(x - a), dist.Normal(0, 1)), random.key(0), "quadrature")
    assert z.value == pytest.approx(exact, rel=1e-6)


@pytest.mark.slow
def test_importance_sampling():
    d, truth = on_interval(3.0)
    runs = [ebm.log_normalizer(d, random.key(seed), "importance", num_draws=2_000) for seed in range(60)]
    assert sum(abs(run.value - truth) < 1.96 * run.stderr for run in runs) > 50
    assert all(run.reliable for run in runs)
    assert np.mean(runs[0].particles) == pytest.approx(1 / 3 - 1 / np.expm1(3), abs=0.03)
    assert not ebm.log_normalizer(gaussian(10)[0], random.key(0), "importance", num_draws=2_000).reliable


NOT_NORMALISABLE = {
    "flat": ebm.EnergyBased(lambda x: 0 * x, FLAT),
    "growing": ebm.EnergyBased(lambda x: -jnp.abs(x), FLAT),
    "growing fast": ebm.EnergyBased(lambda x: -(x**2), FLAT),
    "flat to the left": ebm.EnergyBased(jax.nn.relu, FLAT),
    "heavy tails": ebm.EnergyBased(lambda x: jnp.log1p(jnp.abs(x)), FLAT),
    "flat plane": ebm.EnergyBased(lambda x: 0 * x[0], FLAT_PLANE),
    "ridge": ebm.EnergyBased(lambda x: x[0] ** 2, FLAT_PLANE),
}


SMC, IMPORTANCE, QUADRATURE = {}, {"method": "importance"}, {"method": "quadrature", "bounds": (-10, 10)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param(name, options, marks=[] if options is not SMC or name in ("flat", "ridge") else pytest.mark.slow)
        for name in NOT_NORMALISABLE
        for options in (SMC, IMPORTANCE, QUADRATURE)
    ],
)  # by SMC: 10 s each
def test_what_has_no_normaliser_is_flagged(name, options):  # 60 s
    d = NOT_NORMALISABLE[name]
    reference = dist.Normal(0, 1) if not d.event_shape else dist.Normal(0, 1).expand([2]).to_event(1)
    if "bounds" not in options:
        options = options | {"reference": reference}
    z = ebm.log_normalizer(d, random.key(0), **options)
    assert not z.reliable
    assert z.reason


@pytest.mark.parametrize("method", ["smc", "quadrature"])
def test_an_energy_that_outgrows_its_base_is_flagged(method):
    z = ebm.log_normalizer(ebm.EnergyBased(lambda x: -(x**2), dist.Normal(0, 1)), random.key(0), method)
    assert not z.reliable
    assert not np.isfinite(z.value)


UNIT, STANDARD_NORMAL = dist.Uniform(0, 1), dist.Normal(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("energy", "base"),
    [
        (lambda x: 1.5 * jnp.log(x), UNIT),
        pytest.param(jnp.log, UNIT, marks=pytest.mark.slow),
        pytest.param(lambda x: 1.5 * jnp.log1p(-x), UNIT, marks=pytest.mark.slow),
        pytest.param(lambda x: jnp.log1p(-x), UNIT, marks=pytest.mark.slow),
        pytest.param(lambda x: jnp.log(jnp.abs(x - 0.3)), STANDARD_NORMAL, marks=pytest.mark.slow),
        pytest.param(lambda x: 1.5 * jnp.log(jnp.abs(x)), STANDARD_NORMAL, marks=pytest.mark.slow),
    ],
)  # 20 s each
def test_a_pole_is_flagged(energy, base):  # 20 s
    d = ebm.EnergyBased(energy, base)
    assert all(not ebm.log_normalizer(d, random.key(seed)).reliable for seed in range(3))


def test_quadrature_flags_a_pole_at_an_edge():
    d = ebm.EnergyBased(lambda x: 1.5 * jnp.log(x), UNIT)
    assert not ebm.log_normalizer(d, random.key(0), "quadrature").reliable


def test_a_pole_that_can_be_integrated_is_no_fault():
    z = ebm.log_normalizer(ebm.EnergyBased(lambda x: jnp.log(x) / 2, UNIT), random.key(0))
    assert z.reliable
    assert abs(z.value - np.log(2)) < 4 * z.stderr


STANDARD = ebm.EnergyBased(lambda x: x**2 / 2, dist.Normal(0, 1))
BATCH = ebm.EnergyBased(lambda x: jnp.array([1.0, 2.0, -1.0]) * x, dist.Normal(0, 1))


@pytest.mark.parametrize(
    ("base", "bounds"),
    [(dist.HalfNormal(1), (0.0, 0.5)), (dist.Uniform(0, 1), (0.2, 0.8)), (dist.Normal(0, 1), (-1, 1))],
)
def test_bounds_that_leave_out_mass_are_flagged(base, bounds):
    z = ebm.log_normalizer(ebm.EnergyBased(lambda x: 0 * x, base), random.key(0), "quadrature", bounds=bounds)
    assert not z.reliable


def test_a_base_that_nodes_miss_is_not_called_infinite():
    z = ebm.log_normalizer(ebm.EnergyBased(lambda x: 0 * x, dist.Beta(0.2, 0.2)), random.key(0), "quadrature")
    assert not z.reliable
    assert np.isfinite(z.value)


def test_few_particles_are_flagged():
    assert not ebm.log_normalizer(STANDARD, random.key(0), num_particles=16).reliable


@pytest.mark.slow
def test_an_improper_base_with_a_reference():  # 6 s
    d = ebm.EnergyBased(lambda x: x**2 / 2, FLAT)
    z = ebm.log_normalizer(d, random.key(0), reference=dist.Normal(1, 2))
    assert z.reliable
    assert abs(z.value - np.log(2 * np.pi) / 2) < 4 * z.stderr
    by_quadrature = ebm.log_normalizer(d, random.key(0), "quadrature", bounds=(-10, 10))
    assert by_quadrature.value == pytest.approx(np.log(2 * np.pi) / 2, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["smc", "quadrature", "importance"])
def test_a_batch_has_a_normaliser_for_each_element(method):  # 10 s
    d = ebm.EnergyBased(lambda x: jnp.array([1.0, 2.0, -1.0]) * x, dist.Normal(0, 1), jnp.array([[1.0], [2.0]]))
    z = ebm.log_normalizer(d, random.key(0), method)
    truth = (np.array([[1.0], [2.0]]) * np.array([1.0, 2.0, -1.0])) ** 2 / 2
    assert z.value.shape == z.reliable.shape == z.reason.shape == (2, 3)
    assert np.all(np.abs(z.value - truth) < BOUND * z.stderr + 1e-6)
    if z.particles is not None:
        assert z.particles.shape[1:] == (2, 3)


@pytest.mark.slow
def test_log_likelihood():  # 6 s
    d, _ = gaussian(1)
    x = random.normal(random.key(1), (500, 1))
    exact = np.asarray(dist.Normal(0, 1 / 3).log_prob(x[:, 0]))
    found = ebm.log_likelihood(d, x, random.key(0))
    assert found.value.shape == (500,)
    np.testing.assert_allclose(found.value - exact, found.value[0] - exact[0], atol=1e-4)
    assert abs(found.value[0] - exact[0]) < 4 * found.stderr
    exactly = ebm.log_likelihood(d, x, random.key(0), method="quadrature")
    np.testing.assert_allclose(exactly.value, exact, atol=1e-4)
    assert exactly.mean == pytest.approx(exact.mean(), abs=1e-4)
    assert exactly.mean_stderr == pytest.approx(exact.std(ddof=1) / np.sqrt(500), rel=1e-4)
    wider = ebm.log_likelihood(
        ebm.EnergyBased(lambda x: jnp.sum(x**2), dist.Normal(0, 1).expand([1]).to_event(1)), x, random.key(0)
    )
    difference, stderr = exactly.minus(wider)
    pointwise = exact - np.asarray(dist.Normal(0, 3**-0.5).log_prob(x[:, 0]))
    assert abs(difference - pointwise.mean()) < 4 * wider.stderr
    assert stderr == pytest.approx(np.hypot(pointwise.std(ddof=1) / np.sqrt(500), wider.stderr), rel=1e-3)
    again = ebm.log_likelihood(d, x, random.key(0), normalizer=ebm.log_normalizer(d, random.key(7)))
    assert again.stderr > 0


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda d: ebm.log_normalizer(d, random.key(0), method="exact"), ValueError, "method must be one of"),
        (lambda d: ebm.log_normalizer(dist.Normal(0, 1), random.key(0)), TypeError, "is of an EnergyBased"),
        (lambda d: ebm.log_normalizer(d, random.key(0), particles=3), TypeError, "particles"),
        (lambda d: ebm.log_normalizer(d, random.key(0), num_particles=0), ValueError, "num_particles"),
        (lambda d: ebm.log_normalizer(d, random.key(0), target_ess=1.0), ValueError, "target_ess"),
        (lambda d: ebm.log_normalizer(NOT_NORMALISABLE["flat"], random.key(0)), ValueError, "by reference="),
        (lambda d: ebm.log_normalizer(d, random.key(0), reference=dist.Normal(0, 1)), ValueError, "reference must be"),
        (
            lambda d: jax.jit(lambda key: ebm.log_normalizer(d, key).value)(random.key(0)),
            ValueError,
            r"outside of jax\.jit",
        ),
        (
            lambda d: ebm.log_normalizer(ebm.EnergyBased(lambda x: 0.1 * x, dist.Poisson(3.0)), random.key(0)),
            ValueError,
            "continuous",
        ),
        (lambda d: ebm.log_likelihood(d, jnp.array([[jnp.nan]]), random.key(0)), ValueError, "must be finite"),
        (
            lambda d: ebm.log_normalizer(STANDARD, random.key(0), reference=dist.HalfNormal(1)),
            ValueError,
            "must have the support",
        ),
        (
            lambda d: ebm.log_normalizer(STANDARD, random.key(0), reference=dist.Normal(jnp.zeros(3), 1)),
            ValueError,
            "must have the batch shape",
        ),
        (lambda d: ebm.log_likelihood(BATCH, jnp.zeros((7, 1)), random.key(0)), ValueError, "x must have shape"),
        (lambda d: ebm.log_likelihood(BATCH, jnp.zeros(()), random.key(0)), ValueError, "x must have shape"),
        (
            lambda d: ebm.log_likelihood(
                BATCH, jnp.zeros(3), random.key(0), normalizer=ebm.log_normalizer(STANDARD, random.key(0), "quadrature")
            ),
            ValueError,
            "normalizer is of batch shape",
        ),
        (lambda d: ebm.log_likelihood(d, jnp.zeros((3, 2)), random.key(0)), ValueError, "event shape"),
    ],
)
def test_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call(gaussian(1)[0])
