"""Kernels against closed forms, in standard errors; ULA against its own stationary law."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from jax import lax, random
from numpyro.distributions import constraints
from scipy import special

import numpyro_ebm as ebm
from numpyro_ebm import kernels
from tests.statistics import assert_mean


def run(kernel, logdensity_fn, position, num_steps, burn_in=200, key=0):
    """Positions (chains, draws, *event) and the infos of a batch of chains."""

    def step(state, key):
        state, info = kernel.step(key, state, logdensity_fn)
        return state, (state.position, info)

    @jax.jit
    def scan(position, key):
        return lax.scan(step, kernel.init(position, logdensity_fn), random.split(key, burn_in + num_steps))[1]

    positions, infos = scan(position, random.key(key))
    return np.asarray(jnp.swapaxes(positions, 0, 1))[:, burn_in:], infos


def mean_resultant(dim, kappa):
    return special.ive(dim / 2, kappa) / special.ive(dim / 2 - 1, kappa)


CHAINS = 64


def test_mala_on_a_standard_normal():
    draws, infos = run(kernels.mala(0.6), lambda x: -jnp.sum(x**2, -1) / 2, jnp.zeros((CHAINS, 2)), 1000)
    assert_mean(draws, 0.0)
    assert_mean(draws**2, 1.0)
    assert_mean(draws**4, 3.0)
    assert 0.6 < float(infos.acceptance_rate.mean()) < 0.95


def test_mala_on_a_skewed_target():
    """A Gumbel density; a wrong sign shows in its third moment."""
    draws, _ = run(kernels.mala(0.4), dist.Gumbel(0, 1).log_prob, jnp.zeros(CHAINS), 2000)
    variance = np.pi**2 / 6
    assert_mean(draws, np.euler_gamma)
    assert_mean((draws - np.euler_gamma) ** 2, variance)
    assert_mean((draws - np.euler_gamma) ** 3, 2 * special.zeta(3))


@pytest.mark.parametrize(
    ("target", "start", "step_size"),
    [
        (dist.Beta(2, 5), 0.5, 0.4),
        (dist.Gamma(3, 2), 1.0, 0.2),
        (dist.LogNormal(0, 0.5), 1.0, 0.1),
        (dist.Uniform(-1, 3), 0.0, 0.5),
    ],
    ids=["beta", "gamma", "lognormal", "uniform"],
)
def test_mala_on_bounded_supports(target, start, step_size):
    kernel = kernels.on_support(kernels.mala(step_size), target.support)
    draws, _ = run(kernel, target.log_prob, jnp.full(CHAINS, start), 1000)
    assert target.support(draws).all()
    assert_mean(draws, target.mean)
    assert_mean((draws - target.mean) ** 2, target.variance)


def test_mala_on_a_simplex():
    target = dist.Dirichlet(jnp.array([2.0, 3.0, 4.0]))
    kernel = kernels.on_support(kernels.mala(0.2), target.support)
    draws, _ = run(kernel, target.log_prob, jnp.full((CHAINS, 3), 1 / 3), 1000)
    assert_mean(draws, target.mean)


@pytest.mark.parametrize(("dim", "kappa", "step_size"), [(3, 2.0, 0.4), (15, 10.0, 0.07)], ids=["S2", "S14"])
def test_geodesic_mala_on_von_mises_fisher(dim, kappa, step_size):
    start = ebm.SphereUniform(dim).sample(random.key(1), (CHAINS,))
    draws, infos = run(kernels.sphere.mala(step_size), lambda x: kappa * x[..., 0], start, 2000)
    resultant = mean_resultant(dim, kappa)
    assert_mean(draws, np.eye(dim)[0] * resultant)
    # E[cos^2] = 1 - (d - 1) A / kappa
    assert_mean(draws[..., 0] ** 2, 1 - (dim - 1) * resultant / kappa)
    assert np.abs(np.linalg.norm(draws, axis=-1) - 1).max() < 1e-5
    assert 0.4 < float(infos.acceptance_rate.mean()) < 0.95


def test_on_support_takes_spheres_to_their_geodesics():
    for support in (ebm.SphereUniform(3).support, constraints.sphere):
        assert kernels.on_support(kernels.mala(0.1), support) == kernels.sphere.mala(0.1)
    assert kernels.on_support(kernels.sphere.projected(0.1), constraints.sphere) == kernels.sphere.projected(0.1)
    assert kernels.on_support(kernels.ula(0.1), constraints.real_vector) == kernels.ula(0.1)
    with pytest.raises(ValueError, match="continuous support"):
        kernels.on_support(kernels.mala(0.1), constraints.nonnegative_integer)


@pytest.mark.parametrize(("step_size", "temperature"), [(0.1, 1.0), (0.5, 1.0), (0.2, 0.3)])
def test_ula_has_its_own_stationary_law(step_size, temperature):
    draws, infos = run(kernels.ula(step_size, temperature), lambda x: -(x**2) / 2, jnp.zeros(CHAINS), 1500)
    assert_mean(draws, 0.0)
    assert_mean(draws**2, temperature / (1 - step_size / 2))
    assert float(infos.acceptance_rate.min()) == 1


def test_the_published_move_is_biased_where_geodesic_mala_is_not():
    start = ebm.SphereUniform(15).sample(random.key(1), (CHAINS,))
    draws, _ = run(kernels.sphere.projected(2e-2), lambda x: 10 * x[..., 0], start, 1000)
    assert abs(draws[..., 0].mean() - 0.553) < 0.005


@pytest.mark.parametrize("kernel", [kernels.sphere.mala(0.05), kernels.sphere.ula(0.05)], ids=["mala", "ula"])
def test_positions_keep_their_norm_over_100_000_moves(kernel):
    start = ebm.SphereUniform(15).sample(random.key(1), (4,))

    def step(state, key):
        state, _ = kernel.step(key, state, lambda x: 10 * x[..., 0])
        return state, jnp.abs(jnp.linalg.norm(state.position, axis=-1) - 1).max()

    state = kernel.init(start, lambda x: 10 * x[..., 0])
    _, errors = jax.jit(lambda state, keys: lax.scan(step, state, keys))(state, random.split(random.key(0), 100_000))
    assert float(errors.max()) < 1e-5


def test_geodesic_moves_are_reversible():
    position = ebm.SphereUniform(5).sample(random.key(0), (10,))
    ambient = position + 0.7 * random.normal(random.key(1), (10, 5))
    moved, velocity, velocity_end = kernels.SPHERE.retract(position, ambient)
    np.testing.assert_allclose(jnp.linalg.norm(velocity, axis=-1), jnp.linalg.norm(velocity_end, axis=-1), rtol=1e-5)
    np.testing.assert_allclose(jnp.sum(moved * velocity_end, -1), 0, atol=1e-6)
    back, _, velocity_back = kernels.SPHERE.retract(moved, moved - velocity_end)
    np.testing.assert_allclose(back, position, atol=1e-5)
    np.testing.assert_allclose(velocity_back, -velocity, atol=1e-5)


def test_a_batch_of_chains_moves_and_is_accepted_each_on_its_own():
    wide = jnp.array([1.0, 1e-3])  # the second chain's steps are far too long
    logdensity_fn = lambda x: -(x**2) / (2 * wide**2)  # noqa: E731
    _, infos = run(kernels.mala(0.5), logdensity_fn, jnp.zeros(2), 500)
    rates = infos.acceptance_rate.mean(0)
    assert rates[0] > 0.8
    assert rates[1] < 0.2


@pytest.mark.case("A9")
def test_nonfinite_proposals_are_rejected_and_counted():
    def logdensity_fn(x):
        return jnp.where(x > 3, jnp.nan, -(x**2) / 2)

    draws, infos = run(kernels.mala(5.0), logdensity_fn, jnp.array([2.9, 0.0, 0.0, 0.0]), 500, burn_in=0)
    assert np.isfinite(draws).all()
    assert (np.asarray(infos.is_nonfinite).sum(0) > 0).all()
    assert (draws.std(1) > 0.1).all()
    assert not np.any(np.asarray(infos.is_nonfinite) & np.asarray(infos.is_accepted))


def test_an_energy_error_over_1000_is_divergent():
    state = kernels.mala(1.0).init(jnp.array(1.0), lambda x: -1e6 * x**2)
    _, info = kernels.mala(1.0).step(random.key(0), state, lambda x: -1e6 * x**2)
    assert info.is_divergent
    assert not info.is_nonfinite
    assert not info.is_accepted


@pytest.mark.parametrize("edge", [0.0, 1.0])
def test_chains_start_on_the_edge_of_a_support(edge):
    target = dist.Beta(2, 2)
    kernel = kernels.on_support(kernels.mala(0.5), target.support)
    draws, _ = run(kernel, target.log_prob, jnp.full(4, edge), 300, burn_in=0)
    assert np.isfinite(draws).all()
    assert (np.abs(draws[:, -1] - edge) > 1e-3).all()


def test_a_schedule_is_a_function_of_the_moves():
    schedule = optax.linear_schedule(0.1, 0.2, 10)
    state = kernels.ula(schedule).init(jnp.zeros(3), lambda x: -jnp.sum(x**2) / 2, num_moves=5)
    by_schedule, _ = kernels.ula(schedule).step(random.key(0), state, lambda x: -jnp.sum(x**2) / 2)
    by_number, _ = kernels.ula(0.15).step(random.key(0), state, lambda x: -jnp.sum(x**2) / 2)
    np.testing.assert_allclose(by_schedule.position, by_number.position, rtol=1e-6)
    assert int(by_schedule.num_moves) == 6


@pytest.mark.parametrize("make", [kernels.ula, kernels.mala, kernels.sphere.ula, kernels.sphere.mala])
@pytest.mark.parametrize("step_size", [0.0, -1.0, float("nan"), float("inf")])
def test_step_size_must_be_positive(make, step_size):
    with pytest.raises(ValueError, match="step_size must be positive"):
        make(step_size)


@pytest.mark.parametrize("step_size", ["a", None, np.array([0.1, 0.2]), True])
def test_step_size_must_be_a_number(step_size):
    with pytest.raises(ValueError, match="step_size must be a positive number"):
        kernels.ula(step_size)


def test_a_kernel_without_a_step_size_is_for_pools():
    kernel = kernels.mala()
    state = kernel.init(jnp.zeros(2), lambda x: -jnp.sum(x**2) / 2)
    with pytest.raises(ValueError, match="put it into a ChainPool, which adapts it"):
        kernel.step(random.key(0), state, lambda x: -jnp.sum(x**2) / 2)


@pytest.mark.parametrize("make", [kernels.ula, kernels.mala])
def test_a_scale_makes_the_move_of_standardised_coordinates(make):
    """Columns of scales 1e-3 and 1e4, as a kernel without a scale moves columns of scale one."""
    scale = jnp.array([1e-3, 1e4])
    unit = make(0.3).init(jnp.ones(2), lambda z: -jnp.sum(z**2) / 2)
    unit, unit_info = make(0.3).step(random.key(0), unit, lambda z: -jnp.sum(z**2) / 2)
    kernel = make(0.3, scale=scale)
    state = kernel.init(scale, lambda x: -jnp.sum((x / scale) ** 2) / 2)
    state, info = kernel.step(random.key(0), state, lambda x: -jnp.sum((x / scale) ** 2) / 2)
    np.testing.assert_allclose(state.position / scale, unit.position, rtol=1e-5)
    np.testing.assert_allclose(info.acceptance_rate, unit_info.acceptance_rate, rtol=1e-4)


@pytest.mark.parametrize("scale", [0.0, -1.0, "a", np.array([1.0, np.nan])])
def test_scale_must_be_positive(scale):
    with pytest.raises(ValueError, match="scale must be positive"):
        kernels.mala(0.1, scale=scale)


def test_a_scale_is_one_of_the_unbounded_space():
    with pytest.raises(ValueError, match="leave scale out"):
        kernels.on_support(kernels.mala(0.1, scale=2.0), dist.constraints.unit_interval)


def test_positions_may_be_pytrees():
    def logdensity_fn(z):
        return -jnp.sum(z["a"] ** 2, -1) / 2 - (z["b"] - 1) ** 2 / 2

    def step(state, key):
        state, _ = kernels.mala(0.5).step(key, state, logdensity_fn)
        return state, state.position

    start = kernels.mala(0.5).init({"a": jnp.zeros((CHAINS, 2)), "b": jnp.zeros(CHAINS)}, logdensity_fn)
    _, draws = lax.scan(step, start, random.split(random.key(0), 1000))
    assert_mean(jnp.swapaxes(draws["a"], 0, 1)[:, 200:] ** 2, 1.0)
    assert_mean(jnp.swapaxes(draws["b"], 0, 1)[:, 200:], 1.0)


def test_temperature_must_be_positive():
    with pytest.raises(ValueError, match="temperature must be positive"):
        kernels.ula(0.1, temperature=0.0)
