"""The estimated gradient against the exact gradient of the log-likelihood."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

import numpyro_ebm as ebm
from tests.estimators.gradients import gradients
from tests.statistics import assert_mean

THETA = 0.7


def site(d, x):
    numpyro.sample("x", d, obs=x)


def gaussian():
    """Energy theta x^2 / 2 on N(0, 1): log Z = -log(1 + theta) / 2."""
    theta = numpyro.param("theta", THETA)
    return ebm.EnergyBased(lambda x: theta * x**2 / 2, dist.Normal(0, 1))


def exponential():
    """Energy theta x on Exp(1), skewed and bounded: log Z = -log(1 + theta)."""
    theta = numpyro.param("theta", THETA)
    return ebm.EnergyBased(lambda x: theta * x, dist.Exponential(1.0))


def von_mises_fisher():
    """Energy -theta x_3 on S^2: log Z = log(sinh(theta) / theta)."""
    theta = numpyro.param("theta", THETA)
    return ebm.EnergyBased(lambda x: -theta * x[2], ebm.SphereUniform(3))


def learned_base():
    """No energy to learn, but the base: the exponential of rate 1 + theta times exp(-x)."""
    theta = numpyro.param("theta", THETA)
    return ebm.EnergyBased(lambda x: x, dist.Exponential(1 + theta))


def warm():
    """A learned inverse temperature."""
    theta = numpyro.param("theta", THETA)
    return ebm.EnergyBased(lambda x: x**2 / 2, dist.Normal(0, 1), inverse_temperature=theta)


# x, and the gradient of minus the log-likelihood per observation
CASES = {
    "gaussian": (gaussian, jnp.linspace(-1.5, 2, 12), lambda x: x**2 / 2 - 1 / (2 * (1 + THETA)), 0.6),
    "exponential": (exponential, jnp.linspace(0.1, 3, 12), lambda x: x - 1 / (1 + THETA), 0.5),
    "von Mises-Fisher": (
        von_mises_fisher,
        jnp.stack([jnp.sqrt(1 - jnp.linspace(-0.5, 1, 12) ** 2), jnp.zeros(12), jnp.linspace(-0.5, 1, 12)], -1),
        lambda x: -x[:, 2] + 1 / np.tanh(THETA) - 1 / THETA,
        0.5,
    ),
    "learned base": (learned_base, jnp.linspace(0.1, 3, 12), lambda x: x - 1 / (2 + THETA), 0.4),
    "inverse temperature": (warm, jnp.linspace(-1.5, 2, 12), lambda x: x**2 / 2 - 1 / (2 * (1 + THETA)), 0.6),
}


def pool(step_size, **kwargs):
    return ebm.ChainPool(ebm.kernels.mala(step_size), 50, num_steps=3, **kwargs)


@pytest.mark.parametrize("simultaneous", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_gradient_is_unbiased(case, simultaneous):
    make, x, exact, step_size = CASES[case]

    def model(x):
        d = make()
        with numpyro.plate("data", 12):
            site(d, x)

    series = gradients(model, ebm.ContrastiveDivergence(pool(step_size), simultaneous), x)
    assert_mean(series, exact(x).sum())


def test_gradient_is_unbiased_with_a_part_of_the_pool_drawn():
    _make, x, exact, step_size = CASES["exponential"]
    estimator = ebm.ContrastiveDivergence(pool(step_size, num_chains=20))
    assert_mean(gradients(plated, estimator, x), exact(x).sum())


def plated(x):
    d = exponential()
    with numpyro.plate("data", 12):
        site(d, x)


def subsampled(x):
    d = exponential()
    with numpyro.plate("data", 12, subsample_size=4):
        site(d, numpyro.subsample(x, event_dim=0))


def nested(x):
    d = exponential()
    with numpyro.plate("columns", 4, dim=-1), numpyro.plate("rows", 3, dim=-2):
        site(d, x.reshape(3, 4))


def to_event(x):
    d = exponential()
    with numpyro.plate("rows", 3):
        site(d.expand([3, 4]).to_event(1), x.reshape(3, 4))


def without_a_plate(x):
    site(exponential(), x)


def masked_columns(x):
    """A mask of fewer dimensions than the plates, and restarts that must not meet what it hides."""
    d = exponential()
    x = x.reshape(3, 4).at[:, 3].set(1e4)
    with numpyro.plate("rows", 3, dim=-2), numpyro.plate("columns", 4, dim=-1), handlers.mask(mask=jnp.arange(4) < 3):
        site(d, x)


def masked(x):
    d = exponential()
    with numpyro.plate("data", 12), handlers.mask(mask=jnp.arange(12) < 5):
        site(d, x)


def scaled(x):
    d = exponential()
    with handlers.scale(scale=0.25), numpyro.plate("data", 12):
        site(d, x)


MODELS = {
    "plate": plated,
    "subsample": subsampled,
    "nested": nested,
    "to_event": to_event,
    "no plate": without_a_plate,
    "mask of columns": masked_columns,
    "mask": masked,
    "scale": scaled,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_gradient_is_unbiased_in_every_place_of_a_model(name):  # 15 s
    _, x, exact, step_size = CASES["exponential"]
    terms = exact(x)
    special = {
        "mask": terms[:5].sum(),
        "mask of columns": terms.reshape(3, 4)[:, :3].sum(),
        "scale": 0.25 * terms.sum(),
    }
    expected = special.get(name, terms.sum())
    series = gradients(MODELS[name], ebm.ContrastiveDivergence(pool(step_size)), x)
    assert_mean(series, expected)


@pytest.mark.slow
def test_gradient_is_unbiased_for_a_batch_of_energies():  # 5 s
    """Each observation has an energy of its own: theta * c_n * x on Exp(1)."""
    slopes = jnp.linspace(0.5, 2, 12)
    x = jnp.linspace(0.1, 3, 12)

    def model(x):
        theta = numpyro.param("theta", THETA)
        with numpyro.plate("data", 12):
            site(ebm.EnergyBased(lambda x: theta * slopes * x, dist.Exponential(1.0)), x)

    series = gradients(model, ebm.ContrastiveDivergence(pool(0.3)), x)
    assert_mean(series, jnp.sum(slopes * (x - 1 / (1 + THETA * slopes))))


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 5, 12])
def test_gradient_is_unbiased_for_a_batch_of_energies_under_subsampling(size):  # 20 s
    """Each observation has its own energy, and its chains are moved only when it is drawn."""
    slopes = jnp.linspace(0.2, 4, 12)
    x = jnp.linspace(0.1, 3, 12)

    def model(x):
        theta = numpyro.param("theta", THETA)
        with numpyro.plate("data", 12, subsample_size=size):
            c, batch = numpyro.subsample(slopes, event_dim=0), numpyro.subsample(x, event_dim=0)
            site(ebm.EnergyBased(lambda x: theta * c * x, dist.Exponential(1.0)), batch)

    estimator = ebm.ContrastiveDivergence(pool(0.3))
    series = gradients(model, estimator, x, num_updates=800, burn_in=300)
    assert_mean(series, jnp.sum(slopes * (x - 1 / (1 + THETA * slopes))))


@pytest.mark.slow
def test_gradient_is_unbiased_for_events_of_their_own_energies_under_subsampling():  # 5 s
    """to_event hides a dimension of the energy's batch from the plate."""
    slopes = jnp.linspace(0.5, 2, 12).reshape(6, 2)
    x = jnp.linspace(0.1, 3, 12).reshape(6, 2)

    def model(x):
        theta = numpyro.param("theta", THETA)
        with numpyro.plate("data", 6, subsample_size=2):
            c, batch = numpyro.subsample(slopes, event_dim=1), numpyro.subsample(x, event_dim=1)
            site(ebm.EnergyBased(lambda x: theta * c * x, dist.Exponential(1.0)).to_event(1), batch)

    series = gradients(model, ebm.ContrastiveDivergence(pool(0.3)), x, num_updates=500)
    assert_mean(series, jnp.sum(slopes * (x - 1 / (1 + THETA * slopes))))


