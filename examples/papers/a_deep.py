"""Beyond paper A, its closing question: deep energies under the same scheme, timescales swept.

Two moons, a 2-64-64-1 network with a Gaussian base, `DualSGDA` with plain gradient steps (`timescale` times those of the particles),
five moves of MALA or one per update; held-out log-likelihood by quadrature, three seeds. Writes ``a_deep.png``. Six minutes on two
cores.
"""

import flax.linen as nn
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import is_small, judge, print_table, report, spread
from jax import random
from numpyro.contrib.module import flax_module
from sklearn.datasets import make_moons

import numpyro_ebm as ebm

STEP_SIZE = 1e-2


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (64, 64):
            x = nn.swish(nn.Dense(width)(x))
        return nn.Dense(1)(x)[..., 0]


def model(x):
    network = flax_module("network", Network(), input_shape=(2,))
    base = dist.Normal(0, 2).expand([2]).to_event(1)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(network, base), obs=x)


def moons(num: int, seed: int):
    return make_moons(num, noise=0.1, random_state=seed)[0].astype(np.float32) - np.array([0.5, 0.25], np.float32)


def main(small: bool):
    num, num_updates, timescales = (500, 600, (0.1, 1.0, 10.0)) if small else (1_000, 3_000, (0.1, 1.0, 10.0, 30.0))
    held_out = moons(5_000, 1_000)
    found, rows = {}, []
    for num_substeps in (1, 5):
        for timescale in timescales:
            dual = ebm.DualSGDA(
                model, step_size=STEP_SIZE, timescale=timescale, num_chains=num, num_substeps=num_substeps
            )
            values, num_lost = [], 0
            for seed in range(3):
                try:
                    result = dual.run(random.key(seed), num_updates, moons(num, seed), progress_bar=False)
                except ebm.DivergenceError:
                    num_lost += 1
                    continue
                fitted = ebm.fitted_distribution(model, result.params, moons(num, seed))
                likelihood = ebm.log_likelihood(fitted, held_out, random.key(0), method="quadrature", num_points=300)
                values.append(likelihood.mean)
            kept = num_lost == 0 and np.all(np.isfinite(values))
            found[num_substeps, timescale] = np.mean(values) if kept else -np.inf
            rows.append([num_substeps, timescale, spread(values) if kept else "", f"{num_lost} of 3"])
    print_table(["moves per update", "timescale", "held-out nats", "ran away"], rows)
    figure, ax = plt.subplots(figsize=(6, 4.5), layout="constrained")
    for num_substeps in (1, 5):
        means = [found[num_substeps, timescale] for timescale in timescales]
        ax.semilogx(timescales, means, "o-", label=f"{num_substeps} moves per update")
    ax.set(xlabel="timescale", ylabel="held-out log-likelihood, nats")
    ax.legend()
    base = float(np.mean(dist.Normal(0, 2).expand([2]).to_event(1).log_prob(held_out)))
    best = {moves: max(timescales, key=lambda t, moves=moves: found[moves, t]) for moves in (1, 5)}
    return report(
        [
            judge(
                "the scheme carries over to deep energies",
                max(found.values()) > base + 1,
                f"best {max(found.values()):.3f} held-out nats; the base gives {base:.2f}",
            ),
            judge(
                "timescales far below 1 are slower for deep energies too",
                all(found[moves, 0.1] < found[moves, 1.0] for moves in (1, 5)),
                f"{num_updates} updates",
            ),
            judge(
                "simultaneous timescales are the best choice for deep energies",
                all(b == 1.0 for b in best.values()),
                f"best timescale {best[1]:g} with one move, {best[5]:g} with five",
            ),
        ],
        figure,
        "a_deep",
    )


if __name__ == "__main__":
    main(is_small(__doc__))
