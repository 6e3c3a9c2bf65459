"""Contrastive divergence: the gradient of the log-likelihood, with chains as draws of the model."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import random

from numpyro_ebm.distributions import EnergyBased
from numpyro_ebm.pool import ChainPool, Observations, PoolState


@dataclass(frozen=True)
class ContrastiveDivergence:
    r"""Estimate the gradient of log Z as the mean over a pool of chains.

    .. math:: \nabla \log Z = E_\nu[\nabla (\log \tau - \beta f)(X)] \approx
        \frac{1}{N} \sum_{i=1}^N \nabla (\log \tau - \beta f)(X_i)

    Exact in expectation where the chains are at their equilibrium. Persistent (PCD) by default,
    CD-k with ``restart_prob=1`` in the pool.

    Parameters
    ----------
    pool
        The chains.
    simultaneous
        Take the gradient at the positions before the move, as paper A's Algorithm 1 does, instead
        of after it. One gradient evaluation less per update; not for energies that depend on a
        latent variable, whose chains must have moved at its present value.

    Raises
    ------
    TypeError
        If `pool` is not a :class:`~numpyro_ebm.ChainPool`.

    Notes
    -----
    Costs `num_steps` + 1 gradients in x and one in the parameters per chain and update.

    References
    ----------
    Hinton (2002), Training products of experts by minimizing contrastive divergence.
    Tieleman (2008), Training restricted Boltzmann machines using approximations to the likelihood gradient.

    Examples
    --------
    >>> from numpyro_ebm import ChainPool, kernels
    >>> estimator = ContrastiveDivergence(ChainPool(kernels.mala(1e-2), pool_size=256, num_steps=10))
    """

    pool: ChainPool
    simultaneous: bool = False

    def __post_init__(self):
        if not isinstance(self.pool, ChainPool):
            raise TypeError(f"pool must be a ChainPool, got {type(self.pool).__name__}")

    def init(self, rng_key: jax.Array, distribution: EnergyBased, observations: Observations | None) -> PoolState:
        """Return the state before the first update: the pool's starting positions."""
        return self.pool.start(rng_key, distribution, observations)

    def update(
        self, rng_key: jax.Array, state: PoolState, distribution: EnergyBased, observations: Observations | None
    ) -> tuple[jax.Array, PoolState]:
        """Advance the chains. Returns a surrogate with the gradient of log Z, and the new state.

        The surrogate has the batch shape of `distribution`.
        """
        key_draw, key_move = random.split(rng_key)
        index, position = self.pool.draw(key_draw, state)
        state, moved = self.pool.advance(key_move, state, index, distribution, observations)
        position = jax.lax.stop_gradient(position) if self.simultaneous else moved
        return jnp.mean(distribution.unnormalized_log_prob(position), axis=0), state
