"""What child processes of the tests of many devices do: train on one device, on a mesh, or on a mesh of processes."""

import sys

import jax


def main(out: str, process: int, num_processes: int, port: int):
    """Train on all devices there are, and write what came of it to `out`, a ``.npz`` file."""
    if num_processes > 1:  # before anything starts JAX's backends
        jax.distributed.initialize(f"127.0.0.1:{port}", num_processes, process)

    import jax.numpy as jnp
    import numpy as np
    import numpyro
    import numpyro.distributions as dist
    import optax
    import pytest
    from jax import random
    from jax.sharding import NamedSharding, PartitionSpec
    from numpyro.infer import Trace_ELBO

    import numpyro_ebm as ebm

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    points = np.random.default_rng(0).normal(size=(400, 3)).astype(np.float32)
    points /= np.linalg.norm(points, axis=-1, keepdims=True)

    def sharded(points):
        rows = NamedSharding(mesh, PartitionSpec("data"))
        return jax.make_array_from_callback(points.shape, rows, lambda index: points[index])

    x = sharded(points)

    def neurons(x):
        energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=5.0)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=x)

    def tilt(x):
        loc = numpyro.param("loc", jnp.zeros(3))
        base = dist.Normal(0, 1).expand([3]).to_event(1)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(lambda x: -(x @ loc), base), obs=x)

    def arrays(result, site="x"):
        chains = result.state.mutable_state[f"{site}$chains"]["state"].position
        return {**result.params, "losses": result.losses, "chains": chains}

    dual = ebm.DualSGDA(neurons, step_size=1e-2, num_chains=800, restart_prob=0.1)
    found = {f"dual {k}": v for k, v in arrays(dual.run(random.key(1), 50, x, progress_bar=False)).items()}
    assert found["dual chains"].sharding.is_fully_replicated == (jax.device_count() == 1)
    faulty = points.copy()
    faulty[399, 1] = np.nan
    with pytest.raises(ValueError, match="got nan at row 399, column 1"):
        dual.init(random.key(1), sharded(faulty))

    pool = ebm.ChainPool(pool_size=400, num_steps=5)
    svi = ebm.MonitoredSVI(
        ebm.estimate(tilt, ebm.ContrastiveDivergence(pool)), lambda x: None, optax.adam(1e-2), Trace_ELBO()
    )
    found |= {f"svi {k}": v for k, v in arrays(svi.run(random.key(1), 50, x, progress_bar=False)).items()}

    everywhere = NamedSharding(mesh, PartitionSpec())
    found = jax.jit(lambda found: found, out_shardings=everywhere)(found)
    leaves = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(found)}
    np.savez(out, devices=jax.device_count(), **leaves)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
