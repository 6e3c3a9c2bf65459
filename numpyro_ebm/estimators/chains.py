"""Which density the chains of a site sample, and its observations as they see them."""

import jax
import jax.numpy as jnp
from jax import random

from numpyro_ebm.distributions import EnergyBased
from numpyro_ebm.joint import ConditionalEnergy
from numpyro_ebm.pool import ChainPool, Observations, PoolState


def check_pool(pool: object, target: str) -> None:
    """Raise unless `pool` is a `ChainPool`, and `target` is one that there is."""
    if not isinstance(pool, ChainPool):
        raise TypeError(f"pool must be a ChainPool, got {type(pool).__name__}")
    if target not in ("marginal", "conditional"):
        raise ValueError(f"target must be 'marginal' or 'conditional', got {target!r}")


def is_joint(distribution: EnergyBased) -> bool:
    """Whether a distribution is p(x|y) of a joint energy."""
    return isinstance(distribution.energy, ConditionalEnergy)


def seen_by_chains(
    distribution: EnergyBased, observations: Observations, target: str
) -> tuple[EnergyBased, Observations]:
    """The distribution that chains sample, and its observations.

    For p(x|y) of a joint energy that is the marginal p(x), or p(x|y) of each class, of batch shape
    ``(num_classes,)``; for any other distribution, itself.

    Raises
    ------
    ValueError
        If a joint energy stands in a batch of bases or inverse temperatures.
    """
    energy = distribution.energy
    if not isinstance(energy, ConditionalEnergy):
        return distribution, observations
    base, beta = distribution.base, distribution.inverse_temperature
    if base.batch_shape or jnp.shape(beta):
        raise ValueError(
            "chains of a joint energy need a base without a batch shape and one inverse temperature, got batch shapes "
            f"{base.batch_shape} and {jnp.shape(beta)}"
        )
    marginal = target == "marginal"
    chains = EnergyBased(energy.marginal() if marginal else energy.each_class(), base, beta)
    if observations.value is None:
        return chains, observations
    rows, labels, weight = _labelled_rows(distribution, observations)
    if marginal:
        return chains, Observations(rows, weight)
    own = (labels[:, None] == jnp.arange(energy.num_classes)).astype(rows.dtype)
    if weight is not None:
        own = own * weight[:, None]
    return chains, Observations(rows[:, None], own)


def _labelled_rows(distribution, observations):
    """Observations of p(x|y) as rows ``(n, *event_shape)``, their labels and weights ``(n,)``."""
    event_shape = distribution.event_shape
    rows = jnp.reshape(observations.value, (-1, *event_shape))
    labels = jnp.broadcast_to(
        jnp.asarray(distribution.energy.labels), observations.value.shape[: observations.value.ndim - len(event_shape)]
    )
    weight = observations.weight
    if weight is not None:
        weight = jnp.reshape(weight, weight.shape + (1,) * (labels.ndim - weight.ndim))
        weight = jnp.ravel(jnp.broadcast_to(weight, labels.shape))
    return rows, jnp.ravel(labels), weight


def over_batch(x: jax.Array, distribution: EnergyBased) -> jax.Array:
    """Rows ``(n, *event_shape)`` as ``(n, 1, ..., *event_shape)``: each for all elements of the batch."""
    return jnp.reshape(x, (x.shape[0], *[1] * len(distribution.batch_shape), *distribution.event_shape))


def of_class(values: jax.Array, distribution: EnergyBased) -> jax.Array:
    """Values of each class, shape ``(..., num_classes)``, as those of each label, ``(..., *batch_shape)``."""
    energy = distribution.energy
    assert isinstance(energy, ConditionalEnergy)
    return values[..., jnp.asarray(energy.labels)]


def start(
    pool: ChainPool, target: str, rng_key: jax.Array, distribution: EnergyBased, observations: Observations
) -> PoolState:
    """The pool's state before the first update."""
    return pool.start(rng_key, *seen_by_chains(distribution, observations, target))


def advance(
    pool: ChainPool,
    target: str,
    rng_key: jax.Array,
    state: PoolState,
    distribution: EnergyBased,
    observations: Observations,
    simultaneous: bool = False,
) -> tuple[EnergyBased, jax.Array, PoolState]:
    """Draw chains and move them.

    Returns
    -------
    EnergyBased
        The distribution that they sample.
    jax.Array
        Their positions after the move (`simultaneous`: before it).
    PoolState
        The pool with the chains moved.
    """
    key_draw, key_move = random.split(rng_key)
    chains, observations = seen_by_chains(distribution, observations, target)
    index, position = pool.draw(key_draw, state)
    state, moved = pool.advance(key_move, state, index, chains, observations)
    position = jax.lax.stop_gradient(position) if simultaneous else moved
    return chains, position, pool.watch(state, chains, position, observations)
