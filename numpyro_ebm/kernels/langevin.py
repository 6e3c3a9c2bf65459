"""Langevin moves over BlackJAX: the core that all geometries share."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from blackjax.mcmc.diffusions import DiffusionState, overdamped_langevin
from jax import random
from jax.typing import ArrayLike

from numpyro_ebm.energies import as_float, check_positive


class LangevinState(NamedTuple):
    """What the next move needs.

    Attributes
    ----------
    position
        Array, or pytree of arrays, of shape ``(*batch, *event)``.
    logdensity
        Log-density of the position, shape ``batch``.
    logdensity_grad
        Its gradient, tangent to the manifold.
    num_moves
        Moves made so far: what a schedule of step sizes is a function of.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import random
    >>> from numpyro_ebm import kernels
    >>> state = kernels.mala(0.1).init(jnp.zeros((5, 2)), lambda x: -jnp.sum(x**2, -1) / 2)     # five chains
    >>> state, info = kernels.mala(0.1).step(random.key(0), state, lambda x: -jnp.sum(x**2, -1) / 2)
    >>> state.position.shape, int(state.num_moves)
    ((5, 2), 1)
    """

    position: Any
    logdensity: jax.Array
    logdensity_grad: Any
    num_moves: jax.Array


class LangevinInfo(NamedTuple):
    """Diagnostics of a move, each of shape ``batch``.

    Attributes
    ----------
    acceptance_rate
        Probability of acceptance; 1 for an unadjusted move.
    is_accepted
        Whether the chain moved.
    is_nonfinite
        Whether log-density or gradient were not finite where the move led.
    is_divergent
        `is_nonfinite`, or an energy error over 1000.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import random
    >>> from numpyro_ebm import kernels
    >>> state = kernels.mala(0.1).init(jnp.zeros((5, 2)), lambda x: -jnp.sum(x**2, -1) / 2)     # five chains
    >>> state, info = kernels.mala(0.1).step(random.key(0), state, lambda x: -jnp.sum(x**2, -1) / 2)
    >>> info.acceptance_rate.shape, bool(info.is_divergent.any())
    ((5,), False)
    """

    acceptance_rate: jax.Array
    is_accepted: jax.Array
    is_nonfinite: jax.Array
    is_divergent: jax.Array


@dataclass(frozen=True)
class Euclidean:
    """R^d: gradients are vectors as they are, and geodesics are straight."""

    def project(self, position, vector):
        return vector

    def retract(self, position, ambient):
        """Move towards `ambient`. Returns the new position and the velocities at both ends."""
        velocity = ambient - position
        return ambient, velocity, velocity


EUCLIDEAN = Euclidean()


@dataclass(frozen=True)
class Langevin:
    """An unadjusted Langevin kernel; made by :func:`~numpyro_ebm.kernels.ula`.

    Parameters
    ----------
    step_size
        As in :func:`~numpyro_ebm.kernels.ula`.
    temperature
        Of the noise, whose variance is ``2 * temperature * step_size``: 1 samples the density.
    geometry
        A manifold, or a pytree of manifolds of the structure of the position.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import random
    >>> kernel = Langevin(0.1)
    >>> state = kernel.init(jnp.zeros(3), lambda x: -jnp.sum(x**2) / 2)
    >>> state, info = kernel.step(random.key(0), state, lambda x: -jnp.sum(x**2) / 2)
    >>> state.position.shape, int(state.num_moves)
    ((3,), 1)
    """

    step_size: ArrayLike | Callable | None
    temperature: float = 1.0
    geometry: Any = field(default=EUCLIDEAN)

    def __post_init__(self):
        if not (self.step_size is None or callable(self.step_size)):
            check_positive("step_size", self.step_size)
        check_positive("temperature", self.temperature)

    def init(self, position: Any, logdensity_fn: Callable, num_moves: ArrayLike = 0) -> LangevinState:
        """State of a chain, or of a batch of independent chains, at `position`.

        `logdensity_fn` maps positions of shape ``(*batch, *event)`` to shape ``batch``.
        """
        position = jax.tree.map(as_float, position)
        value, gradient = self._value_and_grad(position, logdensity_fn)
        return LangevinState(position, value, gradient, jnp.asarray(num_moves, jnp.int32))

    def step(
        self, rng_key: jax.Array, state: LangevinState, logdensity_fn: Callable
    ) -> tuple[LangevinState, LangevinInfo]:
        """Move once: ``x + step_size * grad log p + sqrt(2 * temperature * step_size) * noise``."""
        proposal, _ = self._propose(rng_key, state, logdensity_fn, self._step_size(state))
        finite = _is_finite(proposal)
        one = jnp.ones_like(state.logdensity)
        return proposal, LangevinInfo(one, jnp.ones_like(finite), ~finite, ~finite)

    def with_step_size(self, step_size: ArrayLike) -> "Langevin":
        """This kernel with another step size."""
        return replace(self, step_size=step_size)

    def _step_size(self, state):
        if self.step_size is None:
            raise ValueError("this kernel has no step size: give it one, or put it into a ChainPool, which adapts it")
        return self.step_size(state.num_moves) if callable(self.step_size) else self.step_size

    def _manifolds(self, position):
        one = hasattr(self.geometry, "retract")
        return jax.tree.map(lambda _: self.geometry, position) if one else self.geometry

    def _value_and_grad(self, position, logdensity_fn):
        value, pullback = jax.vjp(logdensity_fn, position)
        (gradient,) = pullback(jnp.ones_like(value))
        return value, jax.tree.map(lambda g, x, v: g.project(x, v), self._manifolds(position), position, gradient)

    def _propose(self, rng_key, state, logdensity_fn, step_size):
        """The new state, and the kinetic energies of the move's start and end."""

        def retract(ambient):
            # noise is of JAX's default type, a chain keeps the type of its start
            moved = jax.tree.map(
                lambda g, x, a: g.retract(x, a.astype(x.dtype)),
                self._manifolds(state.position),
                state.position,
                ambient,
            )
            return jax.tree.transpose(jax.tree.structure(state.position), jax.tree.structure((0, 0, 0)), moved)

        # BlackJAX makes the step in the ambient space; a manifold bends it back. A tempered move is
        # a move of temperature 1 on the density to the power 1 / temperature.
        step_size = step_size * self.temperature
        drift = jax.tree.map(lambda g: g / self.temperature, state.logdensity_grad)
        start = DiffusionState(state.position, state.logdensity, drift)
        diffuse = overdamped_langevin(lambda ambient: self._value_and_grad(retract(ambient)[0], logdensity_fn))
        ambient, value, gradient = diffuse(rng_key, start, step_size)
        position, velocity, velocity_end = retract(ambient)

        # The same move is one leapfrog step of length sqrt(2 step_size) from these momenta.
        length = jnp.sqrt(2 * step_size)
        momentum = jax.tree.map(lambda v, g: v / length - length / 2 * g, velocity, drift)
        momentum_end = jax.tree.map(lambda v, g: v / length + length / 2 * g, velocity_end, gradient)
        kinetic = _half_square(momentum, value.ndim), _half_square(momentum_end, value.ndim)
        return LangevinState(position, value, gradient, state.num_moves + 1), kinetic


