"""Score matching two ways: its own flow of neurons and weights, and dual SGDA whose particles restart at every step.

The sphere S^2, neurons of power 3, whose loss has derivatives everywhere. Both flows from the same neurons, at rates that are equal in
the limit of small steps; distance of the energies, less their means, at the end, for three seeds, as the step falls. Writes
``a_score_flow.png``. Three minutes on two cores.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from common import draws, is_small, judge, print_table, report, spread, student, teacher
from jax import lax, random

import numpyro_ebm as ebm

RATE = 2e-3  # of the flow per update, on half of the score-matching loss


def score_flow(params: dict, x, signs, radius: float, num_updates: int):
    """Wasserstein-Fisher-Rao descent of the explicit score-matching loss, and the loss along it."""
    optimiser = ebm.wasserstein_fisher_rao(RATE)

    def energy_of(params):
        features = params["features"] / jnp.linalg.norm(params["features"], axis=-1, keepdims=True)
        return ebm.F1Energy(features, params["log_weights"], signs, radius, power=3)

    def loss(params):
        distribution = ebm.EnergyBased(energy_of(params), ebm.SphereUniform(3))
        objective, _ = ebm.ScoreMatching().update(random.key(0), (), distribution, None)
        return -jnp.mean(objective(x))

    def advance(carry, _):
        params, state = carry
        value, gradient = jax.value_and_grad(loss)(params)
        updates, state = optimiser.update(gradient, state, params, scale=radius)
        return (optax.apply_updates(params, updates), state), value

    start = (params, optimiser.init(params))
    (params, _), losses = jax.jit(lambda start: lax.scan(advance, start, None, length=num_updates))(start)
    return energy_of(params), losses


def main(small: bool):
    num, num_chains, num_updates = (500, 20_000, 200) if small else (2_000, 100_000, 600)
    steps, radius = ((0.1, 0.01) if small else (0.1, 0.03, 0.01, 0.003)), 10.0
    model = student(3, 32, radius, power=3)
    points = ebm.SphereUniform(3).sample(random.key(99), (4_000,))
    rows, means = [], []
    for step in steps:
        # a move of s and a restart make a gradient of s / 2 of the loss, twice that of its half
        dual = ebm.DualSGDA(
            model,
            step_size=step,
            timescale=RATE / step**2,
            num_chains=num_chains,
            restart_prob=1.0,
            kernel=ebm.kernels.sphere.ula,
        )
        errors = []
        for seed in range(3):
            x = draws(teacher(3, "multi", 5.0), num, seed)
            state = dual.init(random.key(seed), x)
            start = dual.get_params(state)
            result = dual.run(random.key(seed), num_updates, x, init_state=state, progress_bar=False)
            by_dual = ebm.fitted_distribution(model, result.params, x).energy
            direct, losses = score_flow(start["energy$params"], x, by_dual.signs, radius, num_updates)
            first, second = (values - jnp.mean(values) for values in (by_dual(points), direct(points)))
            errors.append(float(jnp.linalg.norm(first - second) / jnp.linalg.norm(second)))
        rows.append([step, f"{RATE / step**2:.3g}", spread(errors)])
        means.append(np.mean(errors))
    print_table(["step size", "timescale", "distance of energies, relative"], rows)
    print(f"score-matching loss of the direct flow: {float(losses[0]):.3g} at first, {float(losses[-1]):.3g} at last")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    axes[0].plot(losses)
    axes[0].set(xlabel="update", ylabel="half of the score-matching loss, less a constant")
    axes[1].loglog(steps, means, "o-")
    axes[1].set(xlabel="step size of dual SGDA", ylabel="relative distance of energies")
    return report(
        [
            judge("the direct flow descends its loss", bool(losses[-1] < losses[0]), "step-wise, full batch"),
            judge(
                "restarts at every step turn dual SGDA into that flow",
                min(means) < 0.1 and means[-1] < means[0],
                f"relative distance {means[0]:.2g} at step {steps[0]:g}, {means[-1]:.2g} at {steps[-1]:g}",
                in_part=min(means) < 0.3,
            ),
        ],
        figure,
        "a_score_flow",
    )


if __name__ == "__main__":
    main(is_small(__doc__))
