"""Checkpoints: bit for bit, whole or not at all, and never taken for another state's."""

import logging
import multiprocessing
import shutil
import sys
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import linen, nnx
from jax import random
from numpyro.contrib.module import eqx_module, flax_module, nnx_module
from numpyro.infer import SVI, Trace_ELBO

import numpyro_ebm as ebm
from numpyro_ebm.checkpoint import restore, save
from tests.checkpoint_child import counters, dual_and_data, go_on, keep_saving, restore_sharded, train

STATE = {
    "array": jnp.arange(6.0).reshape(2, 3),
    "half": jnp.array([0.1, jnp.nan, -jnp.inf], jnp.bfloat16),
    "bool": jnp.array([True, False]),
    "complex": jnp.array([1.0 + 2.0j]),
    "weak": jnp.asarray(2.0),
    "key": random.key(3),
    "keys": random.split(random.key(4, impl="rbg"), 2),
    "raw": random.PRNGKey(5),
    "no rows": jnp.zeros((0, 3)),
    "no keys": random.split(random.key(6), 0),
    "numpy": np.array([0.1, 2.0]),
    "numpy scalar": np.float64(0.1),
    "numbers": [True, 3, 0.1, 1j, -(2**63)],
    "nothing": [None, (), {}, optax.EmptyState()],
    "function": jax.nn.relu,
}


