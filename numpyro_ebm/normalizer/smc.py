"""Tempered sequential Monte Carlo from the base to the model: log Z, and draws that do not depend on chains that mix."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from blackjax.smc import ess, resampling, solver, tempered
from jax import lax, random
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import AffineTransform

from numpyro_ebm.distributions import EnergyBased, is_sphere
from numpyro_ebm.energies import check_probability, check_size
from numpyro_ebm.kernels import Transformed, mala, on_support
from numpyro_ebm.normalizer.settled import drift_of, has_pole
from numpyro_ebm.pool import TARGET_ACCEPTANCE, base_deviation

NUM_ISLANDS = 16
LARGEST_DRIFT = 0.05  # of the logarithm of squared distances
_MAX_TEMPERATURES = 1_000
_LEAST_ADVANCE = 1e-6  # of the temperature


class TemperedRun(NamedTuple):
    """Independent runs ("islands") of tempered SMC for each element of a batch.

    Attributes
    ----------
    particles
        Shape ``(num_islands, n, *batch_shape, *event_shape)``, each island's of equal weight.
    forward, reverse
        Estimates of log Z from the base to the model, and from the particles back to the base, shape
        ``(num_islands, *batch_shape)``; reverse is None where it was not asked for.
    ess
        Least effective sample size over temperatures, of all islands together, of the batch shape.
    log_weights
        Of all islands' particles at the step to the last temperature, shape ``(num_islands * n, *batch_shape)``.
    drift, drift_stderr
        Mean growth of the logarithm of particles' squared distance from their median, in as many moves at the last temperature
        as all others took; 0 at equilibrium and on spheres. Of the batch shape.
    num_temperatures
        From the base to the model, of the batch shape.
    acceptance_rate
        Of the last moves, of the batch shape.
    has_pole
        Whether particles stick at a point of high density, or densities go over many magnitudes, of the batch shape.
    is_complete
        Whether the temperature got to 1 and everything stayed finite, of the batch shape.
    """

    particles: jax.Array
    forward: jax.Array
    reverse: jax.Array | None
    ess: jax.Array
    log_weights: jax.Array
    drift: jax.Array
    drift_stderr: jax.Array
    num_temperatures: jax.Array
    acceptance_rate: jax.Array
    has_pole: jax.Array
    is_complete: jax.Array


def tempered_smc(
    distribution: EnergyBased,
    rng_key: jax.Array,
    num_particles: int = 20_000,
    num_moves: int = 10,
    target_ess: float = 0.8,
    reference: dist.Distribution | None = None,
    is_reversed: bool = False,
) -> TemperedRun:
    r"""Take particles through the densities :math:`\tau e^{-\lambda \beta f}`, :math:`\lambda` from 0 to 1.

    A pilot run finds temperatures that keep the effective sample size, and a step size of MALA for each. Sixteen
    runs of equal size then use these, independently of each other, so that each one's estimate of Z is unbiased, and
    their scatter gives the error.

    Parameters
    ----------
    distribution
        Distribution whose base, or else `reference`, can be drawn from.
    rng_key
        Key.
    num_particles
        Number of particles of all runs together, for each element of the batch.
    num_moves
        Moves at each temperature.
    target_ess
        Effective sample size, as a share of the particles, at the next temperature.
    reference
        Proper distribution to start from in the place of the base.
    is_reversed
        Also run back to the base.

    Raises
    ------
    ValueError
        If an argument is out of its range, there is nothing to start from, or elements of a batch have supports of
        their own.
    """
    check_size("num_particles", num_particles)
    check_size("num_moves", num_moves)
    check_probability("target_ess", target_ess)
    if not 0 < target_ess < 1:
        raise ValueError(f"target_ess must be between 0 and 1, got {target_ess!r}")
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((distribution, rng_key))):
        raise ValueError("tempered SMC looks at its numbers on the way: call it outside of jax.jit, vmap and grad")
    batch_shape, event_shape = distribution.batch_shape, distribution.event_shape
    if any(jnp.ndim(bound) for bound in jax.tree.leaves(distribution.support)) and batch_shape:
        raise ValueError("tempered SMC needs one support for a batch of distributions, got bounds for each")
    size, count = math.prod(batch_shape), max(num_particles // NUM_ISLANDS, 2)
    start = _start(distribution, reference)
    key_base, key_run = random.split(rng_key)
    particles = jnp.reshape(
        start.sample(key_base, (NUM_ISLANDS + 1, count)), (NUM_ISLANDS + 1, count, size, *event_shape)
    )
    run = _run(
        distribution,
        reference,
        jnp.moveaxis(particles, 2, 0),
        random.split(key_run, size),
        num_moves,
        float(target_ess),
        is_reversed,
    )

    def reshaped(values, dims=0):
        """The batch behind the islands and their particles."""
        values = jnp.moveaxis(values, 0, dims)
        return jnp.reshape(values, values.shape[:dims] + batch_shape + values.shape[dims + 1 :])

    return TemperedRun(
        reshaped(run.particles, 2),
        reshaped(run.forward, 1),
        None if run.reverse is None else reshaped(run.reverse, 1),
        reshaped(run.ess),
        reshaped(run.log_weights, 1),
        *(reshaped(values) for values in run[5:]),
    )


def check_reference(distribution: EnergyBased, reference: Any) -> dist.Distribution:
    """What draws start from: the base, or a reference, which must have its events and support.

    Raises
    ------
    ValueError
        If it has not.
    """
    if reference is None:
        return distribution.base
    if not isinstance(reference, dist.Distribution) or reference.event_shape != distribution.event_shape:
        shape = f" of event shape {reference.event_shape}" if hasattr(reference, "event_shape") else ""
        raise ValueError(
            f"reference must be a distribution of event shape {distribution.event_shape}, got {type(reference).__name__}{shape}"
        )
    try:
        jnp.broadcast_shapes(reference.batch_shape, distribution.batch_shape)
        fits = len(reference.batch_shape) <= len(distribution.batch_shape)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"reference must have the batch shape {distribution.batch_shape}, got {reference.batch_shape}")
    supports = [_elementwise(d.support) for d in (reference, distribution)]
    if not (supports[0] == supports[1] or all(is_sphere(support) for support in supports)):
        raise ValueError(
            f"reference must have the support of the distribution, {distribution.support}, got {reference.support}"
        )
    return reference


def _elementwise(support):
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _start(distribution, reference):
    batch_shape = distribution.batch_shape
    start = check_reference(distribution, reference)
    start = start if start.batch_shape == batch_shape else start.expand(batch_shape)
    try:
        jax.eval_shape(start.sample, random.key(0))
    except NotImplementedError as error:
        raise ValueError(
            f"tempered SMC starts from the base, but {type(start).__name__} can't be drawn from: take a proper base, or say where "
            "to start by reference=..., a distribution that covers the mass"
        ) from error
    dtype = jax.eval_shape(start.sample, random.key(0)).dtype
    if not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(f"tempered SMC needs a continuous base, got {type(start).__name__} with draws of type {dtype}")
    return start


class _Element(NamedTuple):
    """What a run needs of one distribution of a batch."""

    log_base: Any
    log_ratio: Any
    kernel: Any
    unconstrain: Any


def _element(distribution, reference, element):
    batch_shape, event_shape = distribution.batch_shape, distribution.event_shape

    def of_element(function):
        def value(x):
            values = function(jnp.broadcast_to(x, (*batch_shape, *event_shape)))
            return jnp.ravel(jnp.broadcast_to(values, batch_shape))[element]

        return value

    if reference is None:
        log_base = of_element(distribution.base.log_prob)
        log_ratio = of_element(lambda x: -distribution.inverse_temperature * distribution.energy(x))
    else:
        log_base = of_element(reference.log_prob)
        log_ratio = of_element(lambda x: distribution.unnormalized_log_prob(x) - reference.log_prob(x))

    start = distribution if reference is None else EnergyBased(distribution.energy, reference)
    deviation = base_deviation(start)
    if deviation is not None:
        deviation = jnp.broadcast_to(deviation, (*batch_shape, *event_shape)).reshape(-1, *event_shape)[element]
        transform = AffineTransform(0.0, deviation)

        def kernel(step_size):
            return Transformed(mala(step_size), transform)

        return _Element(log_base, log_ratio, kernel, transform.inv)
    support = distribution.support
    unconstrain = None if is_sphere(support) else biject_to(support).inv
    return _Element(log_base, log_ratio, lambda step_size: on_support(mala(step_size), support), unconstrain)


# compiling takes longer than running: so it takes half as long, and runs as fast
_FAST_COMPILE: dict[str, Any] = {"xla_backend_optimization_level": 1}
if jax.__version_info__ < (0, 11):  # later ones have no such option
    _FAST_COMPILE |= {"xla_cpu_use_fusion_emitters": False, "xla_llvm_disable_expensive_passes": True}


@partial(jax.jit, static_argnames=("num_moves", "target_ess", "is_reversed"), compiler_options=_FAST_COMPILE)
def _run(distribution, reference, particles, keys, num_moves, target_ess, is_reversed):
    def run(inputs):
        key, index, particles = inputs
        element = _element(distribution, reference, index)
        return _islands(element, particles, key, num_moves, target_ess, is_reversed)

    return lax.map(run, (keys, jnp.arange(len(keys)), particles))


def _islands(element, particles, rng_key, num_moves, target_ess, is_reversed):
    """One element's :class:`TemperedRun`, from particles ``(1 + num_islands, n, *event_shape)``."""
    key_pilot, key_climb = random.split(rng_key)
    # an offset of the energy, a thousand times what it varies by, would cost digits on the way
    offset = jnp.median(jax.vmap(element.log_ratio)(particles[0]))
    offset = jnp.where(jnp.isfinite(offset), offset, 0)
    element = element._replace(log_ratio=lambda x, log_ratio=element.log_ratio: log_ratio(x) - offset)

    kernel = tempered.build_kernel(
        element.log_base,
        element.log_ratio,
        lambda key, state, logdensity_fn, step_size: element.kernel(step_size).step(key, state, logdensity_fn),
        lambda position, logdensity_fn: element.kernel(1.0).init(position, logdensity_fn),
        resampling.systematic,
    )
    ladder = _pilot(kernel, element.log_ratio, particles[0], key_pilot, num_moves, target_ess)
    climb = jax.vmap(lambda key, x: _climb(kernel, ladder, x, key, num_moves, is_reversed))(
        random.split(key_climb, NUM_ISLANDS), particles[1:]
    )
    drift, drift_stderr = drift_of(element.unconstrain, climb.arrived, climb.settled)
    is_complete = ladder.temperatures[ladder.num] >= 1
    for leaf in (climb.forward, climb.settled, drift):
        is_complete &= jnp.all(jnp.isfinite(leaf))
    return TemperedRun(
        climb.settled,
        offset + climb.forward,
        offset - climb.backward if is_reversed else None,
        NUM_ISLANDS * jnp.mean(climb.least_ess),
        jnp.ravel(climb.log_weights),
        drift,
        drift_stderr,
        ladder.num,
        jnp.mean(climb.acceptance_rate),
        has_pole(lambda x: element.log_base(x) + element.log_ratio(x), climb.settled),
        is_complete,
    )


