"""Pools: what is drawn, restarted, repaired and written back."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random

import numpyro_ebm as ebm
from numpyro_ebm import kernels
from numpyro_ebm.pool import Observations
from tests.statistics import BOUND, assert_mean

TARGET = ebm.EnergyBased(lambda x: x**2, dist.Normal(0, 1))
ROWS = Observations(jnp.arange(5.0) + 100)
SIZES = jnp.array([1e-3, 1.0, 1e4])
TINY = kernels.ula(1e-12)  # moves that keep a chain where it was put


def test_chains_start_at_draws_of_the_base():
    state = ebm.ChainPool(TINY, 4000).start(random.key(0), TARGET)
    assert state.position.shape == (4000,)
    assert abs(float(state.position.var()) - 1) < BOUND * np.sqrt(2 / 4000)


@pytest.mark.parametrize(
    "init", [dist.Uniform(10, 11), lambda key, shape: random.uniform(key, shape) + 10], ids=["distribution", "function"]
)
def test_chains_start_where_init_says(init):
    position = ebm.ChainPool(TINY, 50, init=init).start(random.key(0), TARGET).position
    assert ((position >= 10) & (position <= 11)).all()


def test_chains_start_at_the_data_as_evenly_as_they_can():
    position = ebm.ChainPool(TINY, 13, init="data").start(random.key(0), TARGET, ROWS).position
    _, counts = np.unique(np.asarray(position), return_counts=True)
    assert sorted(counts) == [2, 2, 3, 3, 3]


@pytest.mark.parametrize("probability", [0.3, 1.0])
def test_chains_restart_at_the_data(probability):
    pool = ebm.ChainPool(TINY, 5000, restart_prob=probability)
    state = pool.start(random.key(0), TARGET)
    state, moved = pool.advance(random.key(1), state, None, TARGET, ROWS)
    restarted = np.asarray(moved) > 50
    error = np.sqrt(probability * (1 - probability) / 5000)
    assert abs(restarted.mean() - probability) <= BOUND * error
    counts = np.bincount(np.round(np.asarray(moved)[restarted] - 100).astype(int), minlength=5)
    assert np.all(np.abs(counts / counts.sum() - 0.2) < BOUND * np.sqrt(0.16 / counts.sum()))


def test_masked_rows_are_no_restarts():
    pool = ebm.ChainPool(TINY, 200, restart_prob=1.0, init="data")
    rows = ROWS._replace(weight=jnp.array([1.0, 0, 0, 1, 0]))
    state = pool.start(random.key(0), TARGET, rows)
    state, moved = pool.advance(random.key(1), state, None, TARGET, rows)
    assert set(np.round(np.asarray(moved))) == {100.0, 103.0}


def test_chains_are_reinitialised():
    pool = ebm.ChainPool(TINY, 5000, reinit_prob=0.05, init=dist.Uniform(10, 11))
    state = pool.start(random.key(0), TARGET)._replace(position=jnp.zeros(5000))
    _, moved = pool.advance(random.key(1), state, None, TARGET)
    assert abs((np.asarray(moved) > 5).mean() - 0.05) < BOUND * np.sqrt(0.05 * 0.95 / 5000)


def test_drawn_chains_are_written_back_and_others_stay():
    pool = ebm.ChainPool(kernels.mala(0.1), 10, num_chains=4)
    state = pool.start(random.key(0), TARGET)
    index, drawn = pool.draw(random.key(1), state)
    assert len(np.unique(np.asarray(index))) == 4
    new, moved = pool.advance(random.key(2), state, index, TARGET)
    np.testing.assert_array_equal(new.position[index], moved)
    others = np.setdiff1d(np.arange(10), np.asarray(index))
    np.testing.assert_array_equal(new.position[others], state.position[others])
    assert drawn.shape == moved.shape == (4,)


def test_a_chain_that_turns_non_finite_restarts_and_is_counted():
    broken = ebm.EnergyBased(lambda x: jnp.where(x > 3, jnp.nan, x**2), dist.Normal(0, 1))
    pool = ebm.ChainPool(kernels.ula(0.1), 6)
    state = pool.start(random.key(0), broken)._replace(position=jnp.array([0.0, 5.0, 0, 5.0, jnp.inf, 0]))
    new, _ = pool.advance(random.key(1), state, None, broken)
    assert jnp.isfinite(new.position).all()
    assert int(new.num_nonfinite) == 3
    new, _ = pool.advance(random.key(1), state, None, broken, Observations(jnp.array([0.25])))
    np.testing.assert_array_equal(new.position[jnp.array([1, 3, 4])], 0.25)


def test_mala_chains_stay_at_the_target():
    pool = ebm.ChainPool(kernels.mala(0.1), 100, num_steps=5)
    state = pool.start(random.key(0), TARGET)

    @jax.jit
    def advance(state, key):
        state, moved = pool.advance(key, state, None, TARGET)
        return state, moved

    state, draws = jax.lax.scan(advance, state, random.split(random.key(1), 400))
    draws = jnp.swapaxes(draws[100:], 0, 1)
    assert_mean(draws**2, 1 / 3)
    assert int(state.num_moves) == 2000
    assert 0 < float(state.acceptance_rate) <= 1


def test_nothing_is_differentiated_through_the_chains():
    def moved(scale):
        d = ebm.EnergyBased(lambda x: scale * x**2, dist.Normal(0, 1))
        pool = ebm.ChainPool(kernels.mala(0.1), 10, num_steps=3)
        return pool.advance(random.key(1), pool.start(random.key(0), d), None, d)[1].sum()

    assert jax.grad(moved)(1.0) == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"pool_size": 0}, ValueError, "pool_size must be a positive integer, got 0"),
        ({"pool_size": 2.0}, ValueError, "pool_size must be a positive integer"),
        ({"num_chains": 0}, ValueError, "num_chains must be a positive integer, got 0"),
        ({"num_chains": 9}, ValueError, "num_chains must be at most pool_size=8, got 9"),
        ({"num_steps": 0}, ValueError, "num_steps must be a positive integer"),
        ({"restart_prob": 1.5}, ValueError, "restart_prob must be a probability"),
        ({"reinit_prob": -0.1}, ValueError, "reinit_prob must be a probability"),
        ({"restart_prob": float("nan")}, ValueError, "restart_prob must be a probability"),
        ({"kernel": 0.1}, TypeError, "kernel must have init and step"),
        ({"init": 3}, TypeError, "init must be"),
    ],
)
def test_refuses(change, error, message):
    with pytest.raises(error, match=message):
        ebm.ChainPool(**({"kernel": TINY, "pool_size": 8} | change))


def test_needs_something_to_start_from():
    flat = ebm.EnergyBased(lambda x: x**2, dist.ImproperUniform(dist.constraints.real, (), ()))
    with pytest.raises(ValueError, match=r"ImproperUniform can't be drawn from.*ChainPool\(init="):
        ebm.ChainPool(TINY, 8).start(random.key(0), flat)
    with pytest.raises(ValueError, match="needs observations"):
        ebm.ChainPool(TINY, 8, init="data").start(random.key(0), TARGET)


@pytest.mark.parametrize(
    "target",
    [
        ebm.EnergyBased(lambda x: 50 * jnp.sum(x**2), dist.Normal(0, 1).expand([5]).to_event(1)),
        ebm.EnergyBased(lambda x: jnp.sum((x / SIZES) ** 2), dist.Normal(0, SIZES).to_event(1)),
        ebm.EnergyBased(lambda x: 8 * x[2], ebm.SphereUniform(3)),
        ebm.EnergyBased(lambda x: 30 * x, dist.Uniform(0, 1)),
        ebm.EnergyBased(lambda x: x**2, dist.Cauchy(0, 1)),
    ],
    ids=["narrow", "columns of all sizes", "sphere", "interval", "no variance"],
)
def test_step_sizes_adapt_to_the_acceptance_of_mala(target):
    pool = ebm.ChainPool(pool_size=100, num_steps=5)

    def update(state, key):
        state, _ = pool.advance(key, state, None, target)
        return state, (state.acceptance_rate, state.step_size)

    state = pool.start(random.key(0), target)
    state, (rates, sizes) = jax.lax.scan(update, state, random.split(random.key(1), 400))
    assert abs(float(rates[200:].mean()) - 0.574) < 0.02
    assert float(jnp.std(jnp.log(sizes[200:]))) < 0.1


def test_adapted_steps_stay_bounded_on_a_flat_density():
    pool = ebm.ChainPool(pool_size=10)
    flat = ebm.EnergyBased(lambda x: 0.0 * x[0], ebm.SphereUniform(3))
    state, _ = jax.lax.scan(
        lambda s, k: (pool.advance(k, s, None, flat)[0], None),
        pool.start(random.key(0), flat),
        random.split(random.key(1), 3000),
    )
    assert float(state.step_size) == 10
    np.testing.assert_allclose(jnp.linalg.norm(state.position, axis=-1), 1, atol=1e-5)


def test_a_given_step_size_is_kept():
    state = ebm.ChainPool(kernels.mala(0.3), 10).start(random.key(0), TARGET)
    state, _ = ebm.ChainPool(kernels.mala(0.3), 10).advance(random.key(1), state, None, TARGET)
    assert float(state.step_size) == pytest.approx(0.3)


def test_energies_of_chains_and_data_are_watched():
    pool = ebm.ChainPool(TINY, 3)
    state = pool.start(random.key(0), TARGET)
    position = jnp.array([1.0, 2.0, 3.0])
    rows = Observations(jnp.array([0.0, 4.0, 100.0]), jnp.array([1.0, 1.0, 0.0]))
    state = pool.watch(state, TARGET, position, rows)
    assert float(state.energy_gap) == pytest.approx(14 / 3 - 8)
    assert float(state.max_energy) == 16
    state = pool.watch(state, TARGET, position, Observations())
    assert float(state.max_energy) == 16
    state = pool.watch(state, TARGET, position.at[0].set(jnp.nan), rows)
    assert float(state.max_energy) == np.inf


def test_the_gap_is_of_each_element_of_a_batch():
    """Offsets between elements, of which the data have unequal numbers, are no gap."""
    offset = jnp.array([0.0, 10.0])
    target = ebm.EnergyBased(lambda x: x**2 + offset, dist.Normal(0, 1).expand([2]))
    pool = ebm.ChainPool(TINY, 2)
    weight = jnp.array([[1.0, 0], [1, 0], [1, 1]])
    rows = Observations(jnp.broadcast_to(jnp.array([[0.0], [1.0], [2.0]]), (3, 2)), weight)
    state = pool.watch(pool.start(random.key(0), target), target, jnp.array([[1.0, 3.0], [2.0, 3.0]]), rows)
    assert float(state.energy_gap) == pytest.approx((3 * 2.5 - 5 + 9 - 4) / 4)
    assert float(state.max_energy) == 19


def test_rows_of_each_element_are_its_own():
    """Two elements share five rows; the second has two of them, of its own."""
    weight = jnp.array([[1.0, 0], [1, 1], [1, 0], [1, 1], [1, 0]])
    rows = Observations(jnp.broadcast_to(ROWS.value[:, None], (5, 2)), weight)
    drawn = np.asarray(rows.draw(random.key(0), 500))
    assert set(drawn[:, 0]) == {100.0, 101, 102, 103, 104}
    assert set(drawn[:, 1]) == {101.0, 103.0}


def test_a_distribution_to_start_from_is_drawn_from_for_each_element_of_a_batch():
    base = dist.Normal(0, 1).expand([2]).to_event(1)
    d = ebm.EnergyBased(lambda x: jnp.sum(x**2, -1), base).expand([3])
    pool = ebm.ChainPool(pool_size=5, init=dist.Uniform(8, 9).expand([2]).to_event(1))
    position = pool.start(random.key(0), d).position
    assert position.shape == (5, 3, 2)
    assert len(np.unique(position)) == 30
    assert position.min() >= 8
