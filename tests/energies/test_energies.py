"""Energies: values, shapes, spellings, errors."""

import functools
import pickle
from dataclasses import dataclass

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import pytest
from flax import linen, nnx
from jax import random
from numpyro import handlers
from numpyro.contrib.module import eqx_module, flax_module, nnx_module

import numpyro_ebm as ebm
from numpyro_ebm.energies import MAX_MEAN_WEIGHT


def f1(key=0, m=6, d=4, power=1, **kwargs):
    k1, k2 = random.split(random.key(key))
    features = random.normal(k1, (m, d + kwargs.get("bias", False)))
    features = features / jnp.linalg.norm(features, axis=-1, keepdims=True)
    log_weights = -random.uniform(k2, (m,))
    signs = jnp.where(jnp.arange(m) < m // 2, 1.0, -1.0)
    return ebm.F1Energy(features, log_weights, signs, 3.0, power, **kwargs)


@pytest.mark.parametrize("power", [1, 2, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_f1_energy_is_the_sum_over_neurons(power, bias):
    energy = f1(power=power, bias=bias)
    x = np.asarray(random.normal(random.key(5), (7, 4)))
    features = np.asarray(energy.features)
    expected = np.zeros(7)
    for i, row in enumerate(x):
        row = np.append(row, 1.0) if bias else row
        for j in range(6):
            inner = max(row @ features[j], 0.0) ** power
            expected[i] += float(energy.signs[j]) * np.exp(float(energy.log_weights[j])) * inner
    np.testing.assert_allclose(energy(x), 3.0 / 6 * expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(energy(x[2]), energy(x)[2], rtol=1e-6)


def test_f1_activation_replaces_the_relu():
    energy = ebm.F1Energy(jnp.eye(2), jnp.zeros(2), jnp.ones(2), 2.0, activation=jnp.sin)
    np.testing.assert_allclose(energy(jnp.array([0.3, 0.5])), np.sin(0.3) + np.sin(0.5), rtol=1e-6)


@pytest.mark.parametrize("bias", [False, True])
def test_f1_derivatives_are_those_of_the_sum(bias):
    energy = f1(bias=bias)
    x = random.normal(random.key(5), (7, 4))

    def total(arrays, activation):
        x, features, log_weights = arrays
        return jnp.sum(ebm.F1Energy(features, log_weights, energy.signs, 3.0, 1, bias, activation)(x) ** 2)

    arrays = (x, energy.features, energy.log_weights)
    first = {f: jax.grad(functools.partial(total, activation=f)) for f in (None, jax.nn.relu)}
    second = {f: jax.jvp(gradient, (arrays,), (arrays,))[1] for f, gradient in first.items()}
    for ours, plain in ((first[None](arrays), first[jax.nn.relu](arrays)), (second[None], second[jax.nn.relu])):
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), ours, plain)


def test_f1_norm_is_the_total_variation():
    energy = f1()
    np.testing.assert_allclose(energy.norm, 3.0 * np.exp(np.asarray(energy.log_weights)).mean(), rtol=1e-6)


def test_f1_batch_of_energies_equals_a_loop():
    energies = [f1(key) for key in range(3)]
    stacked = ebm.F1Energy(
        jnp.stack([e.features for e in energies]),
        jnp.stack([e.log_weights for e in energies]),
        energies[0].signs,
        3.0,
    )
    x = random.normal(random.key(1), (5, 3, 4))
    assert stacked.batch_shape == (3,)
    expected = jnp.stack([e(x[:, i]) for i, e in enumerate(energies)], -1)
    np.testing.assert_allclose(stacked(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"radius": 0.0}, "radius must be positive"),
        ({"radius": -1.0}, "radius must be positive"),
        ({"power": 0}, "power must be a positive integer"),
        ({"features": 2 * jnp.eye(3)}, "unit vectors"),
        ({"log_weights": jnp.full(3, 0.5)}, r"at most 1, got 1\.649"),
        ({"log_weights": jnp.zeros(2)}, "must have shapes"),
        ({"radius": float("inf")}, "radius must be positive and finite"),
        ({"radius": "a"}, "radius must be a positive number"),
        ({"radius": None}, "radius must be a positive number"),
        ({"signs": 2 * jnp.ones(3)}, r"signs must be \+1 or -1"),
        ({"activation": "relu"}, "activation must be a function"),
        ({"features": jnp.full((3, 3), jnp.nan)}, "unit vectors"),
    ],
)
def test_f1_refuses(change, message):
    good = {"features": jnp.eye(3), "log_weights": jnp.zeros(3), "signs": jnp.ones(3), "radius": 1.0}
    with pytest.raises(ValueError, match=message):
        ebm.F1Energy(**(good | change))


def test_f1_refuses_x_of_another_dimension():
    with pytest.raises(ValueError, match="features have dimension 4"):
        f1()(jnp.ones(3))


def test_f1_round_trips_as_a_pytree_and_in_pickle():
    energy = f1(power=2)
    x = jnp.ones(4)
    for copy in (jax.tree.map(lambda a: a, energy), pickle.loads(pickle.dumps(energy)), jax.jit(lambda e: e)(energy)):
        assert float(copy(x)) == float(energy(x))


