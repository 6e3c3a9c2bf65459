"""Paper A's Proposition 1: Algorithm 1's particles and neurons approach the measure dynamics as they grow in number.

The circle, a two-mode density, a fixed time. Dual SGDA with m neurons and 16 m particles against the flow of measures on a fine
grid from the same start; the distance of their energies, which are zero on average, in the root mean square over the circle, for
five seeds each, and the rate at which it falls. Writes ``a_chaos.png``. Three minutes on two cores.
"""

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from common import is_small, judge, print_table, report, spread, student
from jax import random

import numpyro_ebm as ebm

RADIUS, TIMESCALE, TIME = 5.0, 10.0, 1.0


def circle(angles):
    return np.stack([np.cos(angles), np.sin(angles)], -1).astype(np.float32)


def density(angles):
    return np.exp(2 * np.cos(2 * angles) + np.cos(angles - 0.4))


def energies_apart(first, second) -> float:
    """Root mean square over the circle, of energies less their means, which the density does not see."""
    first, second = (values - np.mean(values) for values in (np.asarray(first), np.asarray(second)))
    return float(np.sqrt(np.mean((first - second) ** 2)))


def main(small: bool):
    sizes, seeds, step_size = ((16, 64, 256), range(3), 5e-3) if small else ((16, 64, 256, 1024), range(5), 2e-3)
    num = 96
    angles = 2 * np.pi * np.arange(num) / num
    data = density(angles) / density(angles).sum()
    dynamics = ebm.MeasureDynamics(data, RADIUS, timescale=TIMESCALE)
    state, history = dynamics.run(int(TIME / float(dynamics.step(dynamics.init()).time)) * 2)
    last = int(np.argmax(np.asarray(history.time) >= TIME))
    state, _ = dynamics.run(last + 1)
    exact = dynamics.energy(state)
    scale = energies_apart(exact, 0 * exact)

    # the data without sampling noise: even quantiles
    fine = 2 * np.pi * np.arange(100_000) / 100_000
    quantiles = np.interp((np.arange(4096) + 0.5) / 4096, np.cumsum(density(fine)) / density(fine).sum(), fine)
    x = circle(quantiles)
    errors = {}
    for size in sizes:
        model = student(2, size, RADIUS)
        dual = ebm.DualSGDA(
            model,
            step_size=step_size,
            timescale=TIMESCALE,
            num_chains=16 * size,
            kernel=ebm.kernels.sphere.ula,
        )
        errors[size] = []
        for seed in seeds:
            result = dual.run(random.key(seed), round(TIME / step_size), x, progress_bar=False)
            energy = ebm.fitted_distribution(model, result.params, x).energy(jnp.asarray(circle(angles)))
            errors[size].append(energies_apart(energy, exact) / scale)
    means = np.array([np.mean(errors[size]) for size in sizes])
    rate = np.polyfit(np.log(sizes), np.log(means), 1)[0]
    print_table(
        ["neurons", "particles", "distance of energies, relative"],
        [[size, 16 * size, spread(errors[size])] for size in sizes],
    )
    print(f"the distance falls as the number of neurons to the power {rate:.2f}")

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    axes[0].plot(angles, exact - exact.mean(), "k", label="measures")
    axes[0].plot(angles, energy - energy.mean(), "--", label=f"{sizes[-1]} neurons")
    axes[0].set(xlabel="angle", ylabel="energy")
    axes[0].legend()
    axes[1].errorbar(sizes, means, [np.std(errors[size]) for size in sizes], fmt="o-")
    axes[1].plot(sizes, means[0] * (np.array(sizes) / sizes[0]) ** -0.5, ":", label="power -1/2")
    axes[1].set(xscale="log", yscale="log", xlabel="neurons", ylabel="relative distance of energies")
    axes[1].legend()
    return report(
        [
            judge(
                "particles and neurons approach the measure dynamics",
                -0.75 < rate < -0.3,
                f"power {rate:.2f} of their number, chance alone gives -1/2",
            )
        ],
        figure,
        "a_chaos",
    )


if __name__ == "__main__":
    main(is_small(__doc__))