@pytest.mark.slow
def test_gradient_is_unbiased_for_an_energy_of_each_group():  # 5 s
    """Batch shape (3, 1) in plates (3, 4): one set of chains for each row."""
    slopes = jnp.array([[0.5], [1.0], [2.0]])
    x = jnp.linspace(0.1, 3, 12).reshape(3, 4)

    def model(x):
        theta = numpyro.param("theta", THETA)
        with numpyro.plate("rows", 3, dim=-2), numpyro.plate("columns", 4, dim=-1):
            site(ebm.EnergyBased(lambda x: theta * slopes * x, dist.Exponential(1.0)), x)

    series = gradients(model, ebm.ContrastiveDivergence(pool(0.3)), x)
    assert_mean(series, jnp.sum(slopes * (x - 1 / (1 + THETA * slopes))))


@pytest.mark.slow
def test_restarts_of_groups_are_at_their_own_observations():  # 10 s
    x = jnp.arange(12.0).reshape(3, 4) + 100

    def model(x):
        slopes = numpyro.param("theta", jnp.ones((3, 1)))
        with numpyro.plate("rows", 3, dim=-2), numpyro.plate("columns", 4, dim=-1):
            site(ebm.EnergyBased(lambda x: slopes * x, dist.Normal(0, 1)), x)

    still = ebm.ChainPool(ebm.kernels.ula(1e-14), 50, restart_prob=1.0)
    svi = SVI(ebm.estimate(model, ebm.ContrastiveDivergence(still)), lambda x: None, optax.sgd(0.0), Trace_ELBO())
    state, _ = svi.update(svi.init(random.key(0), x), x)
    position = state.mutable_state["x$chains"]["state"].position
    assert position.shape == (50, 3, 1)
    for row in range(3):
        assert set(np.round(np.asarray(position[:, row, 0]))) == set(np.asarray(x[row]))