@dataclass(frozen=True)
class AdjustedLangevin(Langevin):
    """A Metropolis-adjusted Langevin kernel; made by :func:`~numpyro_ebm.kernels.mala`."""

    def step(
        self, rng_key: jax.Array, state: LangevinState, logdensity_fn: Callable
    ) -> tuple[LangevinState, LangevinInfo]:
        """Propose a Langevin move, and accept it with the Metropolis-Hastings probability."""
        key_move, key_accept = random.split(rng_key)
        proposal, (kinetic, kinetic_end) = self._propose(key_move, state, logdensity_fn, self._step_size(state))
        energy_change = state.logdensity - proposal.logdensity + kinetic_end - kinetic
        finite = _is_finite(proposal) & jnp.isfinite(energy_change)
        energy_change = jnp.where(finite, energy_change, jnp.inf)
        acceptance_rate = jnp.exp(jnp.minimum(-energy_change, 0))
        accepted = random.uniform(key_accept, finite.shape, acceptance_rate.dtype) < acceptance_rate
        info = LangevinInfo(acceptance_rate, accepted, ~finite, energy_change > 1000)
        return select(accepted, proposal, state)._replace(num_moves=proposal.num_moves), info


def select(condition: jax.Array, new: LangevinState, old: LangevinState) -> LangevinState:
    """The chains of `new` where `condition` (of shape ``batch``) holds, else of `old`; `num_moves` of `old`.

    Parameters
    ----------
    condition
        Booleans, shape ``batch``.
    new, old
        States of the same chains.

    Returns
    -------
    LangevinState
        Of the shapes of both.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> a, b = (Langevin(0.1).init(x, lambda x: -jnp.sum(x**2, -1)) for x in (jnp.zeros((2, 3)), jnp.ones((2, 3))))
    >>> select(jnp.array([True, False]), a, b).position.tolist()
    [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    """

    def choose(a, b):
        return jnp.where(jnp.reshape(condition, condition.shape + (1,) * (jnp.ndim(a) - condition.ndim)), a, b)

    position = jax.tree.map(choose, new.position, old.position)
    gradient = jax.tree.map(choose, new.logdensity_grad, old.logdensity_grad)
    return LangevinState(position, choose(new.logdensity, old.logdensity), gradient, old.num_moves)


def _is_finite(state):
    finite = jnp.isfinite(state.logdensity)
    for leaf in jax.tree.leaves((state.position, state.logdensity_grad)):
        finite &= jnp.all(jnp.isfinite(leaf), axis=tuple(range(finite.ndim, leaf.ndim)))
    return finite


def _half_square(momentum, batch_ndim):
    squares = [jnp.sum(p**2, axis=tuple(range(batch_ndim, p.ndim))) for p in jax.tree.leaves(momentum)]
    return sum(squares[1:], squares[0]) / 2
