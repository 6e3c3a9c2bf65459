"""The published setting: d = 15, a teacher of two neurons with total variation 10."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import random
from jax.scipy.special import logsumexp

import numpyro_ebm as ebm


def teacher():
    angle = 1.0
    features = np.zeros((2, 15), np.float32)
    features[0, 0], features[1, :2] = 1.0, (np.cos(angle), np.sin(angle))
    return ebm.F1Energy(features, jnp.zeros(2), -jnp.ones(2), radius=10.0), 10 * np.cos(angle / 2)


def rejection(key, num):
    """Exact draws of the teacher: uniform draws, kept with probability exp(-energy - bound)."""
    energy, bound = teacher()

    @jax.jit
    def propose(key):
        key_x, key_u = random.split(key)
        x = ebm.SphereUniform(15).sample(key_x, (200_000,))
        return x, jnp.log(random.uniform(key_u, (200_000,))) < -energy(x) - bound

    kept, total = [], 0
    while total < num:
        key, key_round = random.split(key)
        x, keep = map(np.asarray, propose(key_round))
        kept.append(x[keep])
        total += len(kept[-1])
    return np.concatenate(kept)[:num]


def student(x):
    energy = ebm.f1_energy("energy", dim=15, num_neurons=64, radius=10.0)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(energy, base=ebm.SphereUniform(15)), obs=x)


def divergence(fitted, fresh):
    """KL(teacher to fit) from draws of the teacher: log Z's ratio is a mean of exponentials."""
    log_ratio = teacher()[0](fresh) - fitted.energy(fresh)
    return float(logsumexp(log_ratio) - jnp.log(len(fresh)) - jnp.mean(log_ratio))


@functools.cache
def fresh_points():
    return jnp.asarray(rejection(random.key(1000), 100_000))
