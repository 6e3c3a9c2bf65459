"""Paper A's experiments on spheres: timescales, numbers of observations and restarts in d = 15, and a picture in d = 3.

Teachers of one and of two neurons, radius 10. For each setting and seed: divergence, total variation and score-matching
distance of teacher and fit, and the divergence along training. The published move. Writes ``a_spheres.png``. Thirteen minutes on two
cores.
"""

import functools

import matplotlib.pyplot as plt
import numpy as np
from common import draws, is_small, judge, print_table, report, spread, student, teacher
from jax import random

import numpyro_ebm as ebm
from numpyro_ebm import plots

STEP_SIZE, TIMESCALE, DIM = 2e-2, 10.0, 15


@functools.cache
def fresh(kind: str, dim: int = DIM):
    """Draws of the teacher that no fit sees."""
    return draws(teacher(dim, kind), 20_000, seed=1_000)


@functools.cache
def observed(kind: str, num: int, seed: int, dim: int = DIM):
    return draws(teacher(dim, kind), num, seed)


def distances(kind: str, fitted, dim: int = DIM) -> dict:
    truth, x = teacher(dim, kind), fresh(kind, dim)
    functions = {"KL": ebm.kl_divergence, "TV": ebm.total_variation, "SM": ebm.score_distance}
    return {name: function(truth, fitted, random.key(0), x=x).value for name, function in functions.items()}


@functools.cache
def trainer(num_chains: int, **options):
    """A model and what trains it; both teachers share it, so that it compiles once."""
    model = student(DIM)
    kernel = ebm.kernels.sphere.projected
    return model, ebm.DualSGDA(model, step_size=STEP_SIZE, num_chains=num_chains, kernel=kernel, **options)