class _Ladder(NamedTuple):
    """Temperatures from 0 to 1, the first ``num + 1`` of them in use, and the step size at each."""

    temperatures: jax.Array
    step_sizes: jax.Array
    num: jax.Array


def _pilot(kernel, log_ratio, particles, rng_key, num_moves, target_ess):
    """Find the ladder by a run that chooses each temperature by the effective sample size there."""
    num = particles.shape[0]

    def advance(carry):
        state, ladder, key = carry
        key, key_move = random.split(key)
        step_size = ladder.step_sizes[ladder.num]
        # the particles of this temperature, moved there: the next one is chosen by them
        state, info = kernel(key_move, state, num_moves, state.tempering_param, {"step_size": step_size[None]})
        step_size *= jnp.exp(2 * (jnp.mean(info.update_info.acceptance_rate) - TARGET_ACCEPTANCE))
        values = jax.vmap(log_ratio)(state.particles)

        def excess(delta):
            return ess.log_ess(jnp.nan_to_num(delta * values, nan=-jnp.inf)) - jnp.log(target_ess * num)

        left = 1 - state.tempering_param
        temperature = state.tempering_param + jnp.clip(solver.dichotomy(excess, 0.0, left), 0.0, left)
        delta = temperature - state.tempering_param
        weights = jax.nn.softmax(jnp.nan_to_num(delta * values, nan=-jnp.inf))
        state = tempered.TemperedSMCState(state.particles, weights, temperature)
        steps = ladder.step_sizes.at[ladder.num].set(step_size).at[ladder.num + 1].set(step_size)
        return (
            state,
            _Ladder(ladder.temperatures.at[ladder.num + 1].set(temperature), steps, ladder.num + 1),
            key,
        )

    def is_on_the_way(carry):
        state, ladder, _ = carry
        last = ladder.temperatures[ladder.num] - ladder.temperatures[jnp.maximum(ladder.num - 1, 0)]
        has_advanced = (ladder.num == 0) | (last > _LEAST_ADVANCE)
        return (state.tempering_param < 1) & has_advanced & (ladder.num < _MAX_TEMPERATURES)

    zeros = jnp.zeros(_MAX_TEMPERATURES + 1, particles.dtype)
    state = tempered.TemperedSMCState(particles, jnp.full(num, 1 / num, particles.dtype), zeros[0])
    ladder = _Ladder(zeros, zeros.at[0].set(0.1), jnp.zeros((), jnp.int32))
    ladder = lax.while_loop(is_on_the_way, advance, (state, ladder, rng_key))[1]
    # a ladder that does not reach the model is not climbed
    is_complete = ladder.temperatures[ladder.num] >= 1
    return ladder._replace(num=jnp.where(is_complete, ladder.num, 0))


