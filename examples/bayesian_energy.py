"""How bimodal are petals? A Bayesian energy-based model, by the exchange algorithm.

The density of petal lengths of 150 irises is ``exp(-sum_k theta_k P_k(x))`` on an interval, with Legendre polynomials P_k up to
a degree of 2, 4 or 6 and normal priors on theta: log Z depends on theta and has no closed form. `Exchange` samples the
posterior; in one dimension quadrature gives log Z as well, so that NUTS with it shows what is right. Prints both, a run with twice
the auxiliary moves, and ArviZ's comparison of the three degrees by leave-one-out; writes ``bayesian_energy.png``.
Takes about three minutes on two cores; ``--small`` runs short chains.

Data: Fisher's irises, from scikit-learn.
"""

import argparse
import warnings

warnings.filterwarnings("ignore", message=".*ArviZ is undergoing", category=FutureWarning)

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro.infer import MCMC, NUTS
from sklearn.datasets import load_iris

import numpyro_ebm as ebm

LOW, HIGH = 0.0, 8.0  # centimetres


def legendre(x, degree: int):
    """P_1, ..., P_degree of x scaled to [-1, 1], by Bonnet's recursion."""
    t = 2 * (x - LOW) / (HIGH - LOW) - 1
    values = [jnp.ones_like(t), t]
    for k in range(1, degree):
        values.append(((2 * k + 1) * t * values[k] - k * values[k - 1]) / (k + 1))
    return jnp.stack(values[1 : degree + 1], -1)


def make_model(degree: int, log_normalizer=None):
    def model(x):
        theta = numpyro.sample("theta", dist.Normal(0, 5).expand([degree]).to_event(1))
        d = ebm.EnergyBased(
            lambda x: legendre(x, degree) @ theta, dist.Uniform(LOW, HIGH), log_normalizer=log_normalizer
        )
        with numpyro.plate("petals", x.shape[0]):
            numpyro.sample("x", d, obs=x)

    return model


def run(kernel, x, num_warmup: int, num_samples: int):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), x)
    return mcmc


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="short chains, which have not converged")
    num_warmup, num_samples = (200, 200) if parser.parse_args().small else (2_000, 8_000)
    x = jnp.asarray(load_iris().data[:, 2], jnp.float32)

    def summary(name, mcmc):
        draws = np.asarray(mcmc.get_samples(group_by_chain=True)["theta"])
        means = " ".join(f"{m:6.2f}+-{s:4.2f}" for m, s in zip(draws.mean((0, 1)), draws.std((0, 1)), strict=True))
        stats = az.summary(ebm.to_arviz(mcmc, log_likelihood=False))
        print(
            f"{name:34} {means}   R-hat {float(stats['r_hat'].astype(float).max()):.2f}, least ESS {float(stats['ess_bulk'].astype(float).min()):.0f}"
        )

    posteriors = {}
    for degree in (2, 4, 6):
        kernel = ebm.Exchange(make_model(degree), num_auxiliary_steps=20)
        posteriors[f"degree {degree}"] = run(kernel, x, num_warmup, num_samples)
        summary(f"Exchange, degree {degree}", posteriors[f"degree {degree}"])
    doubled = run(ebm.Exchange(make_model(4), num_auxiliary_steps=40), x, num_warmup, num_samples)
    summary("degree 4, twice the auxiliary moves", doubled)
    exact = run(NUTS(make_model(4, ebm.Quadrature(200).log_normalizer)), x, 500, 1_000)
    summary("degree 4, NUTS with log Z known", exact)

    idatas = {name: ebm.to_arviz(mcmc, rng_key=random.key(1)) for name, mcmc in posteriors.items()}
    worst = max(float(np.max(idata["sample_stats"]["log_normalizer_stderr"])) for idata in idatas.values())
    print(f"largest standard error of a log Z: {worst:.3f} nats")
    print(az.compare(idatas))

    grid = jnp.linspace(LOW, HIGH, 400)
    _, ax = plt.subplots(figsize=(8, 4.5), layout="constrained")
    ax.hist(np.asarray(x), bins=30, density=True, color="0.85")
    for name, mcmc in posteriors.items():
        draws = mcmc.get_samples()["theta"][::40]
        log_density = -jax.vmap(lambda theta: legendre(grid, theta.size) @ theta)(draws)
        density = jnp.exp(log_density - jax.nn.logsumexp(log_density, axis=1, keepdims=True)) / (grid[1] - grid[0])
        (line,) = ax.plot(grid, density.mean(0), label=name)
        low, high = np.percentile(density, [5, 95], axis=0)
        ax.fill_between(grid, low, high, color=line.get_color(), alpha=0.2)
    ax.set(xlabel="petal length, cm", ylabel="density")
    ax.legend()
    plt.savefig("bayesian_energy.png", dpi=120)
    print("wrote bayesian_energy.png")


if __name__ == "__main__":
    main()
