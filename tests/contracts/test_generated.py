"""Input of any size and scale gives the right number, or an error of ours before work starts."""

import contextlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from hypothesis import strategies as st
from jax import random
from numpyro.infer import SVI, Trace_ELBO

import numpyro_ebm as ebm
from numpyro_ebm.distributions import validate_observations
from tests.contracts.generated import SCALES, floats, generated
from tests.contracts.parts import Quadratic
from tests.statistics import BOUND

LARGEST = float(np.finfo(np.float32).max)


def assert_same(found, expected, scale=0.0):
    """Equal up to rounding of terms as large as `scale`; out of the range of float32, infinite."""
    found = np.asarray(found, np.float64)
    expected = np.asarray(expected, np.float64)
    near = np.abs(found - expected) <= 1e-4 * (np.abs(expected) + scale) + 1e-37
    near |= (np.abs(expected) + scale > LARGEST / 100) & ~np.isfinite(found)
    assert np.all(near), (found, expected)


def unit(vectors):
    norm = np.linalg.norm(vectors, axis=-1, keepdims=True)
    axis = np.zeros_like(vectors)
    axis[..., 0] = 1
    return np.where(norm > 1e-3, vectors / np.where(norm > 1e-3, norm, 1), axis)


@jax.jit
def f1(features, log_weights, signs, radius, x):
    energy = ebm.F1Energy(features, log_weights, signs, radius)
    return energy(x), energy.norm


@jax.jit
def f2(features, weights, radius, x):
    energy = ebm.F2Energy(features, weights, radius, power=2)
    return energy(x), energy.norm


SIZES = st.sampled_from([(1, 1), (1, 3), (4, 1), (4, 3)])
NETWORKS = SIZES.flatmap(
    lambda size: st.tuples(floats(*size), floats(size[0]), floats(size[0]), floats(3, size[1]), SCALES, SCALES)
)


@generated(25, 400, network=NETWORKS)
def test_shallow_energies_are_the_sum_over_neurons(network):
    """Slow: 10 s."""
    features, weights, signs, x, radius, scale = network
    features, x = unit(features.astype(np.float64)), x.astype(np.float64) * scale
    signs = np.where(signs < 0, -1.0, 1.0)
    log_weights = -np.abs(weights.astype(np.float64))
    single = [a.astype(np.float32) for a in (features, log_weights, signs)]
    radius, x = np.float32(radius), x.astype(np.float32)
    terms = np.maximum(x.astype(np.float64) @ features.T, 0) * np.exp(log_weights) * np.float64(radius)
    value, norm = f1(*single, radius, x)
    assert_same(value, np.mean(terms * signs, -1), np.mean(np.abs(x), -1) * np.float64(radius))
    assert_same(norm, np.float64(radius) * np.mean(np.exp(log_weights)))
    assert ebm.F1Energy(*single, radius).batch_shape == ()

    bounded = (weights / 4).astype(np.float64) * np.float64(radius)
    value, norm = f2(single[0], bounded.astype(np.float32), radius, x)
    squares = np.maximum(x.astype(np.float64) @ features.T, 0) ** 2
    size = np.sum(np.float64(x) ** 2, -1)
    assert_same(value, np.mean(squares * bounded, -1), size * np.max(np.abs(bounded)) + size)
    assert_same(norm, np.sqrt(np.mean(bounded**2)))
    ebm.F2Energy(single[0], bounded.astype(np.float32), radius)


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (0, 0)])
def test_networks_without_neurons_are_refused(shape):
    for make in (
        lambda: ebm.F1Energy(np.zeros(shape), np.zeros(shape[:1]), np.ones(shape[:1]), 1.0),
        lambda: ebm.F2Energy(np.zeros(shape), np.zeros(shape[:1]), 1.0),
    ):
        with pytest.raises(ValueError, match="must hold a neuron or more"):
            make()


@jax.jit
def density(precision, loc, scale, x):
    d = ebm.EnergyBased(lambda x: precision * jnp.sum(jnp.abs(x)), dist.Normal(loc, scale).to_event(1))
    return d.log_prob(x), d.score(x)


@generated(25, 400, x=floats(4, 3), loc=floats(3), precision=floats(1, low=0), scale=SCALES)
def test_densities_and_scores_are_those_of_double_precision(x, loc, precision, scale):
    """Slow: 10 s."""
    scale = np.float32(scale)
    x, loc, precision = x * scale, loc * scale, precision[0] / scale
    value, score = density(precision, loc, scale, x)
    x, loc, precision, scale = (np.asarray(a, np.float64) for a in (x, loc, precision, scale))
    z = (x - loc) / scale
    normal = -(z**2) / 2 - np.log(scale) - np.log(2 * np.pi) / 2
    energy = precision * np.sum(np.abs(x), -1)
    assert_same(value, np.sum(normal, -1) - energy, np.sum(np.abs(normal), -1) + energy + np.sum(z**2, -1))
    rounding = np.abs(x / scale) / scale + np.abs(loc / scale) / scale
    assert_same(score, -z / scale - precision * np.where(x >= 0, 1, -1), rounding + precision)


