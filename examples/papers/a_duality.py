"""Paper A's Theorem 1 in numbers: on a grid, min and max may be exchanged.

Maximum likelihood over a ball of neurons' measures, and its dual over measures of particles, as two convex programs that
know nothing of each other, solved by SciPy; beside them the coupled flow, which is to end at both optima. Data: 300 draws of a
teacher, three seeds. Writes ``a_duality.png``. Under a minute on two cores.
"""

import jax
import matplotlib.pyplot as plt
import numpy as np
from common import is_small, judge, print_table, report, spread
from scipy.optimize import minimize

import numpyro_ebm as ebm

RADIUS = 5.0


def sampled(num: int, seed: int) -> np.ndarray:
    """Frequencies on the grid of 300 draws of a two-mode density, each cell with a thousandth of uniform."""
    rng = np.random.default_rng(seed)
    angles = 2 * np.pi * np.arange(num) / num
    density = np.exp(3 * np.abs(np.cos(angles / 2 - 0.3)) ** 3 + 2 * np.cos(2 * angles))
    counts = rng.multinomial(300, density / density.sum())
    return 0.999 * counts / 300 + 0.001 / num


def solve_primal(dynamics: ebm.MeasureDynamics) -> np.ndarray:
    """Signed masses of neurons of the largest log-likelihood in the ball."""
    num = len(dynamics.neuron_angles)
    loss = jax.jit(jax.value_and_grad(lambda g: -dynamics.primal(g[:num] - g[num:])))
    found = minimize(
        lambda g: tuple(np.asarray(value, float) for value in loss(g)),
        np.full(2 * num, RADIUS / 2 / num),
        jac=True,
        bounds=[(0, None)] * (2 * num),
        constraints={
            "type": "ineq",
            "fun": lambda g: RADIUS - g.sum(),
            "jac": lambda g: -np.ones(2 * num),
        },
        method="SLSQP",
        options={"maxiter": 2_000, "ftol": 1e-12},
    )
    return found.x[:num] - found.x[num:]


def solve_dual(dynamics: ebm.MeasureDynamics) -> np.ndarray:
    """Probabilities of the least dual value, as an epigraph: a divergence plus a bound on all moments that differ."""
    features, data = np.asarray(dynamics.features, float), np.asarray(dynamics.data, float)
    num = len(data)
    moments = np.concatenate([features.T, -features.T])
    rows = np.concatenate([-moments, np.ones((len(moments), 1))], 1)

    def loss(z):
        particles = np.maximum(z[:-1], 1e-300)
        logs = np.log(particles * num)
        return particles @ logs + RADIUS * z[-1], np.append(logs + 1, RADIUS)

    found = minimize(
        loss,
        np.append(np.full(num, 1 / num), np.max(np.abs(features.T @ (1 / num - data)))),
        jac=True,
        bounds=[(1e-12, None)] * (num + 1),
        constraints=[
            {"type": "ineq", "fun": lambda z: rows @ z + moments @ data, "jac": lambda z: rows},
            {"type": "eq", "fun": lambda z: z[:-1].sum() - 1, "jac": lambda z: np.append(np.ones(num), 0)},
        ],
        method="SLSQP",
        options={"maxiter": 2_000, "ftol": 1e-14},
    )
    return found.x[:-1] / found.x[:-1].sum()


def main(small: bool):
    num, num_steps = (24, 20_000) if small else (40, 100_000)
    rows, gaps, distances, flows = [], [], [], []
    with jax.enable_x64(True):
        for seed in range(3):
            dynamics = ebm.MeasureDynamics(sampled(num, seed), RADIUS, timescale=10.0)
            neurons, particles = solve_primal(dynamics), solve_dual(dynamics)
            primal, dual = float(dynamics.primal(neurons)), float(dynamics.dual(particles))
            fitted = np.asarray(dynamics.gibbs(dynamics.features @ neurons))
            state, history = dynamics.run(num_steps)
            rows.append([seed, primal, dual, float(history.primal[-1]), float(history.dual[-1])])
            gaps.append(abs(dual - primal))
            distances.append(np.abs(fitted - particles).sum() / 2)
            flows.append(float(history.dual[-1] - history.primal[-1]))
    print_table(
        ["seed", "max over neurons", "min over particles", "flow, primal", "flow, dual"],
        [[seed, *(f"{value:.6f}" for value in values)] for seed, *values in rows],
    )
    print(f"\ngap of the programs {spread(gaps)}; gap of the flow {spread(flows)}")
    print(f"total variation of the two optimal measures {spread(distances)}")

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    angles = np.asarray(dynamics.angles)
    axes[0].bar(angles, np.asarray(dynamics.data), width=2 * np.pi / num, alpha=0.3, label="data")
    axes[0].plot(angles, fitted, label="Gibbs measure of the primal optimum")
    axes[0].plot(angles, particles, "--", label="dual optimum")
    axes[0].plot(angles, state.particles, ":", label="particles of the flow")
    axes[0].set(xlabel="angle", ylabel="probability")
    axes[0].legend()
    axes[1].plot(history.primal, label="primal value of the flow")
    axes[1].plot(history.dual, label="dual value of the flow")
    axes[1].axhline(primal, color="black", linewidth=0.8, label="optimum")
    axes[1].set(xlabel="step", ylabel="nats per observation", xscale="log")
    axes[1].legend()
    return report(
        [
            judge(
                "the optimal values of both problems agree",
                max(gaps) < 1e-4,
                f"largest difference {max(gaps):.1g} nats",
            ),
            judge(
                "the optimal measures agree",
                max(distances) < 1e-2,
                f"largest total variation {max(distances):.1g}",
            ),
            judge(
                "the coupled flow ends at both", max(flows) < 0.02, f"gap after {num_steps} steps {max(flows):.1g} nats"
            ),
        ],
        figure,
        "a_duality",
    )


if __name__ == "__main__":
    main(is_small(__doc__))
