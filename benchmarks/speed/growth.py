"""Time and memory of a dual SGDA update as one size grows, and training on data larger than the memory it takes.

    python benchmarks/speed/growth.py [--repeats 3]

A new process for each line; memory is its largest. The exponent is of a doubling: 1 is linear, 0 constant.
"""

import argparse
import math
import statistics
import subprocess
import sys
import tempfile

SIZES = {"particles": 20_000, "neurons": 64, "dim": 15, "data": 10_000}
FACTORS = (1, 2, 4, 8)

UPDATES = """
import resource, sys, time, jax, numpyro, numpyro_ebm as ebm
from jax import lax, random

particles, neurons, dim, data = map(int, sys.argv[1:])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
x = ebm.SphereUniform(dim).sample(random.key(0), (data,))

def model(x):
    energy = ebm.f1_energy("energy", dim=dim, num_neurons=neurons, radius=10.0)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(dim)), obs=x)

dual = ebm.DualSGDA(model, step_size=0.02, num_chains=particles)
state = dual.init(random.key(1), x)
many = jax.jit(lambda state, x: lax.fori_loop(0, 10, lambda _, state: dual.update(state, x)[0], state))
state = jax.block_until_ready(many(state, x))
began = time.perf_counter()
jax.block_until_ready(many(state, x))
print((time.perf_counter() - began) / 10, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""

FROM_DISK = """
import resource, sys, time, numpy as np, jax, numpyro, numpyro_ebm as ebm
from jax import random

path, gibibytes, size = sys.argv[1], float(sys.argv[2]), 10_000
num = int(gibibytes * 2**30) // (15 * 4) // size * size
rng = np.random.default_rng(0)
with open(path, "wb") as file:
    for _ in range(num // size):
        rows = rng.normal(size=(size, 15)).astype(np.float32)
        (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).tofile(file)

def batches():
    with open(path, "rb") as file:
        for _ in range(num // size):
            yield np.fromfile(file, np.float32, 15 * size).reshape(size, 15)

def model(batch):
    energy = ebm.f1_energy("energy", dim=15, num_neurons=64, radius=10.0)
    with numpyro.plate("data", num, subsample_size=size):
        numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(15)), obs=batch)

dual = ebm.DualSGDA(model, step_size=0.02, num_chains=20_000)
state, update = dual.init(random.key(0), next(batches())), jax.jit(dual.update)
began = time.perf_counter()
for count, batch in enumerate(batches(), 1):
    state, loss = update(state, batch)
jax.block_until_ready(loss)
print((time.perf_counter() - began) / count, count, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


def run(code: str, *args) -> list[float]:
    command = [sys.executable, "-c", code, *map(str, args)]
    return [
        float(number) for number in subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    ]


def main(repeats: int, gibibytes: float):
    print(f"{'':12} {'size':>8} {'ms per update':>14} {'exponent':>9} {'MiB':>7} {'exponent':>9}")
    for name in SIZES:
        before = None
        for factor in FACTORS:
            sizes = SIZES | {name: SIZES[name] * factor}
            seconds, memory = map(
                statistics.median, zip(*(run(UPDATES, *sizes.values()) for _ in range(repeats)), strict=True)
            )
            grown = (
                ["", ""]
                if before is None
                else [f"{math.log2(new / old):.2f}" for new, old in zip((seconds, memory), before, strict=True)]
            )
            print(
                f"{name:12} {sizes[name]:8} {1e3 * seconds:14.2f} {grown[0]:>9} {memory:7.0f} {grown[1]:>9}", flush=True
            )
            before = seconds, memory
    for size in (gibibytes / 8, gibibytes):
        with tempfile.NamedTemporaryFile() as file:
            seconds, updates, memory = run(FROM_DISK, file.name, size)
        print(
            f"{size:g} GiB of data read once from disk: {updates:.0f} updates, {1e3 * seconds:.2f} ms each, {memory:.0f} MiB in all"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--gibibytes", type=float, default=4)
    options = parser.parse_args()
    main(options.repeats, options.gibibytes)
