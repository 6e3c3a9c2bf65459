"""How wide, and how large a ball? F1 energies of the world's cities compared, each with a certificate.

Fits F1 energies of several widths and radii to the cities of `quickstart.py`, by dual SGDA. For each it prints the
held-out log-likelihood with its standard error, how far the best energy of that radius could be ahead of it on the training data
(the duality gap, and the gap that noise alone makes), and the paired difference from the best of them. Writes
``model_comparison.png``. Takes about four minutes on two cores; ``--small`` compares two of them.
"""

import argparse

import matplotlib.pyplot as plt
import numpy as np
import numpyro
import optax
from jax import random
from quickstart import cities

import numpyro_ebm as ebm
from numpyro_ebm import plots

NUM_UPDATES = 1_000


def make_model(num_neurons: int, radius: float):
    def model(x):
        energy = ebm.f1_energy("energy", dim=3, num_neurons=num_neurons, radius=radius)
        with numpyro.plate("data", x.shape[0], subsample_size=4096):
            batch = numpyro.subsample(x, event_dim=1)
            numpyro.sample("x", ebm.EnergyBased(energy, base=ebm.SphereUniform(3)), obs=batch)

    return model


def fit(num_neurons: int, radius: float, train: np.ndarray):
    """The fitted distribution, and how its training went."""
    model = make_model(num_neurons, radius)
    step_size = optax.cosine_decay_schedule(3e-2, NUM_UPDATES, 0.03)
    dual = ebm.DualSGDA(model, step_size=step_size, timescale=0.5 * radius, num_chains=4_000)
    result = dual.run(random.key(0), NUM_UPDATES, train, progress_bar=False)
    return ebm.fitted_distribution(model, result.params, train), ebm.training_diagnostics(result)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="two fits only")
    widths, radii = ((16, 64), (30.0,)) if parser.parse_args().small else ((16, 64, 256), (10.0, 30.0, 100.0))
    train, held_out = cities()
    fits, rows = {}, {}
    for radius in radii:
        for num_neurons in widths:
            name = f"{num_neurons} neurons, radius {radius:g}"
            fitted, diagnostics = fit(num_neurons, radius, train)
            likelihood = ebm.log_likelihood(fitted, held_out, random.key(1), method="quadrature", num_points=400)
            gap = ebm.duality_gap(fitted, train, random.key(2), num_particles=16_000)
            fits[name], rows[name] = (fitted, diagnostics), (likelihood, gap)
    best = max(rows, key=lambda name: rows[name][0].mean)

    print(f"{'energy':26}  held-out nats     less than the best   duality gap (noise)  reliable")
    for name, (likelihood, gap) in rows.items():
        difference, stderr = likelihood.minus(rows[best][0])
        print(
            f"{name:26}  {likelihood.mean:.3f} +- {likelihood.mean_stderr:.3f}  {difference:7.3f} +- {stderr:.3f}     "
            f"{gap.value:6.3f} ({gap.floor:.3f})      {gap.reliable and likelihood.reliable}"
        )
    # within one radius the best attainable lies between what was reached and that plus its certificate
    figure = plt.figure(figsize=(11, 8), layout="constrained")
    ax = figure.add_subplot(2, 2, 1)
    names = list(rows)
    means = [rows[name][0].mean for name in names]
    ax.errorbar(range(len(names)), means, [1.96 * rows[name][0].mean_stderr for name in names], fmt="o")
    ax.set_xticks(range(len(names)), names, rotation=60, ha="right")
    ax.set_ylabel("held-out nats over uniform")
    plots.plot_density(fits[best][0], figure.add_subplot(2, 2, 2, projection="mollweide"))
    plots.plot_neurons(fits[best][0].energy, figure.add_subplot(2, 2, 3, projection="mollweide"))
    gaps = fits[best][1]["energy_gap"].sel(site="x")
    ax = figure.add_subplot(2, 2, 4)
    ax.plot(gaps["update"], gaps)
    ax.set(xlabel="update", ylabel="energy gap of the chains", title=best)
    figure.savefig("model_comparison.png", dpi=120)
    print("wrote model_comparison.png")


if __name__ == "__main__":
    main()