def train(kind: str, num: int, seeds, num_updates: int, num_chains: int, looks: int = 8, **options):
    """For each seed, the distances at `looks` moments of training: lists of dictionaries."""
    model, dual = trainer(num_chains, **options)
    runs = []
    for seed in seeds:
        x, state, run = observed(kind, num, seed), None, []
        for _ in range(looks):
            result = dual.run(random.key(seed), num_updates // looks, x, init_state=state, progress_bar=False)
            state = result.state
            run.append(distances(kind, ebm.fitted_distribution(model, result.params, x)))
        runs.append(run)
    return runs


def main(small: bool):
    kinds = ("mono", "multi")
    if small:
        num, num_chains, num_updates, looks = 2_000, 2_000, 320, 2
        sizes, timescales, restarts = (100, 2_000), (0.1, 1.0, 10.0), (1.0,)
    else:
        num, num_chains, num_updates, looks = 5_000, 3_000, 1_200, 3
        sizes, timescales, restarts = (100, 1_000, 10_000, 100_000), (0.01, 0.1, 1.0, 10.0, 100.0), (0.02, 0.2, 1.0)
    seeds = range(3)
    figure, axes = plt.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    updates = num_updates // looks * np.arange(1, looks + 1)
    header = ["teacher", "setting", "KL", "TV", "SM"]

    def row(kind, setting, runs):
        return [kind, setting, *(spread([run[-1][name] for run in runs]) for name in ("KL", "TV", "SM"))]

    def last(runs):
        return np.mean([run[-1]["KL"] for run in runs])

    def gain(runs, other):
        """By how much the KL of `other` is smaller, in standard errors over seeds."""
        difference = [run[-1]["KL"] - another[-1]["KL"] for run, another in zip(runs, other, strict=True)]
        return np.mean(difference) / (np.std(difference, ddof=1) / np.sqrt(len(difference)))

    def area(runs):
        return np.mean([[moment["KL"] for moment in run] for run in runs])

    rows, by_timescale, by_size, by_restart = [], {}, {}, {}
    for kind in kinds:
        for color, timescale in enumerate(timescales):
            runs = train(kind, num, seeds, num_updates, num_chains, looks, timescale=timescale)
            by_timescale[kind, timescale] = runs
            rows.append(row(kind, f"timescale {timescale:g}", runs))
            curve = np.mean([[moment["KL"] for moment in run] for run in runs], 0)
            line = f"C{color}" + ("-" if kind == "mono" else "--")
            axes[0].semilogy(updates, curve, line, label=f"{kind}, timescale {timescale:g}")
    for kind in kinds:
        for size in sizes:
            runs = train(kind, size, seeds, num_updates, num_chains, 1, timescale=TIMESCALE)
            by_size[kind, size] = last(runs)
            rows.append(row(kind, f"{size} observations", runs))
        axes[1].loglog(sizes, [by_size[kind, size] for size in sizes], "o-", label=kind)
    # restarts slow the parameters down: the timescale makes up for it
    for kind in kinds:
        for restart in restarts:
            timescale = max(TIMESCALE, 2 * restart / STEP_SIZE)
            runs = train(kind, num, seeds, num_updates, num_chains, 1, timescale=timescale, restart_prob=restart)
            by_restart[kind, restart] = runs
            rows.append(row(kind, f"restarts {restart:g}, timescale {timescale:g}", runs))
        by_restart[kind, 0.0] = by_timescale[kind, TIMESCALE]
        probabilities = (0.0, *restarts)
        axes[2].plot(probabilities, [last(by_restart[kind, p]) for p in probabilities], "o-", label=kind)
    print_table(header, rows)
    for ax, label in zip(axes, ("updates", "observations", "restart probability"), strict=True):
        ax.set(xlabel=label, ylabel="KL(teacher, fit), nats")
        ax.legend(fontsize=7, ncols=2)
    axes[0].set_ylim(bottom=1e-3)

    fastest = {kind: min(timescales, key=lambda t, kind=kind: area(by_timescale[kind, t])) for kind in kinds}
    draw_globe(small)
    return report(
        [
            judge(
                "timescales far below 1, maximum likelihood with persistent chains, are slower",
                all(area(by_timescale[kind, 1.0]) < area(by_timescale[kind, timescales[0]]) for kind in kinds),
                f"timescale 1 against {timescales[0]:g}, area under the curve of KL",
            ),
            judge(
                "the best timescale is 1",
                all(best == 1.0 for best in fastest.values()),
                f"fastest: {fastest['mono']:g} for one mode, {fastest['multi']:g} for two, with {STEP_SIZE:g} the step of both",
                in_part=all(best < max(timescales) for best in fastest.values()),
            ),
            judge(
                "more observations help",
                all(by_size[kind, sizes[-1]] < by_size[kind, sizes[0]] for kind in kinds),
                f"{sizes[0]} against {sizes[-1]}",
            ),
            judge(
                "restarts at every step fit too, as score matching",
                all(last(by_restart[kind, 1.0]) < 0.2 * last(by_timescale[kind, timescales[0]]) for kind in kinds),
                f"timescale {2 / STEP_SIZE:g}, less than a fifth of the divergence at timescale {timescales[0]:g}",
            ),
            judge(
                "restarts help where there are several modes",
                max(gain(by_restart["multi", 0.0], by_restart["multi", p]) for p in restarts) > 2,
                f"by more than two standard errors; two modes, timescale raised from {TIMESCALE:g} to 2 restart_prob / step_size",
            ),
        ],
        figure,
        "a_spheres",
    )


def draw_globe(small: bool):
    """Density, data and neurons on S^2."""
    model, x = student(3), observed("multi", 4_000, 0, dim=3)
    dual = ebm.DualSGDA(model, step_size=STEP_SIZE, timescale=10.0, num_chains=4_000)
    result = dual.run(random.key(0), 200 if small else 2_000, x, progress_bar=False)
    fitted = ebm.fitted_distribution(model, result.params, x)
    print("S^2, two modes:", {name: f"{value:.3g}" for name, value in distances("multi", fitted, 3).items()})
    figure, axes = plt.subplots(1, 3, figsize=(16, 4), subplot_kw={"projection": "mollweide"}, layout="constrained")
    plots.plot_density(teacher(3, "multi"), axes[0])
    plots.plot_density(fitted, axes[1])
    plots.plot_neurons(fitted.energy, axes[2])
    for ax, title in zip(axes, ("teacher", "fit", "neurons"), strict=True):
        ax.set_title(title)
    figure.savefig("a_spheres_globe.png", dpi=120)


if __name__ == "__main__":
    main(is_small(__doc__))