class _Climb(NamedTuple):
    """One island: particles as they arrive at the last temperature and settle there, sums of log-weights."""

    state: tempered.TemperedSMCState
    arrived: jax.Array
    settled: jax.Array
    acceptance_rate: jax.Array
    forward: jax.Array
    backward: jax.Array
    least_ess: jax.Array
    log_weights: jax.Array
    rng_key: jax.Array


def _climb(kernel, ladder, particles, rng_key, num_moves, is_reversed):
    """Run up a given ladder, stay there for as long again, and run down."""
    num, top = particles.shape[0], ladder.num

    def rung(i):
        return jnp.where(i <= top, i, jnp.where(i <= 2 * top, top, 3 * top - i))

    def advance(i, climb):
        key, key_move = random.split(climb.rng_key)
        step_size = ladder.step_sizes[rung(i)][None]
        # moves at this rung, and weighs for the next
        state, info = kernel(
            key_move, climb.state, num_moves, ladder.temperatures[rung(i + 1)], {"step_size": step_size}
        )
        increment = info.log_likelihood_increment
        return _Climb(
            state,
            jnp.where(i == top, state.particles, climb.arrived),
            jnp.where(i == 2 * top, state.particles, climb.settled),
            jnp.where(i == 2 * top, jnp.mean(info.update_info.acceptance_rate), climb.acceptance_rate),
            climb.forward + jnp.where(i < top, increment, 0),
            climb.backward + jnp.where(i >= 2 * top, increment, 0),
            jnp.minimum(climb.least_ess, jnp.where(i < top, 1 / jnp.sum(state.weights**2), num)),
            jnp.where(i == top - 1, jnp.log(state.weights) + increment, climb.log_weights),
            key,
        )

    zero = jnp.zeros((), particles.dtype)
    state = tempered.TemperedSMCState(particles, jnp.full(num, 1 / num, particles.dtype), zero)
    climb = _Climb(state, particles, particles, zero, zero, zero, zero + num, jnp.log(state.weights), rng_key)
    return lax.fori_loop(0, 3 * top if is_reversed else 2 * top + 1, advance, climb)


@partial(jax.jit, compiler_options=_FAST_COMPILE)
def gather(run: TemperedRun, rng_key: jax.Array) -> jax.Array:
    """Particles of all islands, each island's number as its estimate of Z: ``(n, *batch_shape, *event_shape)``."""
    islands, num, *shape = run.particles.shape
    dims = run.forward.ndim - 1
    size = math.prod(shape[:dims])
    particles = jnp.reshape(run.particles, (islands * num, size, *shape[dims:]))
    weights = jax.nn.softmax(jnp.reshape(run.forward, (islands, size)), axis=0)

    def resample(key, particles, weights):
        return particles[resampling.systematic(key, jnp.repeat(weights / num, num), islands * num)]

    chosen = jax.vmap(resample, (0, 1, 1), 1)(random.split(rng_key, size), particles, weights)
    return jnp.reshape(chosen, (islands * num, *shape))


def is_spreading(run: TemperedRun) -> jax.Array:
    """Whether particles still move outwards at the end, of the batch shape."""
    return (run.drift > 5 * run.drift_stderr) & (run.drift > LARGEST_DRIFT)
