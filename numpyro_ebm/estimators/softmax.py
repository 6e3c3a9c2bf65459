"""The stabilised contrastive estimator: a softmax over chains and the minibatch."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy.special import logsumexp

from numpyro_ebm.distributions import EnergyBased, guard
from numpyro_ebm.energies import check_nonnegative
from numpyro_ebm.estimators.chains import (
    advance,
    check_pool,
    is_joint,
    of_class,
    over_batch,
    start,
)
from numpyro_ebm.estimators.information import information
from numpyro_ebm.pool import ChainPool, Observations, PoolState


@dataclass(frozen=True)
class SoftmaxContrastive:
    r"""Estimate the gradient of log Z by a softmax over chains and observations (paper B, eqs. 19 and 20).

    .. math:: \nabla \log Z \approx \nabla \log \sum_{c \in C} e^{-\beta f(x_c)}

    The candidates C are the chains and, as `positives` says, observations, the one that the gradient
    is for among them. Chains far from the data have next to no weight, and where they all are far
    the gradient vanishes instead of blowing up: training does not run away.

    Parameters
    ----------
    pool
        The chains. By default 512 MALA chains of an adapted step size, which make ten moves per update.
    target
        For p(x|y) of a :class:`~numpyro_ebm.JointEnergy`, what the chains sample: ``"marginal"``,
        p(x), or ``"conditional"``, p(x|y), as many chains for each class as the pool holds.
    positives
        Which observations join the chains in the denominator: ``"batch"``, all; ``"class"``, those of
        the same class (of joint energies); ``"own"``, the one itself; None, none.
    weighting
        ``"softmax"``, as above, or ``"uniform"``: each candidate counts the same, which with
        ``positives=None`` is contrastive divergence.
    mutual_information
        As in :class:`~numpyro_ebm.ContrastiveDivergence`.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of its range; at a site, if ``positives="class"`` has no classes, or
        the base is learned (the candidates stand for draws of it).

    Notes
    -----
    Biased: with chains at equilibrium its gradient is that of :math:`\log E_q[e^{-\beta f}]`, where q
    is the mixture of chains and observations, not the base; the model's likely points are pushed
    down more than in proportion. The objective depends on the number of candidates, and so on the
    size of the minibatch. It serves point estimates of parameters: an energy that depends on a
    latent variable gets the posterior of another likelihood. Masked rows are no candidates.

    References
    ----------
    Sustek et al. (2023), Stabilized training of joint energy-based models and their practical applications, arXiv:2303.04187.

    Examples
    --------
    >>> from numpyro_ebm import ChainPool, kernels
    >>> pool = ChainPool(kernels.ula(1e-2), pool_size=1_000, num_chains=64, num_steps=20, reinit_prob=0.05)
    >>> estimator = SoftmaxContrastive(pool)
    """

    pool: ChainPool = field(default_factory=lambda: ChainPool(num_steps=10))
    target: str = "marginal"
    positives: str | None = "batch"
    weighting: str = "softmax"
    mutual_information: float = 0.0

    def __post_init__(self):
        check_pool(self.pool, self.target)
        if self.positives not in ("batch", "class", "own", None):
            raise ValueError(f"positives must be 'batch', 'class', 'own' or None, got {self.positives!r}")
        if self.weighting not in ("softmax", "uniform"):
            raise ValueError(f"weighting must be 'softmax' or 'uniform', got {self.weighting!r}")
        check_nonnegative("mutual_information", self.mutual_information)

    def init(self, rng_key: jax.Array, distribution: EnergyBased, observations: Observations) -> PoolState:
        """Return the state before the first update: the pool's starting positions."""
        return start(self.pool, self.target, rng_key, distribution, observations)

    def update(
        self, rng_key: jax.Array, state: PoolState, distribution: EnergyBased, observations: Observations
    ) -> tuple[Callable, PoolState]:
        """Advance the chains.

        Returns
        -------
        Callable
            A function of observations, in the place of the log-density.
        PoolState
            The pool with the chains moved.

        Raises
        ------
        ValueError
            If ``positives="class"`` at a site that is not p(x|y) of a joint energy.
        """
        if self.positives == "class" and not is_joint(distribution):
            raise ValueError("SoftmaxContrastive(positives='class') is for sites of JointEnergy.conditional(y)")
        chains, position, state = advance(self.pool, self.target, rng_key, state, distribution, observations)
        if not is_joint(distribution):
            negative = self._measure(distribution, position)
        elif self.target == "conditional":
            negative = of_class(self._measure(chains, position), distribution)
        else:
            negative = self._measure(distribution, over_batch(position, distribution))
        bonus = self.mutual_information * information(chains, position) if self.mutual_information else 0.0

        def objective(value):
            # no candidate moves: in x the gradient is that of the density itself
            positives = self._positives(distribution, lax.stop_gradient(value), observations.mask)
            return distribution.unnormalized_log_prob(value) - self._log_z(negative, positives) + bonus

        return objective, state

    def _measure(self, distribution, x):
        """What the candidates' weights are the softmax of; or, for uniform weights, the mean of."""
        if self.weighting == "uniform":
            return distribution.unnormalized_log_prob(x)
        leaves = jax.tree.leaves(distribution.base)
        leaves = [leaf for leaf in leaves if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)]
        error = ValueError(
            "SoftmaxContrastive needs a fixed base, since its candidates stand for draws of it: learn the energy alone, or use "
            "ContrastiveDivergence"
        )
        guard(leaves, error)
        return -distribution.inverse_temperature * distribution.energy(x)

    def _positives(self, distribution, value, mask):
        """Measures of the observations among the candidates, ``(n, *batch)``, and which of them count."""
        batch_shape = value.shape[: value.ndim - distribution.event_dim]
        if self.positives is None:
            return None
        if self.positives == "own":
            return self._measure(distribution, value)[None], jnp.ones((1, *batch_shape), bool)
        if mask is not None:
            hidden = jnp.reshape(~mask, mask.shape + (1,) * distribution.event_dim)
            value = jnp.where(hidden, distribution.support.feasible_like(value), value)
        batch_shape = jnp.broadcast_shapes(batch_shape, distribution.batch_shape)
        rows = jnp.broadcast_to(value, batch_shape + distribution.event_shape)
        rows = jnp.reshape(rows, (-1, *distribution.event_shape))
        measure = self._measure(distribution, over_batch(rows, distribution))
        kept = jnp.ones(rows.shape[:1], bool) if mask is None else jnp.ravel(mask)
        kept = jnp.broadcast_to(jnp.reshape(kept, kept.shape + (1,) * (measure.ndim - 1)), measure.shape)
        if self.positives == "class":
            labels = jnp.asarray(distribution.energy.labels)
            own = jnp.ravel(jnp.broadcast_to(labels, batch_shape))
            kept &= jnp.reshape(own, own.shape + (1,) * labels.ndim) == labels
        return measure, kept

    def _log_z(self, negative, positives):
        """The mean over candidates, or the logarithm of that of exponentials."""
        kept = jnp.ones_like(negative, bool)
        if positives is not None:
            shape = jnp.broadcast_shapes(negative.shape[1:], positives[0].shape[1:])
            parts = (negative, kept), positives
            negative, kept = (jnp.concatenate([_over_rows(part[i], shape) for part in parts]) for i in (0, 1))
        num = jnp.sum(kept, axis=0)
        if self.weighting == "uniform":
            return jnp.sum(jnp.where(kept, negative, 0), axis=0) / num
        return logsumexp(jnp.where(kept, negative, -jnp.inf), axis=0) - jnp.log(num)


def _over_rows(values, shape):
    """Values ``(n, ...)`` broadcast to ``(n, *shape)``."""
    num, *own = values.shape
    return jnp.broadcast_to(jnp.reshape(values, (num, *[1] * (len(shape) - len(own)), *own)), (num, *shape))
