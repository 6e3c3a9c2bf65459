"""Paper A's measure dynamics on the circle: timescales, the pull towards the data, and what score matching cannot see.

Neurons and particles as measures on grids, no sampling error. Three random teachers of each kind. The first table has
the divergence of the fit after equal numbers of steps, each run at its largest stable step; the second the same with a pull
towards the data, for teachers of two modes that particles hardly cross between; the third compares two densities of the same
modes and other weights. Writes ``a_measure_dynamics.png``. About a minute on two cores.
"""

import matplotlib.pyplot as plt
import numpy as np
from common import is_small, judge, print_table, report, spread

import numpyro_ebm as ebm

TIMESCALES = (0.01, 0.1, 1.0, 10.0, 100.0)
PULLS = (0.0, 0.1, 1.0, 10.0, 100.0)


def target(num: int, kind: str, radius: float, seed: int, weight: float | None = None) -> np.ndarray:
    """Probabilities on the grid of a teacher of two neurons that attract: less than 45 degrees apart, or opposite.

    Opposite ones have modes of weights near 0.7 and 0.3, or as `weight` shares their masses.
    """
    rng = np.random.default_rng(seed)
    first, apart, share = rng.integers(num), rng.integers(num // 8), rng.uniform(0.5, 0.9)
    difference = rng.uniform(0.4, 0.6) / radius
    if kind == "multi":
        apart, share = num // 2, 0.5 + difference if weight is None else weight
    masses = np.zeros(num)
    np.subtract.at(masses, [first, (first + apart) % num], [radius * share, radius * (1 - share)])
    uniform = ebm.MeasureDynamics(np.full(num, 1 / num), radius)
    return np.asarray(uniform.gibbs(uniform.features @ masses), float)


def score_distance(p: np.ndarray, q: np.ndarray) -> float:
    width = 2 * np.pi / len(p)
    difference = np.roll(np.log(p / q), -1) - np.log(p / q)
    return float(np.sum((p + np.roll(p, -1)) / 2 * (difference / width) ** 2))


def main(small: bool):
    num, num_steps, seeds = (48, 4_000, range(3)) if small else (96, 20_000, range(3))
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.5), layout="constrained")

    def sweep(kind, radius, num_steps, **options):
        """Divergences along the run, shape (seeds, steps)."""
        runs = [ebm.MeasureDynamics(target(num, kind, radius, seed), radius, **options) for seed in seeds]
        return np.array([run.run(num_steps)[1].divergence for run in runs])

    budgets = [num_steps // 20, num_steps // 4, num_steps]
    rows, reached = [], {}
    for kind in ("mono", "multi"):
        for timescale in TIMESCALES:
            divergence = sweep(kind, 5.0, num_steps, timescale=timescale)
            reached[kind, timescale] = divergence[:, budgets[1] - 1]
            rows.append([kind, timescale, *(spread(divergence[:, budget - 1]) for budget in budgets)])
            style = "-" if kind == "mono" else "--"
            label = f"timescale {timescale:g}" if kind == "mono" else None
            colour = plt.cm.viridis(TIMESCALES.index(timescale) / len(TIMESCALES))
            axes[0].loglog(np.arange(1, num_steps + 1), divergence.mean(0), style, color=colour, label=label)
    print_table(["teacher", "timescale", *(f"KL after {budget}" for budget in budgets)], rows)
    axes[0].set(xlabel="steps (mono solid, multi dashed)", ylabel="KL, nats")
    axes[0].legend()

    print()
    rows, pulled = [], {}
    for kind, radius in (("mono", 5.0), ("multi", 20.0)):
        for pull in PULLS:
            divergence = sweep(kind, radius, num_steps, timescale=10.0, pull=pull)
            pulled[kind, pull] = divergence[:, budgets[1] - 1]
            rows.append([kind, radius, pull, *(spread(divergence[:, budget - 1]) for budget in budgets)])
            if kind == "multi":
                axes[1].semilogy(divergence.mean(0), label=f"pull {pull:g}")
    print_table(["teacher", "radius", "pull", *(f"KL after {budget}" for budget in budgets)], rows)
    axes[1].set(xlabel="steps, two modes, radius 20", ylabel="KL, nats")
    axes[1].legend()

    print()
    radii = (2.0, 5.0, 20.0, 80.0)
    rows, ratios = [], []
    for radius in radii:
        pairs = [(target(num, "multi", radius, seed), target(num, "multi", radius, seed, weight=0.5)) for seed in seeds]
        scores = [score_distance(p, q) for p, q in pairs]
        divergences = [np.sum(p * np.log(p / q)) for p, q in pairs]
        ratios.append(np.mean(scores) / np.mean(divergences))
        rows.append([radius, spread(divergences), spread(scores), f"{ratios[-1]:.2g}"])
    print_table(["radius", "KL of other mode weights", "score-matching distance", "ratio"], rows)
    axes[2].loglog(radii, ratios, "o-")
    axes[2].set(xlabel="radius: depth of the modes", ylabel="score-matching distance / KL")

    def mean(kind, timescale):
        return np.mean(reached[kind, timescale])

    best_pull = min(PULLS, key=lambda pull: np.mean(pulled["multi", pull]))
    kinds = ("mono", "multi")
    return report(
        [
            judge(
                "timescales far below 1 are slower at equal cost",
                all(mean(kind, 0.01) > 2 * mean(kind, 1.0) for kind in kinds),
                "both teachers",
            ),
            judge(
                "the fastest convergence is near timescale 1",
                all(min(TIMESCALES, key=lambda t, kind=kind: mean(kind, t)) == 1.0 for kind in kinds),
                "explicit steps at their limit: the particles' diffusion bounds the step, so that faster neurons cost nothing",
            ),
            judge(
                "a pull towards the data helps where modes hardly exchange particles",
                0 < best_pull < max(PULLS) and np.mean(pulled["multi", 0.0]) > 2 * np.mean(pulled["multi", best_pull]),
                f"radius 20, pull {best_pull:g}",
            ),
            judge(
                "the pull slows convergence elsewhere",
                np.mean(pulled["mono", 100.0]) > 2 * np.mean(pulled["mono", 0.0]),
                "one mode, at the same timescale",
            ),
            judge(
                "score matching does not tell mode weights",
                ratios[-1] < 0.1 * ratios[0],
                f"radius {radii[0]:g} against {radii[-1]:g}",
            ),
        ],
        figure,
        "a_measure_dynamics",
    )


if __name__ == "__main__":
    main(is_small(__doc__))
