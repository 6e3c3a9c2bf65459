"""Dual against primal on one problem: divergence and duality gap against gradient evaluations and seconds.

The two-neuron teacher on the sphere of R^15, 10,000 observations, three seeds. Dual SGDA with the published move, one geodesic move,
four geodesic moves, and four MALA moves per update; maximum likelihood by contrastive divergence with twenty moves per
update; score matching, as restarts at every step. All have the same number of gradient evaluations. Writes
``a_dual_vs_primal.png``. Ten minutes on two cores.
"""

import time

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from common import draws, is_small, judge, print_table, report, spread, student, teacher
from jax import random
from numpyro.infer import SVI, Trace_ELBO

import numpyro_ebm as ebm
from numpyro_ebm.kernels import sphere

STEP_SIZE, DIM = 2e-2, 15


def empty_guide(x):
    pass


def methods(model, num_chains: int) -> dict:
    """A trainer for each method, and its gradient evaluations in x per particle and update."""

    def dual(kernel, timescale=10.0, num_substeps=1, restart_prob=0.0):
        return ebm.DualSGDA(
            model,
            step_size=STEP_SIZE,
            timescale=timescale,
            num_chains=num_chains,
            num_substeps=num_substeps,
            restart_prob=restart_prob,
            kernel=kernel,
        )

    pool = ebm.ChainPool(ebm.kernels.mala(), num_chains, num_steps=20)
    primal = SVI(ebm.estimate(model, ebm.ContrastiveDivergence(pool)), empty_guide, optax.adam(3e-2), Trace_ELBO())
    return {
        "dual, published move": (dual(sphere.projected), 1),
        "dual, geodesic": (dual(sphere.ula), 1),
        "dual, four geodesic": (dual(sphere.ula, num_substeps=4), 4),
        "dual, four MALA": (dual(sphere.mala, num_substeps=4), 5),
        "primal, twenty MALA": (primal, 21),
        "score matching (restarts)": (dual(sphere.ula, 2 / STEP_SIZE, restart_prob=1.0), 1),
    }


def main(small: bool):
    num, num_chains, evaluations, looks = (2_000, 1_000, 420, 1) if small else (10_000, 5_000, 4_200, 5)
    truth, model = teacher(DIM, "multi"), student(DIM)
    fresh = draws(truth, 20_000, seed=1_000)
    figure, ax = plt.subplots(figsize=(7, 5), layout="constrained")
    rows, ends = [], {}
    chosen = methods(model, num_chains)
    if small:
        del chosen["dual, four geodesic"], chosen["dual, four MALA"]
    for name, (trainer, cost) in chosen.items():
        curves, gaps, seconds = [], [], []
        for seed in range(3):
            x, state, curve, spent = draws(truth, num, seed), None, [], 0.0
            updates = max(evaluations // cost // looks, 1)
            if not small:  # compiled before the clock starts
                trainer.run(random.key(seed), updates, x, progress_bar=False)
            for _ in range(looks):
                began = time.perf_counter()
                result = trainer.run(random.key(seed), updates, x, init_state=state, progress_bar=False)
                jax.block_until_ready(result.params)
                spent, state = spent + time.perf_counter() - began, result.state
                fitted = ebm.fitted_distribution(model, result.params, x)
                curve.append(ebm.kl_divergence(truth, fitted, random.key(0), x=fresh).value)
            curves.append(curve)
            seconds.append(spent)
            gap = ebm.duality_gap(fitted, x, random.key(1), num_particles=8_000, num_bootstrap=8)
            gaps.append(gap.value)
        ends[name] = [curve[-1] for curve in curves]
        rows.append(
            [
                name,
                evaluations,
                spread(seconds),
                spread(ends[name]),
                spread(gaps),
                f"{gap.floor:.2g}",
            ]
        )
        ax.semilogy(evaluations // looks * np.arange(1, looks + 1), np.mean(curves, 0), "o-", label=name)
    print_table(["method", "gradients", "seconds", "KL", "duality gap", "its floor"], rows)
    ax.set(xlabel="gradient evaluations in x per particle", ylabel="KL(teacher, fit), nats")
    ax.legend(fontsize=8)

    def mean(name):
        return np.mean(ends[name])

    primal = "primal, twenty MALA"
    return report(
        [
            judge(
                "dual training reaches a given fit with fewer gradients than maximum likelihood with many moves",
                all(mean(name) < mean(primal) for name in ends if name.startswith("dual")),
                f"{evaluations} gradient evaluations; Adam for the primal",
                in_part=mean("dual, geodesic") < mean(primal),
            ),
            judge(
                "geodesic moves fit better than the published projection",
                mean("dual, geodesic") < mean("dual, published move"),
                f"step {STEP_SIZE:g}, after {evaluations} gradient evaluations",
            ),
        ],
        figure,
        "a_dual_vs_primal",
    )


if __name__ == "__main__":
    main(is_small(__doc__))
