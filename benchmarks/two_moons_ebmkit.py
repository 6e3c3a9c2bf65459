"""Two moons by a peer: ebmkit 0.16.0's persistent contrastive divergence, 20,000 updates of a 2-128-128-1 network.

The setting is that of `two_moons.py` beside it. Measures, as training goes on, the energy gap between chains and data, and the held-out log-likelihood by quadrature.

ebmkit's settings are those of `examples/train_two_moons.py` in its source distribution: unadjusted Langevin chains (60
moves of step size 0.01 an update) in a replay buffer of 8,192, restarted from a standard normal with probability 0.05
(the buffer's default), an energy penalty of 0.1, Adam 1e-3, batches of 256, and averaged weights (EMA 0.999), which
that example samples from. The density is exp(-energy), without a base or a box. What differs from that example: it
draws 8,192 points, and stops after 6,000 updates.

`log_likelihood` is of the averaged weights, `log_likelihood_latest` of the latest ones, as in ebmkit's
`examples/benchmark_losses.py`. `--energy-reg 0` is the quick start of its README, which has no penalty.

    pip install ebmkit==0.16.0 scikit-learn
    OMP_NUM_THREADS=1 python benchmarks/two_moons_ebmkit.py --seed 0 --out two_moons_ebmkit.jsonl
"""

import argparse
import json
import math
import time
from importlib.metadata import version

import ebm
import numpy as np
import torch
from sklearn.datasets import make_moons

GAP_EVERY = 500
LOOKS = (500, 1_000, 2_000, 5_000, 10_000, 20_000)
ENERGY_LIMIT = 1e4


def moons(num: int, noise: float, seed: int) -> torch.Tensor:
    x, _ = make_moons(num, noise=noise, random_state=seed)
    return torch.from_numpy((x - np.array([0.5, 0.25])).astype(np.float32))


@torch.no_grad()
def quadrature(energy, x, bound: float = 8.0, num: int = 800, far: float = 80.0) -> dict[str, float]:
    """Log-likelihood in nats per point, normalised on a grid, and what tells whether that grid holds the mass.

    `ring_mass` is the share of the grid's mass in its outermost ring; `log_mass_beyond` the logarithm of the mass
    between the grid and ten times its width, over the mass of the grid.
    """

    def log_masses(bound):
        axis = torch.linspace(-bound, bound, num)
        points = torch.cartesian_prod(axis, axis)
        return points, -energy(points).double() + 2 * math.log(2 * bound / (num - 1))

    _, inner = log_masses(bound)
    log_z = inner.logsumexp(0)
    ring = torch.ones(num, num, dtype=torch.bool)
    ring[1:-1, 1:-1] = False
    points, outer = log_masses(far)
    return {
        "log_likelihood": float(-energy(x).double().mean() - log_z),
        "ring_mass": float((inner[ring.flatten()].logsumexp(0) - log_z).exp()),
        "log_mass_beyond": float(outer[points.abs().amax(1) > bound].logsumexp(0) - log_z),
    }


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def train(seed: int, num_steps: int, noise: float, energy_reg: float, write) -> dict:
    """Train, `write` a record at each look, and return the summary."""
    began = time.perf_counter()
    torch.manual_seed(seed)
    x, held_out = moons(20_000, noise, 0), moons(5_000, noise, 1)
    energy = ebm.nets.MLPEnergy(dim=2, hidden=(128, 128))
    buffer = ebm.ReplayBuffer(capacity=8192, shape=(2,))
    sampler = ebm.LangevinDynamics(step_size=0.01, steps=60)
    loss = ebm.ContrastiveDivergence(sampler, buffer=buffer, energy_reg=energy_reg)
    looks = {name: {} for name in ("log_likelihood", "ring_mass", "log_mass_beyond", "log_likelihood_latest")}
    diverged_at = None

    def look(step, out):
        nonlocal diverged_at
        with torch.no_grad():  # on the chains just moved, and on data
            largest = float(energy(torch.cat([out.x_neg, held_out[:256]])).abs().max())
        if diverged_at is None and not largest <= ENERGY_LIMIT:  # NaN too
            diverged_at = step
        if step % GAP_EVERY == 0:
            gap = -out.metrics["energy_gap"]  # ebmkit's is data less chains
            reach = float(buffer.data.abs().max())
            write({"step": step, "gap": finite(gap), "largest_energy": finite(largest), "chain_reach": finite(reach)})
        if step in LOOKS or step == num_steps:
            seen = quadrature(trainer.ema.module, held_out)
            seen["log_likelihood_latest"] = quadrature(energy, held_out)["log_likelihood"]
            for name in looks:
                looks[name][step] = finite(seen[name])
            write({"step": step} | {name: values[step] for name, values in looks.items()})

    trainer = ebm.Trainer(energy, loss, lr=1e-3, device="cpu", ema_decay=0.999, callback=look)
    history = trainer.fit(x, steps=num_steps, batch_size=256, verbose=False)
    return {
        "seed": seed,
        "steps": num_steps,
        **looks,
        "max_abs_gap": finite(float(np.abs([record["energy_gap"] for record in history]).max())),
        "diverged": diverged_at is not None,
        "diverged_at": diverged_at,
        "seconds": round(time.perf_counter() - began, 1),
        "noise": noise,
        "energy_reg": energy_reg,
        "ebmkit": version("ebmkit"),
        "torch": version("torch"),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--out", help="file of JSON lines to append to")
    parser.add_argument("--noise", type=float, default=0.1)
    parser.add_argument("--energy-reg", type=float, default=0.1)
    options = parser.parse_args()
    torch.set_num_threads(1)

    def write(record):
        line = json.dumps(record)
        print(line, flush=True)
        if options.out:
            with open(options.out, "a") as file:
                file.write(line + "\n")

    write(train(options.seed, options.steps, options.noise, options.energy_reg, write))


if __name__ == "__main__":
    main()
