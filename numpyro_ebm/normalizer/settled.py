"""What particles that have settled at the last temperature say: whether they still move, and whether they stick."""

import math

import jax
import jax.numpy as jnp

_LARGEST_TIE = 0.005  # share of particles at one point
_MOST_COPIES = 5  # of few particles, which resampling may have left where they are


def drift_of(unconstrain, before, after):
    """Mean growth of the logarithm of squared distances from the median, with its standard error; 0 on spheres."""
    if unconstrain is None:
        return jnp.zeros((), before.dtype), jnp.zeros((), before.dtype)
    before, after = (
        jnp.reshape(jax.vmap(jax.vmap(unconstrain))(x), (x.shape[0] * x.shape[1], -1)) for x in (before, after)
    )
    centre = jnp.median(before, axis=0)
    logs = [jnp.log(jnp.sum((x - centre) ** 2, -1) + jnp.finfo(x.dtype).tiny) for x in (before, after)]
    return jnp.mean(logs[1]) - jnp.mean(logs[0]), jnp.sqrt((jnp.var(logs[0]) + jnp.var(logs[1])) / before.shape[0])


def has_pole(log_density, particles):
    """Whether particles stick at a point of high density, or densities go over many magnitudes."""
    particles = jnp.reshape(particles, (-1, *particles.shape[2:]))
    values = jax.vmap(log_density)(particles)
    is_highest = jnp.all(particles == particles[jnp.argmax(values)], axis=tuple(range(1, particles.ndim)))
    middle, high = jnp.quantile(values, jnp.array([0.5, 0.999]))
    # a funnel's densities go over 4 powers of e for each dimension, those of 1 / |x| over 80
    is_steep = high - middle > 20 + 3 * math.prod(particles.shape[1:])
    return is_steep | (jnp.sum(is_highest) > max(_LARGEST_TIE * len(particles), _MOST_COPIES))
