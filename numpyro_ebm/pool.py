"""Persistent chains that follow a model while its parameters move."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import lax, random

from numpyro_ebm.distributions import EnergyBased, detached
from numpyro_ebm.energies import check_probability, check_size
from numpyro_ebm.kernels import Langevin, on_support


class PoolState(NamedTuple):
    """Chains between two updates.

    Only positions are kept: log-densities and gradients are of parameters that have moved since.

    Attributes
    ----------
    position
        Shape ``(pool_size, *batch_shape, *event_shape)``.
    num_moves
        Moves of each chain so far.
    acceptance_rate
        Mean over the last update's chains and moves.
    num_nonfinite
        Chains restarted so far because they turned non-finite.
    """

    position: jax.Array
    num_moves: jax.Array
    acceptance_rate: jax.Array
    num_nonfinite: jax.Array


class Observations(NamedTuple):
    """Observations of a site, as chains restart at them.

    Attributes
    ----------
    value
        Shape ``(n, *batch_shape, *event_shape)``.
    weight
        Shape ``(n,)``, 0 for masked rows; None where nothing is masked.
    """

    value: jax.Array
    weight: jax.Array | None = None

    def draw(self, rng_key: jax.Array, num: int) -> jax.Array:
        """Draw `num` rows, each with the same probability."""
        size = self.value.shape[0]
        if self.weight is None:
            index = random.randint(rng_key, (num,), 0, size)
        else:
            index = random.choice(rng_key, size, (num,), p=self.weight / jnp.sum(self.weight))
        return self.value[index]

    def deal(self, rng_key: jax.Array, num: int) -> jax.Array:
        """Take `num` rows, all of them equally often as far as `num` allows."""
        if self.weight is not None:
            return self.draw(rng_key, num)
        size = self.value.shape[0]
        whole, rest = divmod(num, size)
        index = jnp.concatenate([jnp.tile(jnp.arange(size), whole), random.permutation(rng_key, size)[:rest]])
        return self.value[index]


@dataclass(frozen=True)
class ChainPool:
    """A pool of persistent chains, the model's side of a contrastive gradient.

    Parameters
    ----------
    kernel
        From :mod:`numpyro_ebm.kernels`; moves on the support of the distribution by itself.
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

    kernel: Langevin
    pool_size: int
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
        self, rng_key: jax.Array, distribution: EnergyBased, observations: Observations | None = None
    ) -> PoolState:
        """Return a pool whose chains are at draws of `init`.

        Raises
        ------
        ValueError
            If there is nothing to start from: an improper base without `init`, or ``init="data"``
            at a latent site.
        """
        if isinstance(self.init, str):
            position = self._need(observations, "init='data'").deal(rng_key, self.pool_size)
        else:
            position = self._draw_init(rng_key, distribution, self.pool_size)
        dtype = jnp.result_type(float)
        return PoolState(
            position,
            jnp.zeros((), jnp.int32),
            jnp.ones((), dtype),
            jnp.zeros((), jnp.int32),
        )

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
        observations: Observations | None = None,
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
        key_restart, key_reinit, key_move, key_repair = random.split(rng_key, 4)
        position = state.position if index is None else state.position[index]
        num, batch_shape = position.shape[0], distribution.batch_shape
        logdensity_fn = detached(distribution, position)
        position = lax.stop_gradient(position)

        if self.restart_prob > 0:
            rows = self._need(observations, "restart_prob > 0")
            position = _replace(key_restart, self.restart_prob, position, batch_shape, lambda k: rows.draw(k, num))
        if self.reinit_prob > 0:
            position = _replace(
                key_reinit,
                self.reinit_prob,
                position,
                batch_shape,
                lambda k: self._draw_init(k, distribution, num, observations),
            )

        kernel = on_support(self.kernel, distribution.support)
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
            fresh = (
                self._draw_init(key_repair, distribution, num, observations)
                if observations is None
                else observations.draw(key_repair, num)
            )
            return jnp.where(_over_event(lost, position), lax.stop_gradient(fresh).astype(position.dtype), position)

        position = lax.cond(jnp.any(lost), repair, lambda position: position, chains.position)
        position = lax.stop_gradient(position)
        pool = PoolState(
            position if index is None else state.position.at[index].set(position),
            chains.num_moves,
            acceptance_rate.astype(state.acceptance_rate.dtype),
            state.num_nonfinite + jnp.sum(lost, dtype=jnp.int32),
        )
        return pool, position

    def _draw_init(self, rng_key, distribution, num, observations=None):
        if isinstance(self.init, str):
            return self._need(observations, "init='data'").draw(rng_key, num)
        shape = (num, *distribution.batch_shape, *distribution.event_shape)
        source: Callable = self.init.sample if isinstance(self.init, dist.Distribution) else self.init
        if self.init is None:
            base = distribution.base
            batch_shape = distribution.batch_shape
            source = (base if base.batch_shape == batch_shape else base.expand(batch_shape)).sample
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

    def _need(self, observations, option):
        if observations is None:
            raise ValueError(f"ChainPool({option}) needs observations, but the site is latent")
        return observations


def _replace(rng_key, probability, position, batch_shape, draw):
    """Positions, each replaced by a row of `draw(key)` with the given probability."""
    key_choice, key_draw = random.split(rng_key)
    fresh = draw(key_draw).astype(position.dtype)
    if probability == 1:
        return lax.stop_gradient(fresh)
    chosen = random.bernoulli(key_choice, probability, (position.shape[0], *batch_shape))
    return jnp.where(_over_event(chosen, position), lax.stop_gradient(fresh), position)


def _over_event(condition, position):
    return jnp.reshape(condition, condition.shape + (1,) * (position.ndim - condition.ndim))
