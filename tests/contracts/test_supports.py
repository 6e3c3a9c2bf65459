"""Every support of NumPyro works, or is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.distributions import constraints

import numpyro_ebm as ebm


def improper(constraint, *event_shape):
    return dist.ImproperUniform(constraint, (), event_shape)


# a base on the support, and a point in it
CONTINUOUS = {
    "real": (dist.Normal(0, 1), 0.5),
    "real_vector": (dist.MultivariateNormal(jnp.zeros(2), jnp.eye(2)), [0.5, -1.0]),
    "real_matrix": (dist.MatrixNormal(jnp.zeros((2, 2)), jnp.eye(2), jnp.eye(2)), [[0.5, -1.0], [0.0, 1.0]]),
    "positive": (dist.Gamma(2.0, 1.0), 0.5),
    "nonnegative": (improper(constraints.nonnegative), 0.5),
    "softplus_positive": (improper(constraints.softplus_positive), 0.5),
    "greater_than": (dist.Pareto(1.0, 3.0), 1.5),
    "greater_than_eq": (improper(constraints.greater_than_eq(1.0)), 1.5),
    "less_than": (improper(constraints.less_than(1.0)), 0.5),
    "interval": (dist.Uniform(-1, 2), 0.5),
    "unit_interval": (dist.Beta(2.0, 3.0), 0.5),
    "circular": (dist.VonMises(0.0, 1.0), 0.5),
    "simplex": (dist.Dirichlet(jnp.ones(3)), [0.25, 0.25, 0.5]),
    "ordered_vector": (improper(constraints.ordered_vector, 3), [-1.0, 0.5, 1.0]),
    "positive_ordered_vector": (improper(constraints.positive_ordered_vector, 3), [0.5, 0.75, 1.0]),
    "l1_ball": (improper(constraints.l1_ball, 2), [0.25, -0.25]),
    "zero_sum": (dist.ZeroSumNormal(1.0, event_shape=(3,)), [0.5, 0.5, -1.0]),
    "sphere": (dist.ProjectedNormal(jnp.array([1.0, 0.0, 0.0])), [0.0, 0.6, 0.8]),
    "corr_cholesky": (dist.LKJCholesky(2, 1.0), [[1.0, 0.0], [0.6, 0.8]]),
    "corr_matrix": (dist.LKJ(2, 1.0), [[1.0, 0.5], [0.5, 1.0]]),
    "positive_definite": (dist.Wishart(4.0, jnp.eye(2)), [[1.0, 0.5], [0.5, 1.0]]),
    "positive_semidefinite": (improper(constraints.positive_semidefinite, 2, 2), [[1.0, 0.5], [0.5, 1.0]]),
    "lower_cholesky": (dist.WishartCholesky(4.0, jnp.eye(2)), [[1.0, 0.0], [0.5, 1.0]]),
    "softplus_lower_cholesky": (improper(constraints.softplus_lower_cholesky, 2, 2), [[1.0, 0.0], [0.5, 1.0]]),
    "scaled_unit_lower_cholesky": (improper(constraints.scaled_unit_lower_cholesky, 2, 2), [[1.0, 0.0], [0.5, 1.0]]),
}
DISCRETE = {
    "boolean": (dist.Bernoulli(0.25), [0, 1], [2, -1]),
    "integer_interval": (dist.Categorical(jnp.array([0.25, 0.25, 0.5])), [0, 2], [3, -1]),
    "nonnegative_integer": (dist.Poisson(2.0), [0, 5], [-1, -2]),
    "multinomial": (dist.Multinomial(2, jnp.array([0.5, 0.5])), [[0, 2], [1, 1]], [[3, -1], [2, 2]]),
}
# compiled by the slow tests
FAST = {"real", "interval", "simplex", "circular"}
MOVES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CONTINUOUS]


def energy(x):
    return jnp.sum(x**2) / 2


@pytest.mark.parametrize("name", CONTINUOUS)
def test_densities_are_base_less_energy(name):
    base, point = CONTINUOUS[name]
    d, x = ebm.EnergyBased(energy, base), jnp.asarray(point)[None]
    assert base.support(x).all()
    expected = base.log_prob(x) - np.sum(np.square(point)) / 2
    np.testing.assert_allclose(d.unnormalized_log_prob(x), expected, rtol=1e-5)
    if not isinstance(base, dist.ImproperUniform) and name not in ("real", "real_vector", "real_matrix", "sphere"):
        assert np.all(np.asarray(d.unnormalized_log_prob(x - 10)) == -np.inf)


@pytest.mark.parametrize("name", MOVES)
def test_chains_move_and_stay_on_the_support(name):
    """5 s each."""
    base, point = CONTINUOUS[name]
    start = jnp.asarray(point)
    pool = ebm.ChainPool(
        ebm.kernels.mala(0.02), 8, num_steps=5, init=lambda key, shape: jnp.broadcast_to(start, shape + start.shape)
    )
    x = jax.jit(lambda key: pool.sample(key, ebm.EnergyBased(energy, base)))(random.key(0))
    assert base.support(x).all()
    assert np.any(np.asarray(x != start))


@pytest.mark.parametrize("name", DISCRETE)
def test_discrete_supports_have_densities_and_no_moves(name):
    base, inside, outside = DISCRETE[name]
    d = ebm.EnergyBased(energy, base, validate_args=False)
    base._validate_args = False
    expected = base.log_prob(jnp.asarray(inside)) - np.sum(np.reshape(np.square(inside), (2, -1)), -1) / 2
    for dtype in (int, float):
        np.testing.assert_allclose(d.log_prob(jnp.asarray(inside, dtype)), expected, rtol=1e-6)
    assert np.all(np.asarray(d.unnormalized_log_prob(jnp.asarray(outside))) == -np.inf)
    for call in (
        lambda: d.score(jnp.asarray(inside)),
        lambda: ebm.ChainPool(pool_size=4).sample(random.key(0), d),
        lambda: ebm.smc_sampler(d, random.key(0), num_particles=320),
        lambda: ebm.log_normalizer(d, random.key(0), "quadrature"),
    ):
        with pytest.raises(ValueError, match=r"continuous (support|base)"):
            call()


def test_complex_numbers_are_refused():
    with pytest.raises(ValueError, match="base must be over real numbers, got ImproperUniform of complex ones"):
        ebm.EnergyBased(jnp.abs, improper(constraints.complex))


def test_a_support_without_a_bijection_is_named():
    with pytest.raises(ValueError, match=r"biject_to has a map to, got .*Circulant"):
        ebm.kernels.on_support(ebm.kernels.mala(0.1), constraints.positive_definite_circulant_vector)
