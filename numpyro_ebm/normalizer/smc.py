"""Draws of an unnormalised density that do not depend on chains that mix: tempered SMC."""

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from blackjax.smc import ess, resampling, solver, tempered
from jax import lax, random

from numpyro_ebm.distributions import EnergyBased
from numpyro_ebm.energies import check_probability, check_size
from numpyro_ebm.kernels import mala, on_support
from numpyro_ebm.pool import TARGET_ACCEPTANCE, base_deviation

_MAX_TEMPERATURES = 1_000


class ParticleSampler:
    """Draws of a distribution from particles; made by :func:`smc_sampler`.

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
    num_particles: int = 4_000,
    num_moves: int = 10,
    target_ess: float = 0.7,
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

    Raises
    ------
    ValueError
        If an argument is out of its range, the base can't be drawn from, or the energy is not finite
        where the base has mass.

    Notes
    -----
    A density that can't be normalised is not detected unless it turns non-finite on the way.
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
    check_size("num_particles", num_particles)
    check_size("num_moves", num_moves)
    check_probability("target_ess", target_ess)
    if not 0 < target_ess < 1:
        raise ValueError(f"target_ess must be between 0 and 1, got {target_ess!r}")
    batch_shape = distribution.batch_shape
    if any(jnp.ndim(bound) for bound in jax.tree.leaves(distribution.support)) and batch_shape:
        raise ValueError("smc_sampler needs one support for a batch of distributions, got bounds for each")
    size = math.prod(batch_shape)
    base = distribution.base if distribution.base.batch_shape == batch_shape else distribution.base.expand(batch_shape)
    key_base, key_run = random.split(rng_key)
    try:
        start = base.sample(key_base, (num_particles,))
    except NotImplementedError as error:
        raise ValueError(
            f"smc_sampler starts from the base, but {type(distribution.base).__name__} can't be drawn from: take a proper base"
        ) from error
    start = jnp.reshape(start, (num_particles, size, *distribution.event_shape))

    keys = random.split(key_run, size)
    particles, log_normalizer, temperature, *rest = _run(
        distribution, jnp.moveaxis(start, 1, 0), keys, num_moves, float(target_ess)
    )
    if not (bool(jnp.all(temperature >= 1)) and bool(jnp.all(jnp.isfinite(log_normalizer)))):
        raise ValueError(
            "tempered SMC did not get from the base to the model: the energy is not finite, or unbounded below, where the base "
            "has mass"
        )
    particles = jnp.moveaxis(particles, 0, 1).reshape(num_particles, *batch_shape, *distribution.event_shape)
    return ParticleSampler(particles, *(part.reshape(batch_shape) for part in (log_normalizer, *rest)))


@partial(jax.jit, static_argnames=("num_moves", "target_ess"))
def _run(distribution, particles, keys, num_moves, target_ess):
    def run(key, element, particles):
        return _tempered(distribution, element, particles, key, num_moves, target_ess)

    return jax.vmap(run)(keys, jnp.arange(len(keys)), particles)


def _tempered(distribution, element, particles, rng_key, num_moves, target_ess):
    """One element's particles, log Z, last temperature, number of temperatures and acceptance."""
    batch_shape, event_shape = distribution.batch_shape, distribution.event_shape
    deviation = base_deviation(distribution)
    if deviation is not None:
        deviation = jnp.broadcast_to(deviation, (*batch_shape, *event_shape)).reshape(-1, *event_shape)[element]

    def of_element(function):
        def value(x):
            values = function(jnp.broadcast_to(x, (*batch_shape, *event_shape)))
            return jnp.ravel(jnp.broadcast_to(values, batch_shape))[element]

        return value

    log_base = of_element(distribution.base.log_prob)
    log_ratio = of_element(lambda x: -distribution.inverse_temperature * distribution.energy(x))

    def moves(step_size):
        kernel = mala(step_size, scale=deviation)
        return kernel if deviation is not None else on_support(kernel, distribution.support)

    kernel = tempered.build_kernel(
        log_base,
        log_ratio,
        lambda rng_key, state, logdensity_fn, step_size: moves(step_size).step(rng_key, state, logdensity_fn),
        lambda position, logdensity_fn: moves(1.0).init(position, logdensity_fn),
        resampling.systematic,
    )
    num = particles.shape[0]

    def advance(progress, delta):
        key, key_move = random.split(progress.rng_key)
        state = progress.state
        state, info = kernel(
            key_move, state, num_moves, state.tempering_param + delta, {"step_size": progress.step_size[None]}
        )
        acceptance = jnp.mean(info.update_info.acceptance_rate)
        return _Progress(
            state,
            progress.log_normalizer + info.log_likelihood_increment,
            progress.step_size * jnp.exp(2 * (acceptance - TARGET_ACCEPTANCE)),
            progress.num_temperatures + 1,
            acceptance,
            key,
        )

    def next_temperature(progress):
        values = jax.vmap(log_ratio)(progress.state.particles)

        def excess(delta):
            return ess.log_ess(jnp.nan_to_num(delta * values, nan=-jnp.inf)) - jnp.log(target_ess * num)

        left = 1 - progress.state.tempering_param
        return advance(progress, jnp.clip(solver.dichotomy(excess, 0.0, left), 0.0, left))

    def is_on_the_way(progress):
        return (progress.state.tempering_param < 1) & (progress.num_temperatures < _MAX_TEMPERATURES)

    zero = jnp.zeros((), particles.dtype)
    state = tempered.TemperedSMCState(particles, jnp.full(num, 1 / num, particles.dtype), zero)
    progress = _Progress(state, zero, zero + 0.1, jnp.zeros((), jnp.int32), zero, rng_key)
    progress = lax.while_loop(is_on_the_way, next_temperature, progress)
    temperature = progress.state.tempering_param
    # the weights of the last temperature are spent by one more resampling and move
    progress = advance(progress, zero)
    return (
        progress.state.particles,
        progress.log_normalizer,
        temperature,
        progress.num_temperatures - 1,
        progress.acceptance_rate,
    )


class _Progress(NamedTuple):
    state: tempered.TemperedSMCState
    log_normalizer: jax.Array
    step_size: jax.Array
    num_temperatures: jax.Array
    acceptance_rate: jax.Array
    rng_key: jax.Array
