"""Contrastive divergence: the gradient of the log-likelihood, with chains as draws of the model."""

from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from numpyro_ebm.distributions import EnergyBased
from numpyro_ebm.energies import check_nonnegative
from numpyro_ebm.estimators.chains import advance, check_pool, is_joint, of_class, over_batch, start
from numpyro_ebm.estimators.information import information
from numpyro_ebm.pool import ChainPool, Observations, PoolState


@dataclass(frozen=True)
class ContrastiveDivergence:
    r"""Estimate the gradient of log Z as the mean over a pool of chains.

    .. math:: \nabla \log Z = E_\nu[\nabla (\log \tau - \beta f)(X)] \approx
        \frac{1}{N} \sum_{i=1}^N \nabla (\log \tau - \beta f)(X_i)

    Exact in expectation where the chains are at their equilibrium. Persistent (PCD) by default,
    CD-k with ``restart_prob=1`` in the pool; the replay buffer of JEM with `reinit_prob`, more chains
    in the pool than are drawn from it, and a kernel ``ula(step_size, temperature)``.

    Parameters
    ----------
    pool
        The chains. By default 512 MALA chains of an adapted step size, which make ten moves per update.
    simultaneous
        Take the gradient at the positions before the move, as paper A's Algorithm 1 does, instead
        of after it. One gradient evaluation less per update; not for energies that depend on a
        latent variable, whose chains must have moved at its present value.
    target
        For p(x|y) of a :class:`~numpyro_ebm.JointEnergy`, what the chains sample: ``"marginal"``,
        p(x), each chain then weighted by the softmax of log p(y|x) over the chains; or
        ``"conditional"``, p(x|y), as many chains for each class as the pool holds. It makes no
        difference elsewhere.
    mutual_information
        Weight of the mutual information of x and its class under the model, which is added to the
        log-likelihood of each observation (paper B, eq. 13). For joint energies, with chains of p(x).
    gap_penalty
        Weight of the squared difference between the mean log-densities of observations and chains, which is taken off the
        log-likelihood of each observation: the usual remedy against training that runs away. It vanishes where the
        model fits.

    Raises
    ------
    TypeError, ValueError
        If `pool` is not a :class:`~numpyro_ebm.ChainPool`, or another argument out of its range.

    Notes
    -----
    Unbiased for chains at equilibrium; with the marginal's chains for p(x|y), consistent: the weights
    leave a bias of the order of one over the number of chains.
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

    pool: ChainPool = field(default_factory=lambda: ChainPool(num_steps=10))
    simultaneous: bool = False
    target: str = "marginal"
    mutual_information: float = 0.0
    gap_penalty: float = 0.0

    def __post_init__(self):
        check_pool(self.pool, self.target)
        check_nonnegative("mutual_information", self.mutual_information)
        check_nonnegative("gap_penalty", self.gap_penalty)

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
            A function of observations, in the place of the log-density: it has its gradients.
        PoolState
            The pool with the chains moved.
        """
        chains, position, state = advance(
            self.pool, self.target, rng_key, state, distribution, observations, self.simultaneous
        )
        bonus = self.mutual_information * information(chains, position) if self.mutual_information else 0.0
        if not is_joint(distribution):
            log_z = jnp.mean(distribution.unnormalized_log_prob(position), axis=0)
        elif self.target == "conditional":
            log_z = of_class(jnp.mean(chains.unnormalized_log_prob(position), axis=0), distribution)
        else:
            # importance weights p(x|y) / p(x): the chains are draws of p(x)
            position = over_batch(position, distribution)
            density = distribution.unnormalized_log_prob(position)
            log_ratio = density - chains.unnormalized_log_prob(position)
            log_z = jnp.sum(jax.lax.stop_gradient(jax.nn.softmax(log_ratio, axis=0)) * density, axis=0)

        def objective(value):
            contrast = distribution.unnormalized_log_prob(value) - log_z
            if not self.gap_penalty:
                return contrast + bonus
            kept = jnp.ones((), bool) if observations.mask is None else observations.mask
            kept = jnp.broadcast_to(kept, contrast.shape)
            gap = jnp.sum(jnp.where(kept, contrast, 0)) / jnp.maximum(jnp.sum(kept), 1)
            return contrast + bonus - self.gap_penalty * gap**2

        return objective, state
