"""Where was it? A fitted energy as the prior of unknown places, under NUTS.

An F1 energy is fitted to the world's cities (`quickstart.py`). Then 200 cities that it has not seen are observed with an
error of some 1,000 km, and their places, latent variables on the sphere, are sampled by NUTS: with the energy as their prior, and
with a uniform one. Prints how far off each is, and how often the truth lies in 80 % regions; writes ``energy_prior.png``.
Takes about two minutes on two cores; ``--small`` does 20 cities.
"""

import argparse

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from model_comparison import fit
from numpyro.infer import MCMC, NUTS
from quickstart import cities

import numpyro_ebm as ebm
from numpyro_ebm import plots

EARTH_RADIUS = 6_371.0  # km
ERROR = 1_000.0 / EARTH_RADIUS  # radians


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def distance(a, b):
    """Great-circle distance in km."""
    return EARTH_RADIUS * np.arccos(np.clip(np.sum(np.asarray(a) * np.asarray(b), -1), -1, 1))


def places(observed, prior):
    with numpyro.plate("cities", observed.shape[0]):
        place = numpyro.sample("place", prior)
        numpyro.sample("observed", dist.Normal(place, ERROR).to_event(1), obs=observed)


def posterior(observed, prior):
    """Posterior draws of each place: (draw, city, 3)."""
    mcmc = MCMC(
        NUTS(places), num_warmup=500, num_samples=500, num_chains=2, chain_method="vectorized", progress_bar=False
    )
    mcmc.run(random.key(3), observed, prior)
    return mcmc


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="20 cities only")
    num = 20 if parser.parse_args().small else 200
    train, held_out = cities()
    fitted, _ = fit(64, 30.0, train)
    truth = held_out[:num]
    observed = truth + ERROR * random.normal(random.key(2), truth.shape)

    print(f"{'prior':10}  median error  mean error  truth in 80 % region  divergences")
    draws = {}
    for name, prior in (("uniform", ebm.SphereUniform(3)), ("energy", fitted)):
        mcmc = posterior(observed, prior)
        draws[name] = np.asarray(mcmc.get_samples()["place"])
        centre = unit(draws[name].mean(0))
        off = distance(centre, truth)
        # a region: as near to the centre as 80 % of draws are
        inside = off < np.quantile(distance(draws[name], centre), 0.8, axis=0)
        print(
            f"{name:10}  {np.median(off):9.0f} km  {off.mean():7.0f} km  {inside.mean():15.0%}       "
            f"{int(mcmc.get_extra_fields()['diverging'].sum()):8}"
        )
    gain = distance(unit(draws["uniform"].mean(0)), truth) - distance(unit(draws["energy"].mean(0)), truth)
    print(f"the energy's estimates are {gain.mean():.0f} +- {gain.std(ddof=1) / num**0.5:.0f} km nearer (paired)")

    _, axes = plt.subplots(1, 2, figsize=(12, 3.6), subplot_kw={"projection": "mollweide"}, layout="constrained")
    for ax, (name, places_drawn) in zip(axes, draws.items(), strict=True):
        plots.plot_density(fitted, ax)
        for i in range(3):
            x, y, z = places_drawn[::4, i].T
            ax.plot(np.arctan2(y, x), np.arcsin(z), ".", markersize=1.5)
            x, y, z = truth[i]
            ax.plot(np.arctan2(y, x), np.arcsin(z), "k+", markersize=10)
        ax.set_title(f"{name} prior: three places (+) and their draws")
    plt.savefig("energy_prior.png", dpi=120)
    print("wrote energy_prior.png")


if __name__ == "__main__":
    main()
