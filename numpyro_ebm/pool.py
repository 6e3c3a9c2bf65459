"""Persistent chains that follow a model while its parameters move."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax, random
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.distributions.transforms import AffineTransform

from numpyro_ebm.distributions import EnergyBased, detached, is_sphere
from numpyro_ebm.energies import as_float, check_probability, check_size
from numpyro_ebm.kernels import Langevin, Transformed, mala, on_support

TARGET_ACCEPTANCE = 0.574  # optimal for MALA in high dimensions (Roberts and Rosenthal 1998)
_FIRST_STEP_SIZE = 0.1
_LONGEST_STEP_SIZE = 10.0
_LEAST_GAIN = 0.02


class PoolState(NamedTuple):
    """Chains between two updates.

    Only positions are kept: log-densities and gradients are of parameters that have moved since.

    Attributes
    ----------
    position
        Shape ``(pool_size, *batch_shape, *event_shape)``.
    num_moves
        Moves so far of the chains that every update drew.
    step_size
        Of the next move, where the pool adapts it.
    acceptance_rate
        Mean over the last update's chains and moves.
    energy_gap
        Mean over the last update's observations of the mean energy (times the inverse temperature) of
        their chains less their own: near 0 where chains keep up with training; 0 at a latent site.
    max_energy
        Largest absolute energy of chains and observations so far; infinite once one was not finite.
    num_nonfinite
        Chains restarted so far because they turned non-finite.
    age
        Moves of each chain since it last restarted, shape ``(pool_size, *batch_shape)``.
    num_restarts
        How often each chain restarted, same shape.
    origin
        Where each chain last started, an index into ``numpyro_ebm.pool.ORIGINS``, same shape.
    """

    position: jax.Array
    num_moves: jax.Array
    step_size: jax.Array
    acceptance_rate: jax.Array
    energy_gap: jax.Array
    max_energy: jax.Array
    num_nonfinite: jax.Array
    age: jax.Array
    num_restarts: jax.Array
    origin: jax.Array


ORIGINS = ("start", "observation", "init", "repair")
PER_CHAIN = ("position", "age", "num_restarts", "origin")  # fields of a state that have a row for each chain


class Observations(NamedTuple):
    """Observations of a site as rows, at which chains restart.

    Attributes
    ----------
    value
        Shape ``(n, *batch_shape, *event_shape)``, or 1 where elements of the batch share it; None at a
        latent site.
    weight
        Shape ``(n,)`` or ``(n, *batch_shape)``, 0 for rows that are masked or not an element's own,
        else 1; None where all are.
    mask
        What the site's masks leave, of the shape of the site's batch; None where nothing is masked.
    """

    value: Any = None
    weight: jax.Array | None = None
    mask: jax.Array | None = None

    @property
    def is_available(self) -> jax.Array:
        """Whether there is a row to draw, of shape ``()`` or ``batch_shape``."""
        return jnp.asarray(True) if self.weight is None else jnp.any(self.weight > 0, axis=0)

    def draw(self, rng_key: jax.Array, num: int) -> jax.Array:
        """Draw `num` rows, each with the same probability; any rows where none is available."""
        size = self.value.shape[0]
        if self.weight is None:
            return self.value[random.randint(rng_key, (num,), 0, size)]
        kept = jnp.cumsum((self.weight > 0) | ~self.is_available, axis=0, dtype=jnp.int32)
        nth = random.randint(rng_key, (num, *kept.shape[1:]), 0, kept[-1])
        if kept.ndim == 1:
            return self.value[jnp.searchsorted(kept, nth, side="right")]
        index = jax.vmap(partial(jnp.searchsorted, side="right"), (1, 1), 1)(
            jnp.reshape(kept, (size, -1)), jnp.reshape(nth, (num, -1))
        )
        return jnp.take_along_axis(self.value, _over_event(jnp.reshape(index, nth.shape), self.value), axis=0)

    def deal(self, rng_key: jax.Array, num: int) -> jax.Array:
        """Take `num` rows, all of them equally often as far as `num` allows."""
        if self.weight is not None:
            return self.draw(rng_key, num)
        size = self.value.shape[0]
        whole, rest = divmod(num, size)
        index = jnp.concatenate([jnp.tile(jnp.arange(size), whole), random.permutation(rng_key, size)[:rest]])
        return self.value[index]


NO_OBSERVATIONS = Observations()


@dataclass(frozen=True)
class ChainPool:
    """A pool of persistent chains, the model's side of a contrastive gradient.

    Parameters
    ----------
    kernel
        From :mod:`numpyro_ebm.kernels`; moves on the support of the distribution by itself. By
        default MALA, whose step size the pool adapts to an acceptance of 0.574.
    pool_size
        Number of chains kept; for an energy with a batch shape, for each element of it.
    num_chains
        Number of chains drawn, advanced and written back per update; None: all.
    num_steps
        Moves per update.
    restart_prob
        Probability, per chain and update, of a restart at a random observation. 1 makes
        contrastive divergence with `num_steps` moves (CD-k).
    reinit_prob
        Probability, per chain and update, of a restart at a draw of `init`.
    init
        Where chains start: None, the base; a distribution; ``"data"``, the observations; or a
        function ``init(rng_key, sample_shape)``.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of its range.

    Examples
    --------
    >>> from numpyro_ebm import kernels
    >>> pool = ChainPool(kernels.mala(1e-2), pool_size=512, num_steps=10)
    """

    kernel: Langevin | Transformed = field(default_factory=mala)
    pool_size: int = 512
    num_chains: int | None = None
    num_steps: int = 1
    restart_prob: float = 0.0
    reinit_prob: float = 0.0
    init: Any = None

    def __post_init__(self):
        if not (hasattr(self.kernel, "init") and hasattr(self.kernel, "step")):
            raise TypeError(
                f"kernel must have init and step, as numpyro_ebm.kernels.mala(1e-2) has, got {self.kernel!r}"
            )
        check_size("pool_size", self.pool_size)
        check_size("num_steps", self.num_steps)
        if self.num_chains is not None:
            check_size("num_chains", self.num_chains)
            if self.num_chains > self.pool_size:
                raise ValueError(f"num_chains must be at most pool_size={self.pool_size}, got {self.num_chains!r}")
        check_probability("restart_prob", self.restart_prob)
        check_probability("reinit_prob", self.reinit_prob)
        known = (
            self.init is None
            or (isinstance(self.init, str) and self.init == "data")
            or isinstance(self.init, dist.Distribution)
        )
        if not (known or callable(self.init)):
            raise TypeError(f"init must be None, 'data', a distribution or a function of a key, got {self.init!r}")

    def start(
        self, rng_key: jax.Array, distribution: EnergyBased, observations: Observations = NO_OBSERVATIONS
    ) -> PoolState:
        """Return a pool whose chains are at draws of `init`.

        Raises
        ------
        ValueError
            If there is nothing to start from: an improper base without `init`, or ``init="data"``
            at a latent site.
        """
        if isinstance(self.init, str):
            position = self._rows(observations, "init='data'").deal(rng_key, self.pool_size)
        else:
            position = self._draw_init(rng_key, distribution, self.pool_size)
        position = as_float(position)
        zero, count = jnp.zeros((), jnp.result_type(float)), jnp.zeros((), jnp.int32)
        step_size = _FIRST_STEP_SIZE if self.kernel.step_size is None else self._fixed_step_size(count)
        each = jnp.zeros((self.pool_size, *distribution.batch_shape), jnp.int32)
        return PoolState(position, count, zero + step_size, zero + 1, zero, zero, count, each, each, each)

    def sample(self, rng_key: jax.Array, distribution: EnergyBased) -> jax.Array:
        """Start chains and return where `num_steps` moves take them, shape ``(pool_size, *batch_shape, *event_shape)``.

        Raises
        ------
        ValueError
            As :meth:`start` and :meth:`advance`.

        Examples
        --------
        >>> from numpyro_ebm import kernels
        >>> d = EnergyBased(lambda x: (x - 3.0) ** 2, dist.Uniform(0, 4))
        >>> x = ChainPool(kernels.mala(0.1), pool_size=1_000, num_steps=100).sample(random.key(0), d)
        >>> x.shape, bool(abs(x.mean() - 2.89) < 0.1)
        ((1000,), True)
        """
        key_start, key_moves = random.split(rng_key)
        return self.advance(key_moves, self.start(key_start, distribution), None, distribution)[1]

    def draw(self, rng_key: jax.Array, state: PoolState) -> tuple[jax.Array | None, jax.Array]:
        """Return the indices of `num_chains` chains (None: all) and their positions."""
        if self.num_chains is None or self.num_chains == self.pool_size:
            return None, state.position
        index = random.permutation(rng_key, self.pool_size)[: self.num_chains]
        return index, state.position[index]

    def advance(
        self,
        rng_key: jax.Array,
        state: PoolState,
        index: jax.Array | None,
        distribution: EnergyBased,
        observations: Observations = NO_OBSERVATIONS,
    ) -> tuple[PoolState, jax.Array]:
        """Restart, move and write back the chains at `index`.

        Returns
        -------
        PoolState
            The pool with the chains moved.
        jax.Array
            The chains' new positions, shape ``(num_chains, *batch_shape, *event_shape)``. Nothing
            is differentiated through them.

        Raises
        ------
        ValueError
            If `restart_prob` is positive and there are no observations.
        """
        key_choice, key_restart, key_rechoice, key_reinit, key_move, key_repair = random.split(rng_key, 6)
        position = state.position if index is None else state.position[index]
        num, batch_shape = position.shape[0], distribution.batch_shape
        logdensity_fn = detached(distribution, position)
        position = lax.stop_gradient(position)

        lineage = [part if index is None else part[index] for part in (state.age, state.num_restarts, state.origin)]

        def restarted(chosen, origin):
            age, num_restarts, origins = lineage
            return [jnp.where(chosen, 0, age), num_restarts + chosen, jnp.where(chosen, ORIGINS.index(origin), origins)]

        if self.restart_prob > 0:
            rows = self._rows(observations, "restart_prob > 0")
            chosen = self._choose(key_choice, self.restart_prob, num, batch_shape) & rows.is_available
            position = _where(chosen, rows.draw(key_restart, num), position)
            lineage = restarted(chosen, "observation")
        if self.reinit_prob > 0:
            chosen = self._choose(key_rechoice, self.reinit_prob, num, batch_shape)
            position = _where(chosen, self._draw_init(key_reinit, distribution, num, observations), position)
            lineage = restarted(chosen, "init")
        lineage[0] = lineage[0] + self.num_steps

        kernel = moves_on(distribution, self.kernel, state.step_size)
        chains = kernel.init(position, logdensity_fn, state.num_moves)

        def move(chains, key):
            chains, info = kernel.step(key, chains, logdensity_fn)
            return chains, jnp.mean(info.acceptance_rate)

        if self.num_steps == 1:
            chains, acceptance_rate = move(chains, key_move)
        else:
            chains, rates = lax.scan(move, chains, random.split(key_move, self.num_steps))
            acceptance_rate = jnp.mean(rates)

        lost = ~jnp.isfinite(chains.logdensity)
        for leaf in (chains.position, chains.logdensity_grad):
            lost |= ~jnp.all(jnp.isfinite(leaf), axis=tuple(range(lost.ndim, leaf.ndim)))

        def repair(position):
            if observations.value is None:
                fresh = self._draw_init(key_repair, distribution, num)
            else:
                fresh = observations.draw(key_repair, num)
            return _where(lost, fresh, position)

        position = lax.cond(jnp.any(lost), repair, lambda position: position, chains.position)
        position = lax.stop_gradient(position)
        lineage = restarted(lost, "repair")
        if self.kernel.step_size is None:
            step_size = self._adapted(state, distribution, lax.stop_gradient(acceptance_rate))
        else:
            step_size = self._fixed_step_size(chains.num_moves)
        each = dict(zip(PER_CHAIN, (position, *lineage), strict=True))
        pool = state._replace(
            **{name: new if index is None else getattr(state, name).at[index].set(new) for name, new in each.items()},
            num_moves=chains.num_moves,
            step_size=jnp.asarray(step_size, state.step_size.dtype),
            acceptance_rate=lax.stop_gradient(acceptance_rate).astype(state.acceptance_rate.dtype),
            num_nonfinite=state.num_nonfinite + jnp.sum(lost, dtype=jnp.int32),
        )
        return pool, position

    def watch(
        self, state: PoolState, distribution: EnergyBased, position: jax.Array, observations: Observations
    ) -> PoolState:
        """Record the energies of chains at `position` and of the observations.

        They are those that a contrastive gradient computes anyway, and cost nothing in addition.
        """

        def energy(x):
            return lax.stop_gradient(distribution.inverse_temperature * distribution.energy(x))

        chains = energy(position)
        gap, largest = jnp.zeros(()), jnp.max(jnp.abs(chains))
        if observations.value is not None:
            data = energy(observations.value)
            weight = jnp.ones(()) if observations.weight is None else observations.weight
            weight = jnp.broadcast_to(jnp.reshape(weight, weight.shape + (1,) * (data.ndim - weight.ndim)), data.shape)
            # each observation against the chains of its own element of the batch
            gaps = jnp.where(weight > 0, jnp.mean(chains, axis=0) - data, 0)
            gap = jnp.sum(gaps) / jnp.maximum(jnp.sum(weight), 1)
            largest = jnp.maximum(largest, jnp.max(jnp.where(weight > 0, jnp.abs(data), 0)))
        largest = jnp.where(jnp.isfinite(largest), largest, jnp.inf)
        return state._replace(
            energy_gap=gap.astype(state.energy_gap.dtype),
            max_energy=jnp.maximum(state.max_energy, largest.astype(state.max_energy.dtype)),
        )

    def _fixed_step_size(self, num_moves):
        step_size = self.kernel.step_size
        return step_size(num_moves) if callable(step_size) else step_size

    def _adapted(self, state, distribution, acceptance_rate):
        """A Robbins-Monro step, whose gain does not vanish: the target moves with the parameters."""
        num_updates = state.num_moves // self.num_steps + 1
        gain = jnp.maximum(num_updates**-0.5, _LEAST_GAIN)
        step_size = state.step_size * jnp.exp(gain * (acceptance_rate - TARGET_ACCEPTANCE))
        # where units are known, a longer step is of no use: on a flat density all steps are accepted
        known = is_sphere(distribution.support) or base_deviation(distribution) is not None
        return jnp.minimum(step_size, _LONGEST_STEP_SIZE) if known else step_size

    def _choose(self, rng_key, probability, num, batch_shape):
        shape = (num, *batch_shape)
        return jnp.ones(shape, bool) if probability == 1 else random.bernoulli(rng_key, probability, shape)

    def _draw_init(self, rng_key, distribution, num, observations=NO_OBSERVATIONS):
        if isinstance(self.init, str):
            return self._rows(observations, "init='data'").draw(rng_key, num)
        shape = (num, *distribution.batch_shape, *distribution.event_shape)
        given = distribution.base if self.init is None else self.init
        source: Callable = given.sample if isinstance(given, dist.Distribution) else given
        if isinstance(given, dist.Distribution) and given.event_shape == distribution.event_shape:
            batch_shape = distribution.batch_shape
            source = (given if given.batch_shape == batch_shape else given.expand(batch_shape)).sample
        try:
            draws = source(rng_key, (num,))
        except NotImplementedError as error:
            raise ValueError(
                f"chains start at draws of the base, but {type(distribution.base).__name__} can't be drawn from: "
                "say where by ChainPool(init=...), a distribution, 'data' or a function of a key"
            ) from error
        if math.prod(jnp.shape(draws)) != math.prod(shape):
            try:
                draws = jnp.broadcast_to(draws, shape)
            except ValueError as error:
                raise ValueError(
                    f"init returned shape {jnp.shape(draws)} for {num} chains, expected {shape}"
                ) from error
        return lax.stop_gradient(jnp.reshape(draws, shape))

    def _rows(self, observations, option):
        if observations.value is None:
            raise ValueError(f"ChainPool({option}) needs observations, but the site is latent")
        return observations


def moves_on(distribution: EnergyBased, kernel: Langevin | Transformed, step_size: ArrayLike) -> Langevin | Transformed:
    """The kernel on a distribution's support; where it has no step size of its own, with this one, in units of the base."""
    if kernel.step_size is None:
        kernel = kernel.with_step_size(step_size)
        scale = None if isinstance(kernel, Transformed) else base_deviation(distribution)
        kernel = kernel if scale is None else Transformed(kernel, AffineTransform(0.0, scale))
    return on_support(kernel, distribution.support)


def base_deviation(distribution: EnergyBased) -> jax.Array | None:
    """Standard deviations of the base, where it is on R^d and has them; 1 where tails are too heavy."""
    support = distribution.support
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    if support is not constraints.real:
        return None
    try:
        deviation = deviation_of(distribution.base)
    except NotImplementedError:
        return None
    return lax.stop_gradient(jnp.where(jnp.isfinite(deviation) & (deviation > 0), deviation, 1))


def deviation_of(base: dist.Distribution) -> jax.Array:
    """Standard deviations; of normals without their squares, which leave the range of floats before they do."""
    inner = base
    while isinstance(inner, dist.Independent | dist.ExpandedDistribution):
        inner = inner.base_dist
    if isinstance(inner, dist.Normal):
        return jnp.broadcast_to(inner.scale, base.batch_shape + base.event_shape)
    return jnp.sqrt(base.variance)


def _where(condition, new, position):
    """Positions, those of `new` where `condition` holds."""
    return jnp.where(_over_event(condition, position), lax.stop_gradient(new).astype(position.dtype), position)


def _over_event(condition, position):
    return jnp.reshape(condition, condition.shape + (1,) * (position.ndim - condition.ndim))