@pytest.mark.parametrize("loss", [Trace_ELBO(), TraceMeanField_ELBO()], ids=lambda loss: type(loss).__name__)
def test_gradient_is_unbiased_in_double_precision(loss):
    with jax.enable_x64(True):
        _, x, exact, step_size = CASES["exponential"]
        x = jnp.asarray(np.asarray(x, np.float64))
        series = gradients(plated, ebm.ContrastiveDivergence(pool(step_size)), x, loss=loss)
        assert series.dtype == jnp.float64
        assert_mean(series, exact(x).sum())


@pytest.mark.parametrize("simultaneous", [False, True])
@pytest.mark.case("A11")
def test_loss_has_the_gradient_of_the_contrast(simultaneous):
    """Energy theta x, data at 0.7, chains at 0.2: 0.5 exactly, and nothing through the chains."""

    def model(x):
        theta = numpyro.param("theta", 0.3)
        with numpyro.plate("data", 1):
            site(ebm.EnergyBased(lambda x: theta * x, dist.Uniform(0, 1)), x)

    still = ebm.ChainPool(ebm.kernels.ula(1e-14), 8, init=lambda key, shape: jnp.full(shape, 0.2))
    series = gradients(
        model, ebm.ContrastiveDivergence(still, simultaneous), jnp.array([0.7]), num_updates=1, burn_in=0, num_series=1
    )
    np.testing.assert_allclose(series, 0.5, atol=2e-6)


def test_the_gap_penalty_is_the_squared_mean_contrast_of_what_is_not_masked():
    """Energy theta x, theta = 0.3, data at 0.7 and 0.5, chains at 0.2: loss 0.8 theta + 2 weight (0.4 theta)^2."""

    def model(x):
        theta = numpyro.param("theta", 0.3)
        with numpyro.plate("data", 3), handlers.mask(mask=jnp.arange(3) < 2):
            site(ebm.EnergyBased(lambda x: theta * x, dist.Uniform(0, 1)), x)

    still = ebm.ChainPool(ebm.kernels.ula(1e-14), 8, init=lambda key, shape: jnp.full(shape, 0.2))
    estimator = ebm.ContrastiveDivergence(still, gap_penalty=2.0)
    series = gradients(model, estimator, jnp.array([0.7, 0.5, 0.9]), num_updates=1, burn_in=0, num_series=1)
    np.testing.assert_allclose(series, 0.8 + 4 * 0.16 * 2 * 0.3, rtol=1e-5)
    with pytest.raises(ValueError, match="gap_penalty"):
        ebm.ContrastiveDivergence(gap_penalty=-1.0)


def test_needs_a_pool():
    with pytest.raises(TypeError, match="pool must be a ChainPool"):
        ebm.ContrastiveDivergence(ebm.kernels.mala(0.1))
