"""What a newcomer waits for: imports, the first call, and that a second one compiles nothing. One line each, of new processes.

python benchmarks/speed/first_call.py [--repeats 5]
"""

import argparse
import statistics
import subprocess
import sys

IMPORTS = {
    "import jax, numpyro, blackjax, arviz": "import jax, numpyro, blackjax, arviz",
    "import numpyro_ebm": "import numpyro_ebm",
}

SETTING = """
import time, jax, numpyro, optax, numpyro.distributions as dist, numpyro_ebm as ebm
from jax import monitoring, random
from numpyro.infer import SVI, Trace_ELBO

compiled = []
monitoring.register_event_duration_secs_listener(
    lambda name, seconds, **_: compiled.append(seconds) if "backend_compile" in name else None
)
x, new = (ebm.SphereUniform(15).sample(random.key(seed), (10_000,)) for seed in (0, 1))

def model(x):
    energy = ebm.f1_energy("energy", dim=15, num_neurons=64, radius=10.0)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(15)), obs=x)

def call(work, *args):
    compiled.clear()
    began = time.perf_counter()
    jax.block_until_ready(work(*args))
    print(f"{time.perf_counter() - began} {sum(compiled)} {len(compiled)}")
"""

CALLS = {
    "DualSGDA.run, 100 updates": """
dual = ebm.DualSGDA(model, step_size=0.02, num_chains=20_000)
for data in (x, new):
    call(lambda: dual.run(random.key(0), 100, data, progress_bar=False).params)
""",
    "jit(DualSGDA.update)": """
dual = ebm.DualSGDA(model, step_size=0.02, num_chains=20_000)
state, update = dual.init(random.key(0), x), jax.jit(dual.update)
for data in (x, new):
    call(lambda: update(state, data))
""",
    "SVI.init and run under estimate, 100 updates": """
pool = ebm.ChainPool(ebm.kernels.mala(0.02), pool_size=1_000)
svi = SVI(ebm.estimate(model, ebm.ContrastiveDivergence(pool)), lambda x: None, optax.adam(1e-3), Trace_ELBO())
call(lambda: svi.run(random.key(0), 100, x, progress_bar=False).params)
""",
    "jit(SVI.update) under estimate": """
pool = ebm.ChainPool(ebm.kernels.mala(0.02), pool_size=1_000)
svi = SVI(ebm.estimate(model, ebm.ContrastiveDivergence(pool)), lambda x: None, optax.adam(1e-3), Trace_ELBO())
state, update = svi.init(random.key(0), x), jax.jit(svi.update)
for data in (x, new):
    call(lambda: update(state, data))
""",
}


def run(code: str) -> list[list[float]]:
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    return [[float(number) for number in line.split()] for line in output.splitlines()]


def main(repeats: int):
    print(f"{'':46} {'seconds':>8} {'lowest':>7} {'highest':>8} {'of them compiling':>18} {'programs':>9}")

    def line(label, seconds, compiling="", programs=""):
        low, high = min(seconds), max(seconds)
        print(
            f"{label:46} {statistics.median(seconds):8.2f} {low:7.2f} {high:8.2f} {compiling:>18} {programs:>9}",
            flush=True,
        )

    for label, code in IMPORTS.items():
        timed = f"import time; began = time.perf_counter(); {code}; print(time.perf_counter() - began)"
        line(label, [run(timed)[0][0] for _ in range(repeats)])
    for label, code in CALLS.items():
        runs = [run(SETTING + code) for _ in range(repeats)]
        for call, name in zip(zip(*runs, strict=True), (label, "    again, on new data"), strict=False):
            seconds, compiling, programs = zip(*call, strict=True)
            line(name, seconds, f"{statistics.median(compiling):.2f}", f"{max(programs):.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    main(parser.parse_args().repeats)
