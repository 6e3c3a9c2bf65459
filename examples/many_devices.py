"""Dual SGDA on all devices of all processes: the same file on a laptop, on a machine with several GPUs and on a cluster.

    python examples/many_devices.py                                               # this machine's devices
    XLA_FLAGS=--xla_force_host_platform_device_count=2 python examples/many_devices.py   # two, of one CPU
    srun --ntasks 8 python examples/many_devices.py --cluster                     # a process per task, under Slurm

Observations, draws of a teacher on the sphere of R^15, are sharded by their rows, and particles with them; neurons are on
every device. Prints devices, how particles are spread and the divergence from the teacher, once. Half a minute on two cores.
"""

import argparse
import sys

import jax

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cluster", action="store_true", help="join the other processes of this job")
    parser.add_argument("--updates", type=int, default=300)
    arguments = parser.parse_args()
    if arguments.cluster:  # before an import of BlackJAX, which starts JAX's backends
        jax.distributed.initialize()

import jax.numpy as jnp
import numpy as np
import numpyro
from jax import random
from jax.sharding import NamedSharding, PartitionSpec

import numpyro_ebm as ebm

DIM = 15


def model(x):
    energy = ebm.f1_energy("energy", dim=DIM, num_neurons=64, radius=10.0)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(DIM)), obs=x)


def main(num_updates):
    neuron = jnp.zeros((1, DIM)).at[0, 0].set(1.0)
    teacher = ebm.EnergyBased(ebm.F1Energy(neuron, jnp.zeros(1), -jnp.ones(1), radius=10.0), ebm.SphereUniform(DIM))
    draws = np.asarray(ebm.smc_sampler(teacher, random.key(0), 10_240).particles)

    # every process gives the rows that its own devices hold; here each has the whole
    rows = NamedSharding(jax.make_mesh((jax.device_count(),), ("data",)), PartitionSpec("data"))
    size = len(draws) - len(draws) % jax.device_count()
    x = jax.make_array_from_callback((size, DIM), rows, lambda index: draws[:size][index])

    dual = ebm.DualSGDA(model, step_size=2e-2, timescale=10.0, num_chains=2_048 * jax.device_count())
    first = jax.process_index() == 0
    result = dual.run(random.key(1), num_updates, x, progress_bar=first and sys.stderr.isatty())
    fitted = ebm.fitted_distribution(model, jax.tree.map(np.asarray, result.params), draws[:1])
    divergence = ebm.kl_divergence(teacher, fitted, random.key(2), x=draws)
    particles = result.state.mutable_state["x$chains"]["state"].position
    if first:
        print(f"{jax.device_count()} devices of {jax.process_count()} processes, particles {particles.sharding.spec}")
        print(f"KL(teacher, fit) {divergence.value:.3f} +- {divergence.stderr:.3f} nats")


if __name__ == "__main__":
    main(arguments.updates)
