"""What products in bfloat16 or TensorFloat-32 do to a fit: its KL to the truth beside that of single precision.

    python benchmarks/precision.py [--seeds 10]

Dual SGDA on the sphere of R^15 towards a teacher of two neurons, with the same keys for each precision. Accelerators round
the operands of a product to the precision that `jax.default_matmul_precision` names, and add up in single precision. CPUs
ignore the name, so the operands are rounded here, in the gradients' products too.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import lax, random

import numpyro_ebm as ebm
from numpyro_ebm.energies import shallow

DIM, NUM_NEURONS, RADIUS = 15, 64, 10.0
NUM_DATA, NUM_PARTICLES, NUM_UPDATES = 5_000, 5_000, 2_000
MANTISSA_BITS = {"float32": 23, "tensorfloat32": 10, "bfloat16": 7}


def rounded_inner(bits: int):
    """The product of an F1 energy, x (..., d) with vectors (m, d), of operands that have `bits` of mantissa."""

    def rounded(operand):
        return lax.reduce_precision(operand, exponent_bits=8, mantissa_bits=bits)

    @jax.custom_vjp
    def inner(x, vectors):
        return rounded(x) @ rounded(vectors).T

    def backward(operands, cotangent):
        x, vectors = map(rounded, operands)
        cotangent = rounded(cotangent)
        return cotangent @ vectors, jnp.einsum("...m,...d->md", cotangent, x)

    inner.defvjp(lambda x, vectors: (inner(x, vectors), (x, vectors)), backward)
    return inner


def model(x):
    energy = ebm.f1_energy("energy", dim=DIM, num_neurons=NUM_NEURONS, radius=RADIUS)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(DIM)), obs=x)


def main(num_seeds: int):
    exact = shallow._inner
    neurons = jnp.eye(2, DIM)
    teacher = ebm.EnergyBased(ebm.F1Energy(neurons, jnp.zeros(2), -jnp.ones(2), radius=RADIUS), ebm.SphereUniform(DIM))
    fresh = ebm.smc_sampler(teacher, random.key(1_000), 20_000).particles
    data = [ebm.smc_sampler(teacher, random.key(seed), NUM_DATA).particles for seed in range(num_seeds)]
    found = {}
    for precision, bits in MANTISSA_BITS.items():
        dual = ebm.DualSGDA(model, step_size=0.1, num_chains=NUM_PARTICLES)
        found[precision] = []
        for seed, x in enumerate(data):
            shallow._inner = rounded_inner(bits)
            params = dual.run(random.key(seed), NUM_UPDATES, x, progress_bar=False).params
            shallow._inner = exact
            fitted = ebm.fitted_distribution(model, params, x)
            found[precision].append(ebm.kl_divergence(teacher, fitted, random.key(0), x=fresh).value)
    print(f"{'precision':14}  KL(truth, fit), nats  less that of float32")
    for precision, kl in found.items():
        means, errors = zip(
            *((np.mean(v), np.std(v) / num_seeds**0.5) for v in (kl, np.subtract(kl, found["float32"]))), strict=True
        )
        print(f"{precision:14}  {means[0]:.5f} ± {errors[0]:.5f}     {means[1]:+.6f} ± {errors[1]:.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    main(parser.parse_args().seeds)
