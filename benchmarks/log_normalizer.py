"""Does the interval of log Z cover the truth, and what does it cost? Tempered SMC on known normalisers.

For each case: how many of the seeds have the truth within 1.96 standard errors; the mean of the error in units of the stated one
(bias); and, at the default number of particles, the standard error, temperatures and seconds of one run (compiling included).

    python benchmarks/log_normalizer.py --seeds 200

takes about twenty minutes on two cores, most of it for a hundred dimensions.
"""

import argparse
import time

import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import random
from scipy.special import gammaln, ive

import numpyro_ebm as ebm


def gaussian(dim):
    base = dist.Normal(0, 1).expand([dim]).to_event(1)
    return ebm.EnergyBased(lambda x: 4 * jnp.sum(x**2), base), -dim / 2 * np.log(9)


def von_mises_fisher(dim, concentration):
    order = dim / 2 - 1
    bessel = np.log(ive(order, concentration)) + concentration
    d = ebm.EnergyBased(lambda x: -concentration * x[0], ebm.SphereUniform(dim))
    return d, bessel - order * np.log(concentration / 2) + gammaln(dim / 2)


def interval(theta):
    return ebm.EnergyBased(lambda x: theta * x, dist.Uniform(0, 1)), np.log(-np.expm1(-theta) / theta)


CASES = {
    "Gaussian, d = 1": (gaussian(1), {}),
    "Gaussian, d = 10": (gaussian(10), {}),
    "Gaussian, d = 15": (gaussian(15), {}),
    "Gaussian, d = 100": (gaussian(100), {"num_moves": 20}),
    "von Mises-Fisher, S^2": (von_mises_fisher(3, 5.0), {}),
    "von Mises-Fisher, S^14": (von_mises_fisher(15, 10.0), {}),
    "theta * x on [0, 1]": (interval(3.0), {}),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--particles", type=int, default=1_600, help="of the runs that are counted")
    options = parser.parse_args()
    print(f"{'case':24}  covered  mean z  reliable  default: stderr  temperatures  seconds")
    for name, ((d, truth), extra) in CASES.items():
        began = time.perf_counter()
        one = ebm.log_normalizer(d, random.key(0), **extra)
        seconds = time.perf_counter() - began
        runs = [
            ebm.log_normalizer(d, random.key(seed), num_particles=options.particles, **extra)
            for seed in range(options.seeds)
        ]
        z = np.array([(run.value - truth) / run.stderr for run in runs])
        print(
            f"{name:24}  {np.sum(np.abs(z) < 1.96):3} / {options.seeds}  {z.mean():5.2f}  {sum(run.reliable for run in runs):7}  "
            f"{one.stderr:15.4f}  {int(one.num_temperatures):12}  {seconds:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