def assert_same(found, expected):
    """All that distinguishes two states, to the bit."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert type(a) is type(b)
        if isinstance(b, jax.Array):
            assert jax.typeof(a) == jax.typeof(b)
            assert a.committed == b.committed
            a, b = (random.key_data(k) if jnp.issubdtype(k.dtype, jax.dtypes.prng_key) else k for k in (a, b))
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def blank(state):
    """The same shapes, other values."""

    def change(leaf):
        if isinstance(leaf, jax.Array):
            return jax.eval_shape(lambda: leaf)
        return leaf if callable(leaf) or isinstance(leaf, bool) else leaf * 0

    return jax.tree.map(change, state)


@pytest.mark.parametrize("like", [STATE, blank(STATE)], ids=["arrays", "shapes"])
def test_round_trip(tmp_path, like):
    save(tmp_path, STATE)
    restored = restore(tmp_path, like=like)
    assert_same(restored, STATE)
    assert restored["weak"].weak_type


@pytest.mark.parametrize("state", [None, (), jnp.arange(3), 1.5, {"nothing": None}])
def test_states_of_few_leaves(tmp_path, state):
    save(tmp_path / "new" / "directories", state)
    assert_same(restore(tmp_path / "new" / "directories", like=state), state)


def test_paths_are_strings_too_relative_to_where_one_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save("here", STATE)
    assert_same(restore(str(tmp_path / "here"), like=STATE), STATE)


def test_numpy_and_jax_arrays_stand_in_for_each_other(tmp_path):
    save(tmp_path, {"a": jnp.arange(3), "b": np.arange(3, dtype=np.float32)})
    restored = restore(tmp_path, like={"a": np.zeros(3, np.int32), "b": jnp.zeros(3)})
    assert_same(restored, {"a": np.arange(3, dtype=np.int32), "b": jnp.arange(3.0)})


class Linen(linen.Module):
    @linen.compact
    def __call__(self, x):
        return jnp.sum(linen.Dense(1)(jnp.tanh(linen.Dense(4)(x))))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, x):
        return jnp.sum(jnp.tanh(self.linear(x)))


def equinox_network(key=0):
    return eqx.nn.MLP(2, "scalar", 4, 1, key=random.key(key))


NETWORKS = {
    "f2": lambda: ebm.f2_energy("net", dim=2, num_neurons=8, radius=2.0),
    "flax": lambda: flax_module("net", Linen(), input_shape=(2,)),
    "nnx": lambda: nnx_module("net", Nnx(nnx.Rngs(0))),
    "equinox": lambda: eqx_module("net", equinox_network()),
}


@pytest.mark.slow
@pytest.mark.parametrize("network", NETWORKS)
def test_training_goes_on_from_a_restored_state(tmp_path, network):  # 15 s
    def model(x):
        with numpyro.plate("data", x.shape[0]):
            base = dist.Normal(jnp.zeros(2), 1.0).to_event(1)
            numpyro.sample("x", ebm.EnergyBased(NETWORKS[network](), base), obs=x)

    x = random.normal(random.key(1), (30, 2))
    pool = ebm.ChainPool(ebm.kernels.mala(0.1), pool_size=20)
    svi = SVI(ebm.estimate(model, ebm.ContrastiveDivergence(pool)), lambda x: None, optax.adam(1e-2), Trace_ELBO())
    update = jax.jit(svi.update)
    start = jax.jit(svi.init)(random.key(0), x)
    state, _ = update(start, x)
    save(tmp_path, state)
    restored = restore(tmp_path, like=start)
    assert_same(restored, state)
    assert_same(restore(tmp_path, like=jax.eval_shape(svi.init, random.key(2), x)), state)
    assert_same(update(restored, x), update(state, x))


def test_modules_take_their_functions_from_like(tmp_path):
    save(tmp_path, equinox_network())
    x = jnp.arange(2.0)
    assert restore(tmp_path, like=equinox_network(1))(x) == equinox_network()(x) != equinox_network(1)(x)


def in_child(target, *args):
    child = multiprocessing.get_context("spawn").Process(target=target, args=args)
    child.start()
    child.join()
    assert child.exitcode == 0


@pytest.mark.slow
def test_a_new_process_goes_on_bit_for_bit(tmp_path):  # 20 s
    dual, x = dual_and_data()
    half = dual.run(random.key(0), 100, x, progress_bar=False).state
    save(tmp_path, half)
    in_child(go_on, tmp_path, 100)
    whole = dual.run(random.key(0), 200, x, progress_bar=False).state
    assert_same(restore(tmp_path, like=half), whole)


@pytest.mark.slow
def test_sharded_arrays(tmp_path, monkeypatch):  # 10 s
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    in_child(restore_sharded, tmp_path)


@pytest.mark.slow
def test_a_killed_training_goes_on_bit_for_bit(tmp_path):
    """60 s."""
    rng, path, num_kills = np.random.default_rng(0), tmp_path / "checkpoint", 0
    while num_kills < 6:
        child = multiprocessing.get_context("spawn").Process(target=train, args=(path, 100_000))
        child.start()
        while not path.exists() and child.is_alive():  # imports, and the first save
            time.sleep(0.1)
        time.sleep(5 * rng.random())
        child.kill()
        child.join()
        num_kills += 1
    dual, x = dual_and_data()
    done = int(restore(path, like=dual.init(random.key(0), x)).optim_state[0])
    assert done > 0
    resumed = train(path, done + 50)
    whole = dual.run(random.key(0), done + 50, x, progress_bar=False)
    assert_same(resumed.state, whole.state)


def kill_saves(path, num_kills):
    context = multiprocessing.get_context("forkserver")
    # children are forked off a server that has imported these; importing BlackJAX starts JAX's threads, which don't fork
    context.set_forkserver_preload(["arviz", "numpyro.infer", "orbax.checkpoint"])
    rng = np.random.default_rng(0)
    last, found, within = context.Value("q", lock=False), -1, 0
    for _ in range(num_kills):
        last.value = -2
        child = context.Process(target=keep_saving, args=(path, found + 1, last))
        child.start()
        while last.value == -2:
            assert child.is_alive()
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.5))
        child.kill()
        child.join()
        before = last.value
        within += any(entry.name.endswith("tmp") for entry in path.glob("*"))
        try:
            restored = restore(path, like=counters(0))
        except FileNotFoundError:
            assert before == -1
            continue
        found = restored["count"]
        assert before <= found <= before + 1
        assert_same(restored, counters(found))
    assert found > 0
    save(path, counters(0))
    assert len(list(path.iterdir())) == 1
    return within


@pytest.mark.slow
def test_many_killed_saves_leave_whole_checkpoints(tmp_path):
    """Within 300 s."""
    assert kill_saves(tmp_path / "checkpoint", 50) > 5  # kills that came in the midst of a save


@pytest.mark.parametrize("left", [[], ["_CHECKPOINT_METADATA"], ["arrays", "structure"], ["commit_success.txt"]])
def test_an_older_checkpoint_half_deleted_is_no_obstacle(tmp_path, left, capfd):
    save(tmp_path, counters(1))
    older = next(tmp_path.iterdir())
    shutil.copytree(older, tmp_path.parent / "copy")
    save(tmp_path, counters(2))
    shutil.move(tmp_path.parent / "copy", older)
    for entry in older.iterdir():
        if entry.name not in left:
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    assert_same(restore(tmp_path, like=counters(0)), counters(2))
    save(tmp_path, counters(3))
    assert len(list(tmp_path.iterdir())) == 1
    assert_same(restore(tmp_path, like=counters(0)), counters(3))
    assert capfd.readouterr() == ("", "")


def test_nothing_is_printed_logged_or_left_running(tmp_path, capfd, caplog):
    caplog.set_level(logging.WARNING)
    before = set(threading.enumerate())
    for count in range(3):
        save(tmp_path, counters(count))
        restore(tmp_path, like=counters(0))
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
        assert not thread.is_alive()
    assert capfd.readouterr() == ("", "")
    assert not caplog.records


CHANGES = {
    "shape": (
        STATE | {"array": jnp.zeros((3, 2))},
        r"state\['array'\]: expected float32\[3, 2\], found float32\[2, 3\] \(1 of",
    ),
    "dtype": (
        STATE | {"half": jnp.zeros(3)},
        r"state\['half'\]: expected float32\[3\], found bfloat16\[3\]",
    ),
    "no such leaf": (STATE | {"more": jnp.zeros(3)}, r"state\['more'\]: expected float32\[3\], found nothing"),
    "a leaf more": (
        {name: leaf for name, leaf in STATE.items() if name != "raw"},
        r"state\['raw'\]: expected nothing, found uint32\[2\]",
    ),
    "another kind of key": (
        STATE | {"key": random.key(0, impl="rbg")},
        r"state\['key'\]: expected key<rbg>\[\], found key<fry>\[\]",
    ),
    "raw key": (STATE | {"key": random.PRNGKey(0)}, r"state\['key'\]: expected uint32\[2\], found key<fry>\[\]"),
    "number": (STATE | {"weak": 2.0}, r"state\['weak'\]: expected float, found float32\[\]"),
    "nothing": (STATE | {"function": None}, r"state\['function'\]: expected NoneType, found function"),
    "another model": (
        {"loc": 0.0},
        r"state\['loc'\]: expected float, found nothing \(\d+ of \d+ leaves differ\): give as `like`",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_state_is_refused(tmp_path, change):
    save(tmp_path, STATE)
    like, message = CHANGES[change]
    with pytest.raises(ValueError, match=message):
        restore(tmp_path, like)


def test_other_precision_is_refused(tmp_path):
    save(tmp_path / "32", {"loc": jnp.ones(3)})
    with jax.enable_x64(True):
        save(tmp_path / "64", {"loc": jnp.ones(3)})
        with pytest.raises(ValueError, match=r"expected float64\[3\], found float32\[3\].*set jax_enable_x64 to False"):
            restore(tmp_path / "32", like={"loc": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"expected float32\[3\], found float64\[3\].*set jax_enable_x64 to True"):
        restore(tmp_path / "64", like={"loc": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"state\['loc'\]: expected float64, found float32: set jax_enable_x64"):
        restore(tmp_path / "64", like={"loc": jax.ShapeDtypeStruct((3,), np.float64)})


def test_another_format_is_refused(tmp_path):
    save(tmp_path, STATE)
    (metadata,) = tmp_path.glob("*/structure/metadata")
    metadata.write_text(metadata.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(ValueError, match="expected format 1, found 2"):
        restore(tmp_path, like=STATE)


def test_where_there_is_no_checkpoint(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError, match=f"{path} has no complete checkpoint"):
            restore(path, like=STATE)
    assert not list(tmp_path.iterdir())


def test_directories_of_something_else_are_kept(tmp_path):
    thesis = tmp_path / "thesis" / "chapter.tex"
    thesis.parent.mkdir()
    thesis.write_text("…")
    with pytest.raises(FileExistsError, match=r"is a directory of something else, with 'chapter.tex' in it"):
        save(thesis.parent, STATE)
    with pytest.raises(FileExistsError, match=r"is a file"):
        save(thesis, STATE)
    assert [path.name for path in tmp_path.rglob("*")] == ["thesis", "chapter.tex"]
    assert thesis.read_text() == "…"


@pytest.mark.parametrize("leaf", ["name", 2**70, np.array(["name"]), np.longdouble(1), object()])
def test_what_is_not_numbers_is_refused(tmp_path, leaf):
    with pytest.raises(TypeError, match=r"state\[1\]: expected an array of numbers, .* found "):
        save(tmp_path, [0, leaf])
    assert not list(tmp_path.iterdir())


def test_what_has_no_values_is_refused(tmp_path):
    with pytest.raises(TypeError, match=r"state: expected a value, found ShapeDtypeStruct"):
        save(tmp_path, jax.ShapeDtypeStruct((3,), np.float32))
    with pytest.raises(TypeError, match=r"state: expected a value, found .*Tracer"):
        jax.jit(lambda x: save(tmp_path, x))(jnp.ones(3))


def test_orbax_is_asked_for_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=r"numpyro_ebm\[checkpoint\]"):
        save(tmp_path, STATE)
    with pytest.raises(ImportError, match=r"numpyro_ebm\[checkpoint\]"):
        restore(tmp_path, like=STATE)