def test_f1_site_starts_in_the_ball_at_weight_one_over_radius():
    energy = handlers.seed(ebm.f1_energy, 0)("e", dim=3, num_neurons=10, radius=20.0)
    np.testing.assert_allclose(jnp.exp(energy.log_weights), 1 / 20, rtol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(energy.features, axis=-1), 1, rtol=1e-5)
    assert float(energy.signs.sum()) == 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_f1_site_is_normalised_on_read(scale):
    params = {"features": scale * random.normal(random.key(0), (8, 3)), "log_weights": jnp.full(8, 50.0)}
    energy = handlers.substitute(ebm.f1_energy, {"e$params": params})("e", dim=3, num_neurons=8, radius=2.0)
    np.testing.assert_allclose(energy.norm, 2.0 * MAX_MEAN_WEIGHT, rtol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(energy.features, axis=-1), 1, rtol=1e-5)


@pytest.mark.parametrize("change", [{"dim": 0}, {"num_neurons": 0}, {"num_neurons": 2.5}, {"radius": 0.0}])
def test_f1_site_refuses(change):
    arguments = {"dim": 3, "num_neurons": 8, "radius": 1.0} | change
    with pytest.raises(ValueError, match=next(iter(change))):
        handlers.seed(ebm.f1_energy, 0)("e", **arguments)


@dataclass
class Quadratic:
    """Mutable, so not hashable."""

    scale: float

    def __call__(self, x):
        return self.scale * jnp.sum(x**2)


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return linen.Dense(1)(jnp.tanh(linen.Dense(4)(x)))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(jnp.tanh(self.inner(x)))


def equinox_network():
    return eqx.nn.MLP(3, "scalar", 4, 1, activation=jnp.tanh, key=random.key(0))


def inside_model(declare):
    with handlers.seed(rng_seed=0):
        return declare()


SPELLINGS = {
    "function": lambda: lambda x: jnp.sum(x**2),
    "partial": lambda: functools.partial(lambda w, x: jnp.sum(w * x**2), jnp.arange(3.0)),
    "dataclass": lambda: Quadratic(2.0),
    "linen": lambda: inside_model(lambda: flax_module("net", Linen(), input_shape=(3,))),
    "nnx": lambda: Nnx(nnx.Rngs(0)),
    "nnx_module": lambda: inside_model(lambda: nnx_module("net", Nnx(nnx.Rngs(0)))),
    "equinox": equinox_network,
    "eqx_module": lambda: inside_model(lambda: eqx_module("net", equinox_network())),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_as_energy_maps_over_single_events(spelling):
    function = SPELLINGS[spelling]()
    energy = ebm.as_energy(function, event_shape=(3,))
    x = random.normal(random.key(1), (2, 5, 3))
    expected = [[jnp.reshape(function(x[i, j]), ()) for j in range(5)] for i in range(2)]
    for mapped in (energy(x), jax.jit(lambda e, x: e(x))(energy, x), jax.vmap(energy)(x)):
        np.testing.assert_allclose(mapped, jnp.array(expected), rtol=1e-5, atol=1e-6)
    assert energy(x[0, 0]).shape == ()


def test_as_energy_returns_an_energy_as_it_is():
    energy = f1()
    assert ebm.as_energy(energy) is energy


def test_as_energy_sees_a_batch():
    energy = ebm.as_energy(lambda x: jnp.arange(4.0) * x)
    assert energy.batch_shape == (4,)
    np.testing.assert_array_equal(energy(jnp.ones((2, 4))), jnp.tile(jnp.arange(4.0), (2, 1)))
    with pytest.raises(ValueError, match="let it broadcast"):
        ebm.as_energy(lambda x: jnp.arange(4.0) * jnp.sum(x), event_shape=(3,))(jnp.ones((2, 4, 3)))


@pytest.mark.parametrize(
    ("function", "shape", "message"),
    [
        (lambda x: x**2, (3,), "sum over the event"),
        (lambda x: x[0], (), r"\.to_event\(\)"),
        (lambda x: (x, x), (), "one array"),
        (lambda x: x * 1j, (), "must be real"),
    ],
)
def test_as_energy_refuses(function, shape, message):
    with pytest.raises(ValueError, match=message):
        ebm.as_energy(function, event_shape=shape)


def test_as_energy_refuses_what_is_not_callable():
    with pytest.raises(TypeError, match="energy must be callable, got float"):
        ebm.as_energy(1.0)


def test_a_closure_over_a_tracer_survives_vmap_of_the_constructor():
    energies = jax.vmap(lambda scale: ebm.as_energy(lambda x: scale * x**2))(jnp.arange(3.0))
    values = jax.vmap(lambda e: e(jnp.array(2.0)))(energies)
    np.testing.assert_array_equal(values, 4 * jnp.arange(3.0))


def test_an_initial_value_outside_a_model_is_refused_by_numpyro():
    with pytest.raises(AssertionError, match="seed handler"):
        numpyro.param("e", lambda key: key)
