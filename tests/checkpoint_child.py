"""What child processes of the tests of checkpoints do; imported by them, so it imports little."""

import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import random

import numpyro_ebm as ebm
from numpyro_ebm.checkpoint import restore, save


def model(x):
    energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=5.0)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=x)


def dual_and_data():
    dual = ebm.DualSGDA(model, step_size=1e-2, num_chains=50, restart_prob=0.1)
    return dual, ebm.SphereUniform(3).sample(random.key(7), (60,))


def go_on(path, num_steps):
    """Take `num_steps` more updates from the state at `path`, and save where they end there."""
    dual, x = dual_and_data()
    state = restore(path, like=dual.init(random.key(99), x))
    save(path, dual.run(random.key(98), num_steps, x, init_state=state, progress_bar=False).state)


def train(path, num_steps):
    """Train, saving as it goes, from where the last process that did so was killed."""
    dual, x = dual_and_data()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "run goes on")
        return dual.run(random.key(0), num_steps, x, progress_bar=False, checkpoint=path, checkpoint_every=7)


def counters(count):
    return {"count": count, **{f"leaf {i}": jnp.full(1000 * i, count) for i in range(10)}}


def keep_saving(path, start, last):
    """Save states that count up from `start`; `last` is the last that was saved."""
    save(f"{path} that takes long", counters(start))  # the first save of a process
    last.value = start - 1
    for count in itertools.count(start):
        save(path, counters(count))
        last.value = count


def restore_sharded(path):
    """Save and restore arrays on eight devices, and on four, and on one."""
    assert jax.device_count() == 8
    eight, four = (
        jax.NamedSharding(jax.make_mesh((num,), ("chains",), devices=jax.devices()[:num]), jax.P("chains"))
        for num in (8, 4)
    )
    state = {
        "x": jnp.arange(32.0).reshape(16, 2),
        "rng_key": random.split(random.key(0), 8),
        "empty": jnp.zeros((8, 0)),
    }
    on_eight, on_four = jax.device_put(state, eight), jax.device_put(state, four)
    structs = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=eight), state)
    for saved in (state, on_eight, on_four):
        save(path, saved)
        for like, expected in ((on_eight, eight), (on_four, four), (structs, eight), (state, None)):
            restored = restore(path, like)
            for name, leaf in restored.items():
                assert leaf.committed == (expected is not None)
                assert leaf.sharding.is_equivalent_to(expected or state[name].sharding, leaf.ndim)
            assert np.array_equal(restored["x"], state["x"])
            assert np.array_equal(random.key_data(restored["rng_key"]), random.key_data(state["rng_key"]))
    # shapes traced on an explicit mesh know the mesh, but not its devices
    assert np.array_equal(restore(path, jax.eval_shape(lambda: on_eight))["x"], state["x"])
