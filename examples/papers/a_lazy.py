"""Features that are learned against fixed ones, and the MMD flow that is the dual of the latter (paper A, appendix C).

A teacher of one neuron on the sphere of R^10, three seeds. Divergence of F1 and of F2 fits against the number of observations; the
MMD flow at the radius of the F2 ball, whose noise finds itself, against that fit; the same flow without noise: how far
its particles are from fresh draws, against those of the flow with noise.
Writes ``a_lazy.png``. Eight minutes on two cores.
"""

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import optax
from common import draws, is_small, judge, print_table, report, spread, student, teacher
from jax import random

import numpyro_ebm as ebm

DIM, RADIUS, STEP_SIZE = 10, 10.0, 2e-2
F2_RADIUS, FLOW_RADIUS = 100.0, 20.0


def lazy(radius: float):
    def model(x):
        energy = ebm.f2_energy("energy", DIM, 512, radius=radius)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(DIM)), obs=x)

    return model


def discrepancy(first, second) -> float:
    """MMD of two samples in the flow's own kernel."""
    energy = ebm.infer.MMDWitness(first, second, 1.0, ebm.arc_cosine_kernel)
    return float(jnp.sqrt(jnp.mean(energy(first)) - jnp.mean(energy(second))))


def main(small: bool):
    sizes, num_updates, num_chains, num_steps = (
        ((100, 1_000), 200, 1_000, 200) if small else ((100, 1_000, 10_000), 1_000, 2_000, 1_000)
    )
    truth = teacher(DIM, "mono", RADIUS)
    fresh = draws(truth, 20_000, seed=1_000)
    options = {"step_size": STEP_SIZE, "num_chains": num_chains, "num_substeps": 2}
    models = {"F1": student(DIM, 64, RADIUS), "F2": lazy(F2_RADIUS), "flow": lazy(FLOW_RADIUS)}
    trainers = {
        "F1": ebm.DualSGDA(models["F1"], timescale=10.0, **options),
        "F2": ebm.DualSGDA(models["F2"], optim=optax.adam(1.0), **options),
        "flow": ebm.DualSGDA(models["flow"], optim=optax.adam(1.0), **options),
    }
    divergences: dict = {}
    for size in sizes:
        for name, trainer in trainers.items():
            for seed in range(3) if name != "flow" or size == 1_000 else ():
                x = draws(truth, size, seed)
                result = trainer.run(random.key(seed), num_updates, x, progress_bar=False)
                fitted = ebm.fitted_distribution(models[name], result.params, x)
                kl = ebm.kl_divergence(truth, fitted, random.key(0), x=fresh).value
                divergences.setdefault((name, size), []).append(kl)
    print_table(
        ["observations", "KL, F1", "KL, F2"],
        [[size, spread(divergences["F1", size]), spread(divergences["F2", size])] for size in sizes],
    )

    # the flow has the kernel of infinitely many features
    size, flows = 1_000, {}
    apart = []
    noisy = ebm.MMDFlow(truth.base, radius=FLOW_RADIUS, step_size=STEP_SIZE, num_chains=500)
    noiseless = ebm.MMDFlow(truth.base, inverse_temperature=np.inf, step_size=2.0, num_chains=500)
    for seed in range(3):
        x = draws(truth, size, seed)
        run = noisy.run(random.key(seed), num_steps, x)
        quiet = noiseless.run(random.key(seed), 2 * num_steps, x)
        kl = ebm.kl_divergence(truth, ebm.EnergyBased(run.energy, truth.base), random.key(0), x=fresh[:4_000]).value
        flows.setdefault("KL", []).append(kl)
        flows.setdefault("b", []).append(float(jnp.mean(run.inverse_temperatures[-50:])))
        for name, result in (("noise", run), ("none", quiet)):
            flows.setdefault(f"MMD, {name}", []).append(float(result.discrepancies[-1]))
            flows.setdefault(f"fresh, {name}", []).append(discrepancy(result.particles, fresh[:4_000]))
        apart.append(abs(kl - divergences["flow", size][seed]))
    print()
    print_table(
        ["MMD flow, 1,000 observations", "noise of the ball", "no noise"],
        [
            ["inverse temperature b", spread(flows["b"]), "inf"],
            ["KL(teacher, energy of the flow)", spread(flows["KL"]), ""],
            ["MMD to the data", spread(flows["MMD, noise"]), spread(flows["MMD, none"])],
            ["MMD to fresh draws", spread(flows["fresh, noise"]), spread(flows["fresh, none"])],
        ],
    )
    print(f"KL of the F2 fit of the flow's radius: {spread(divergences['flow', size])}")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    for name in ("F1", "F2"):
        axes[0].loglog(sizes, [np.mean(divergences[name, size]) for size in sizes], "o-", label=name)
    axes[0].set(xlabel="observations", ylabel="KL(teacher, fit), nats")
    axes[0].legend()
    for name, result in (("noise of the ball", run), ("no noise", quiet)):
        axes[1].loglog(result.discrepancies, label=name)
    axes[1].set(xlabel="step", ylabel="MMD of particles and data")
    axes[1].legend()
    largest = sizes[-1]
    ratio = {name: np.mean(flows[f"fresh, {name}"]) / np.mean(flows[f"MMD, {name}"]) for name in ("noise", "none")}
    return report(
        [
            judge(
                "learned features fit a teacher of few directions better than fixed ones",
                np.mean(divergences["F1", largest]) < np.mean(divergences["F2", largest]),
                f"{largest} observations",
            ),
            judge(
                "the MMD flow is maximum likelihood in the lazy ball",
                np.mean(apart) < 0.25 * np.mean(divergences["flow", size]),
                f"KL to the teacher of both, radius {FLOW_RADIUS:g}; 512 features against infinitely many",
            ),
            judge(
                "without noise the flow fits the sampling noise of the data",
                ratio["none"] > 2 * ratio["noise"],
                f"MMD to fresh draws over that to the data: {ratio['none']:.2g} without noise, {ratio['noise']:.2g} with it",
            ),
            judge(
                "noise brings particles nearer to fresh draws",
                np.mean(flows["fresh, noise"]) < np.mean(flows["fresh, none"]),
                "500 particles, in the flow's own kernel; what noise gives here is a density",
            ),
        ],
        figure,
        "a_lazy",
    )


if __name__ == "__main__":
    main(is_small(__doc__))
