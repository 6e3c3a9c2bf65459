"""What holds for every pure part: under jit, under vmap, for keys and for types."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from numpyro import handlers

from tests.contracts.estimators import CASES, ESTIMATORS, trained
from tests.contracts.parts import CALLS, KERNELS, POOLS, checking_leaks, functions

PARTS = functions() | ESTIMATORS
# compiling is what takes the time: 3 to 15 s each
SLOW = (set(KERNELS) | set(POOLS) | set(ESTIMATORS)) - {"mala", "sphere", "positive"}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in PARTS]
# estimators are mapped and looked through for leaks one of a kind
KINDS = ["contrastive, buffer", "ST-JEM", "sliced"]
SOME = [
    pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name
    for name in PARTS
    if name not in set(ESTIMATORS) - {f"estimator, {kind}" for kind in KINDS}
]
LOOSE = {name: {"rtol": 2e-4, "atol": 1e-5} for name in ESTIMATORS}


def inputs(part):
    """Two inputs of the same shape."""
    return jnp.stack([part.x, part.x[::-1]])


@functools.cache
def eager(name):
    """A part at both inputs, op by op."""
    part = PARTS[name]
    return [part.call(random.key(i), x) for i, x in enumerate(inputs(part))]


def assert_close(name, found, expected):
    found, expected = jax.tree.leaves(found), jax.tree.leaves(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, **LOOSE.get(name, {"rtol": 2e-5, "atol": 1e-5}))


@pytest.mark.case("A16")
@pytest.mark.parametrize("name", NAMES)
def test_jit_is_eager_traces_once_and_takes_keys_old_and_new(name):
    """Kernels and pools: 5 s each, estimators: 15 s. No key is used twice: of estimators, see below."""
    part = PARTS[name]
    jitted = jax.jit(part.call)
    with jax.debug_key_reuse(name not in ESTIMATORS):
        first = jitted(random.key(0), part.x)
        traced = len(CALLS)
        second, again, other = (jitted(random.key(i), x) for i, x in ((1, part.x[::-1]), (0, part.x), (1, part.x)))
        assert len(CALLS) == traced
    assert_close(name, [first, second], eager(name))
    old = jitted(random.PRNGKey(0), part.x) if part.is_random else first
    for same in (again, old):
        jax.tree.map(np.testing.assert_array_equal, first, same)
    differs = [bool(jnp.any(a != b)) for a, b in zip(*map(jax.tree.leaves, (first, other)), strict=True)]
    assert any(differs) == part.is_random


@pytest.mark.case("A16")
@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_estimators_use_no_key_twice(name):
    """10 s each. Rows are given: NumPyro's subsampling loops over keys, which JAX's check takes for reuse."""
    model, estimator = CASES[name]
    part = trained(handlers.substitute(model, data={"data": jnp.arange(5)}), estimator)
    with jax.debug_key_reuse(True):
        jax.jit(part.call)(random.key(0), part.x)


@pytest.mark.parametrize("name", SOME)
def test_no_tracer_leaks(name):
    part = PARTS[name]
    with checking_leaks():
        jax.eval_shape(part.call, random.key(0), part.x)


@pytest.mark.parametrize("name", SOME)
def test_vmap_is_a_loop(name):
    part = PARTS[name]
    keys = jnp.stack([random.key(i) for i in range(2)])
    mapped = jax.jit(jax.vmap(part.call))(keys, inputs(part))
    looped = jax.tree.map(lambda *leaves: jnp.stack(leaves), *eager(name))
    assert_close(name, mapped, looped)


# these take nodes, first chains or zeros of JAX's default type
OF_DEFAULT_TYPE = {"density, flat", "quadrature", "pool"}
TYPED = [n for n in PARTS if not (n in ESTIMATORS or n in OF_DEFAULT_TYPE)]


@pytest.mark.case("A17")
@pytest.mark.parametrize("name", TYPED)
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_results_have_the_type_of_x(name, dtype):
    """Integers count as JAX's default type of floats."""
    part = PARTS[name]
    with jax.enable_x64(True):
        shapes = jax.eval_shape(part.call, random.key(0), jax.ShapeDtypeStruct(part.x.shape, dtype))
        shapes = shapes.position if name in POOLS else shapes
        floats = {leaf.dtype for leaf in jax.tree.leaves(shapes) if jnp.issubdtype(leaf.dtype, jnp.floating)}
        assert floats == {jnp.dtype("float64" if dtype == "int32" else dtype)}


@pytest.mark.case("A17")
@pytest.mark.parametrize("name", [n for n in PARTS if not (n in ESTIMATORS or PARTS[n].is_random)])
def test_double_precision_is_the_same_number(name):
    part = PARTS[name]
    with jax.enable_x64(True):
        double = jax.jit(part.call)(random.key(0), np.asarray(part.x, np.float64))
    for a, b in zip(*map(jax.tree.leaves, (double, eager(name)[0])), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-5)


@pytest.mark.case("A17")
@pytest.mark.parametrize("name", [name for name in NAMES if getattr(name, "values", [name])[0] in ESTIMATORS])
def test_training_in_double_precision_stays_double(name):
    part = PARTS[name]
    with jax.enable_x64(True):
        shapes = jax.eval_shape(part.call, random.key(0), jax.ShapeDtypeStruct(part.x.shape, jnp.float64))
        floats = {leaf.dtype for leaf in jax.tree.leaves(shapes) if jnp.issubdtype(leaf.dtype, jnp.floating)}
        assert floats == {jnp.dtype("float64")}