@generated(
    40, 500, x=st.sampled_from([(0, 2), (1, 2), (2, 2), (5, 2), (5,)]).flatmap(lambda s: floats(*s)), scale=SCALES
)
def test_tables_are_standardised_or_named(x, scale):
    """Slow: 5 s."""
    x = x * np.float32(scale)
    reference = x.astype(np.float64)
    too_small = len(x) < 2
    constant = not too_small and np.any(reference.std(0) <= 1e-6 * np.abs(reference).max(0))
    if too_small or constant:
        with pytest.raises(ValueError, match="two rows or more" if too_small else r"column \d of x is constant"):
            ebm.standardized(Quadratic(1.0), x)
        return
    d = ebm.standardized(lambda z: jnp.sum(z), x)
    assert_same(d.energy.mean, reference.mean(0), np.abs(reference).max())
    assert_same(d.energy.deviation, reference.std(0))


def model(x):
    theta = numpyro.param("theta", jnp.full(3, 0.5))
    numpyro.sample("x", ebm.EnergyBased(lambda x: theta @ x**2, NORMAL).expand(x.shape[:1]).to_event(1), obs=x)


NORMAL = dist.Normal(0, 1).expand([3]).to_event(1)
MORE_CHAINS = ebm.ChainPool(ebm.kernels.mala(0.1), pool_size=7, num_chains=3, restart_prob=0.5, init="data")
TRAINERS = {
    name: SVI(ebm.estimate(model, estimator), lambda x: None, optax.sgd(1e-3), Trace_ELBO())
    for name, estimator in {
        "contrastive": ebm.ContrastiveDivergence(MORE_CHAINS),
        "softmax": ebm.SoftmaxContrastive(MORE_CHAINS),
        "score": ebm.ScoreMatching(),
    }.items()
}
STEPS = {name: jax.jit(lambda x, t=t: t.update(t.init(random.key(0), x), x)) for name, t in TRAINERS.items()}
TABLES = st.sampled_from([1, 4]).flatmap(lambda n: floats(n, 3))


def first_update(name, x):
    state, loss = STEPS[name](x)
    return TRAINERS[name].get_params(state)["theta"], loss, state.mutable_state


@generated(10, 200, x=TABLES, name=st.sampled_from(list(TRAINERS)), scale=st.sampled_from([0.0, 1e-30, 1e-3, 1.0, 1e3]))
def test_first_updates_are_finite_and_keep_shapes(x, name, scale):
    """Constant columns, duplicate rows, more chains than data. Slow: 30 s."""
    theta, loss, chains = first_update(name, x * np.float32(scale))
    assert np.isfinite(loss)
    assert np.all(np.isfinite(theta))
    for holder in (chains or {}).values():
        assert holder["state"].position.shape == (7, 3)
        assert np.all(np.isfinite(holder["state"].position))
    if name == "score":  # half of |s|^2 less the trace of the Hessian, differentiated by hand
        x = np.float64(x * np.float32(scale))
        gradient = np.sum((1 + 2 * 0.5) * 2 * x**2 - 2, 0)
        assert_same(theta, 0.5 - 1e-3 * gradient, 1e-3 * np.sum(4 * x**2, 0) + 1)


