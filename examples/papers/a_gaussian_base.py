"""F1 energies on R^d with a Gaussian base, paper A's example of its assumption: biased neurons on unbounded data.

A ring in two dimensions, where the normaliser is known by quadrature, and a teacher in ten, where the divergence is estimated from
draws; three seeds. Writes ``a_gaussian_base.png``. Two minutes on two cores.
"""

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from common import draws, is_small, judge, print_table, report, spread
from jax import random

import numpyro_ebm as ebm
from numpyro_ebm import plots


def make_model(dim: int, radius: float, num_neurons: int = 128):
    def model(x):
        energy = ebm.f1_energy("energy", dim, num_neurons, radius=radius, bias=True)
        base = dist.Normal(0, 1).expand([dim]).to_event(1)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(energy, base), obs=x)

    return model


def ring(num: int, seed: int):
    """Points about a circle of radius 1.5, scale 0.3."""
    rng = np.random.default_rng(seed)
    angles, radii = rng.uniform(0, 2 * np.pi, num), 1.5 + 0.3 * rng.normal(size=num)
    return np.stack([radii * np.cos(angles), radii * np.sin(angles)], -1).astype(np.float32)


def teacher(dim: int) -> ebm.EnergyBased:
    """Two biased neurons that attract, one that repels."""
    features = np.zeros((3, dim + 1), np.float32)
    features[0, [0, -1]], features[1, [1, -1]], features[2, [0, 1]] = (1, -0.5), (-1, -0.5), (1, 1)
    features /= np.linalg.norm(features, axis=-1, keepdims=True)
    energy = ebm.F1Energy(features, jnp.zeros(3), jnp.array([-1.0, -1.0, 1.0]), radius=5.0, bias=True)
    return ebm.EnergyBased(energy, dist.Normal(0, 1).expand([dim]).to_event(1))


def fit(model, x, seed: int, num_updates: int, num_chains: int):
    dual = ebm.DualSGDA(
        model, step_size=2e-2, timescale=10.0, num_chains=num_chains, num_substeps=2, kernel=ebm.kernels.mala
    )
    result = dual.run(random.key(seed), num_updates, x, progress_bar=False)
    return ebm.fitted_distribution(model, result.params, x)


def main(small: bool):
    num, num_updates, num_chains = (1_000, 1_200, 1_000) if small else (10_000, 4_000, 4_000)
    base = dist.Normal(0, 1).expand([2]).to_event(1)
    held_out, model = ring(20_000, 1_000), make_model(2, 30.0)
    gains, divergences, starts = [], [], []
    for seed in range(3):
        fitted = fit(model, ring(num, seed), seed, num_updates, num_chains)
        likelihood = ebm.log_likelihood(fitted, held_out, random.key(0), method="quadrature")
        gains.append(likelihood.mean - float(np.mean(base.log_prob(held_out))))
    truth, model = teacher(10), make_model(10, 5.0)
    fresh = draws(truth, 20_000, seed=1_000)
    for seed in range(3):
        x = draws(truth, num, seed)
        found = fit(model, x, seed, num_updates, num_chains)
        divergences.append(ebm.kl_divergence(truth, found, random.key(0), x=fresh).value)
        starts.append(ebm.kl_divergence(truth, truth.base, random.key(0), x=fresh).value)
    print_table(
        ["data", "measure", "base", "fit"],
        [
            ["ring, d = 2", "held-out nats over the base", "0", spread(gains)],
            ["teacher, d = 10", "KL(teacher, .)", spread(starts), spread(divergences)],
        ],
    )
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    plots.plot_density(fitted, axes[0], bounds=((-3, -3), (3, 3)))
    axes[0].plot(*held_out[:500].T, ".", markersize=2, color="white")
    plots.plot_neurons(found.energy, axes[1])
    return report(
        [
            judge(
                "F1 energies with a Gaussian base train on R^d",
                max(divergences) < 0.2 * np.mean(starts) and np.mean(gains) > 0.1,
                "ring in d = 2 and teacher in d = 10",
            )
        ],
        figure,
        "a_gaussian_base",
    )


if __name__ == "__main__":
    main(is_small(__doc__))
