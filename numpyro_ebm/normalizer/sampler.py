"""Draws of a fitted distribution from the particles of tempered SMC."""

import math

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from jax.scipy.special import logsumexp

from numpyro_ebm.distributions import EnergyBased
from numpyro_ebm.normalizer.smc import NUM_ISLANDS, gather, is_spreading, tempered_smc


class ParticleSampler:
    """Draws of a distribution from particles; made by :func:`~numpyro_ebm.smc_sampler`.

    Attributes
    ----------
    particles
        Shape ``(num_particles, *batch_shape, *event_shape)``.
    log_normalizer
        Estimate of log Z, of the batch shape.
    num_temperatures
        Number of temperatures from the base to the model, of the batch shape.
    acceptance_rate
        Of the last moves, of the batch shape.
    """

    def __init__(self, particles, log_normalizer, num_temperatures, acceptance_rate):
        self.particles = particles
        self.log_normalizer = log_normalizer
        self.num_temperatures = num_temperatures
        self.acceptance_rate = acceptance_rate

    def __call__(self, rng_key: jax.Array, distribution: EnergyBased, sample_shape: tuple[int, ...]) -> jax.Array:
        """Draw particles with replacement, for each element of the batch on its own.

        Raises
        ------
        ValueError
            If the distribution is of another shape than the one that the particles are of.
        """
        shape = distribution.batch_shape + distribution.event_shape
        if self.particles.shape[1:] != shape:
            raise ValueError(f"the particles have shape {self.particles.shape[1:]}, but the distribution {shape}")
        index = random.randint(rng_key, (*sample_shape, *distribution.batch_shape), 0, self.particles.shape[0])
        return self.particles[(index, *jnp.indices(distribution.batch_shape, sparse=True))]


def smc_sampler(
    distribution: EnergyBased,
    rng_key: jax.Array,
    num_particles: int = 20_000,
    num_moves: int = 10,
    target_ess: float = 0.8,
    reference: dist.Distribution | None = None,
) -> ParticleSampler:
    r"""Run tempered SMC from the base to the model, and return a sampler of its particles.

    Particles go through the densities :math:`\tau e^{-\lambda \beta f}` as :math:`\lambda` rises from 0
    to 1, at temperatures that keep the effective sample size; at each they are resampled and moved by
    MALA, whose step size is adapted on the way. So modes get their weights without chains that cross
    between them.

    Parameters
    ----------
    distribution
        A fitted distribution, whose base can be drawn from.
    rng_key
        Key.
    num_particles
        Number of particles, for each element of the batch.
    num_moves
        Moves at each temperature. More, where the dimension is higher.
    target_ess
        Effective sample size, as a share of the particles, at the next temperature.
    reference
        Proper distribution to start from in the place of the base, where that can't be drawn from.

    Returns
    -------
    ParticleSampler
        A function ``sampler(rng_key, distribution, sample_shape)``, for :meth:`EnergyBased.with_sampler`.

    Raises
    ------
    ValueError
        If an argument is out of its range, the base can't be drawn from, the energy is not finite
        where the base has mass, or particles still spread at the end (see :func:`~numpyro_ebm.log_normalizer`).

    Notes
    -----
    Costs ``num_moves`` gradients per particle and temperature. A batch of `B` distributions costs
    ``B**2`` times one, since all elements are evaluated for each.

    References
    ----------
    Del Moral, Doucet and Jasra (2006), Sequential Monte Carlo samplers.

    Examples
    --------
    >>> import numpyro_ebm as ebm, numpyro.distributions as dist
    >>> from jax import random
    >>> d = ebm.EnergyBased(lambda x: 4 * x**2, dist.Normal(0, 1))
    >>> d = d.with_sampler(ebm.smc_sampler(d, random.key(0)))
    >>> d.sample(random.key(1), (5,)).shape
    (5,)
    """
    key_run, key_gather = random.split(rng_key)
    run = tempered_smc(distribution, key_run, num_particles, num_moves, target_ess, reference)
    if not bool(jnp.all(run.is_complete)):
        raise ValueError(
            "tempered SMC did not get from the base to the model: the energy is not finite, or unbounded below, where the base "
            "has mass: take a narrower base or reference"
        )
    if bool(jnp.any(is_spreading(run))):
        raise ValueError(
            "particles still spread after the last temperature: the density can't be normalised, or num_moves is too small"
        )
    log_normalizer = logsumexp(run.forward, axis=0) - math.log(NUM_ISLANDS)
    return ParticleSampler(gather(run, key_gather), log_normalizer, run.num_temperatures, run.acceptance_rate)