@pytest.mark.filterwarnings("ignore:subsample_size does not match")
@generated(
    4,
    25,
    sizes=st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3),
    event=st.sampled_from([(), (1,), (2,)]),
    batch=st.integers(1, 4),
    masked=st.booleans(),
)
def test_plates_of_any_shape_are_their_rows(sizes, event, batch, masked):
    """A batch larger than the data is the data, of which NumPyro warns. Slow: 60 s."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*sizes, *event)).astype(np.float32)
    mask = rng.random(sizes) < 0.5 if masked else np.ones(sizes, bool)
    batches = []

    def plated():
        theta = numpyro.param("theta", 0.5)
        base = dist.Normal(0, 1).expand(event).to_event(len(event))
        d = ebm.EnergyBased(lambda x: theta * jnp.sum(x**2), base)
        with contextlib.ExitStack() as plates:
            for i, size in enumerate(sizes[:-1]):
                plates.enter_context(numpyro.plate(f"plate {i}", size, dim=i - len(sizes)))
            index = plates.enter_context(numpyro.plate("rows", sizes[-1], subsample_size=batch, dim=-1))
            rows, keep = (jnp.take(a, index, axis=len(sizes) - 1) for a in (x, mask))
            batches.append((np.asarray(rows), np.asarray(keep)))
            numpyro.sample("x", d.mask(keep) if masked else d, obs=rows)

    with numpyro.handlers.seed(rng_seed=1):
        value, _ = numpyro.infer.util.log_density(plated, (), {}, {"theta": 0.5})
    rows, keep = batches[-1]
    scale, squares = x.size / rows.size, np.sum(rows**2, tuple(range(len(sizes), x.ndim)))
    size = math.prod(event)
    expected = scale * np.sum(keep * (-squares - size * np.log(2 * np.pi) / 2))
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5)

    svi = SVI(ebm.estimate(plated, ebm.ScoreMatching()), lambda: None, optax.sgd(1.0), Trace_ELBO())
    state, _ = svi.update(svi.init(random.key(0)))
    rows, keep = batches[-1]  # half of |s|^2 and the trace of the Hessian, s = -(1 + 2 theta) x, differentiated by hand
    squares = np.sum(rows**2, tuple(range(len(sizes), x.ndim)))
    expected = scale * np.sum(keep * (2 * (1 + 2 * 0.5) * squares - 2 * size))
    np.testing.assert_allclose(0.5 - svi.get_params(state)["theta"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", TRAINERS)
def test_no_observations_are_refused(name):
    with pytest.raises(ValueError, match=r"site 'x': there are no observations, their shape is \(0, 3\)"):
        TRAINERS[name].init(random.key(0), np.zeros((0, 3)))


def test_empty_data_are_refused_everywhere():
    on_sphere, empty = ebm.EnergyBased(lambda x: x[0], ebm.SphereUniform(3)), np.zeros((0, 3))
    f1_energy = ebm.F1Energy(jnp.eye(3), jnp.zeros(3), jnp.ones(3), 1.0)
    joint = ebm.JointEnergy(lambda x: x[:2], NORMAL)
    for call in (
        lambda: ebm.log_likelihood(on_sphere, empty, random.key(0)),
        lambda: ebm.duality_gap(ebm.EnergyBased(f1_energy, ebm.SphereUniform(3)), empty, random.key(0)),
        lambda: ebm.MMDFlow(NORMAL, radius=1.0, step_size=0.1, num_chains=2).run(random.key(0), 2, empty),
        lambda: ebm.DualSGDA(model, step_size=0.1, num_chains=2).run(random.key(0), 2, empty),
        lambda: ebm.mutual_information(joint, empty),
    ):
        with pytest.raises(ValueError, match=r"no observations|one draw or more"):
            call()
    assert on_sphere.log_prob(empty).shape == (0,)
    assert joint.conditional(np.zeros(0, int)).batch_shape == (0,)


def test_the_error_of_one_observation_is_not_known():
    d = ebm.EnergyBased(lambda x: x**2, dist.Normal(0, 1))
    found = ebm.log_likelihood(d, np.ones(1), random.key(0), method="importance", num_draws=1000)
    assert np.isfinite(found.mean)
    assert found.mean_stderr == np.inf
    assert found.minus(found)[1] == np.inf


@generated(
    15,
    300,
    x=floats(4, 3),
    row=st.integers(0, 3),
    column=st.integers(0, 2),
    bad=st.sampled_from([np.nan, np.inf, -np.inf]),
)
def test_a_fault_anywhere_is_named(x, row, column, bad):
    """Slow: 5 s."""
    x[row, column] = bad
    with pytest.raises(ValueError, match=rf"got {bad} at row {row}, column {column}"):
        validate_observations("x", ebm.EnergyBased(Quadratic(1.0), NORMAL), x)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_chains_have_the_units_of_a_table_of_any_scale(scale):
    """5 s each. N(0, 1) times exp(-3 z^2 / 2) is N(0, 1/4), whatever the units."""
    x = (np.random.default_rng(0).normal(size=(50, 2)) * scale).astype(np.float32)
    d = ebm.standardized(lambda z: 1.5 * jnp.sum(z**2), x)
    chains = ebm.ChainPool(pool_size=2000, num_steps=100).sample(random.key(0), d)
    z = (np.float64(chains) - np.float64(d.energy.mean)) / np.float64(d.energy.deviation)
    assert np.all(np.abs(np.mean(z**2, 0) - 0.25) < BOUND * 0.25 * np.sqrt(2 / 2000))
