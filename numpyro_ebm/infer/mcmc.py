"""Langevin kernels for any NumPyro model, in NumPyro's `MCMC`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from numpyro.infer.hmc_util import dual_averaging
from numpyro.infer.initialization import init_to_uniform

from numpyro_ebm.energies import check_probability
from numpyro_ebm.infer.langevin import AdaptState, LangevinMCMC
from numpyro_ebm.kernels import Langevin
from numpyro_ebm.kernels.langevin import AdjustedLangevin, select


class _HoldNonFinite(Langevin):
    """Unadjusted moves that stay where they are rather than go where nothing is finite."""

    def step(self, rng_key, state, logdensity_fn):
        moved, info = super().step(rng_key, state, logdensity_fn)
        held = select(~info.is_nonfinite, moved, state)
        return held._replace(num_moves=moved.num_moves), info._replace(is_accepted=~info.is_nonfinite)


class ULA(LangevinMCMC):
    """Unadjusted Langevin sampler as a NumPyro `MCMCKernel`.

    Its stationary law differs from the posterior by O(step_size); for a unit Gaussian its variance is
    ``1 / (1 - step_size / 2)``. Sites on a sphere move along geodesics, bounded sites in their
    unconstrained space. A move to where log-density or gradient is not finite is not made, and
    counted.

    Parameters
    ----------
    model
        NumPyro model; or give `potential_fn`.
    potential_fn
        Potential energy of unconstrained values, as in :class:`numpyro.infer.NUTS`.
    step_size
        Positive number, in the units of ``x + step_size * grad log p + sqrt(2 * step_size) * noise``.
    init_strategy
        As in :class:`numpyro.infer.NUTS`.

    Raises
    ------
    ValueError
        If the step size is not positive, or not exactly one of `model` and `potential_fn` is given.

    Examples
    --------
    >>> import numpyro, numpyro.distributions as dist
    >>> from jax import random
    >>> from numpyro.infer import MCMC
    >>> kernel = ULA(lambda: numpyro.sample("x", dist.Normal(0, 1)), step_size=0.1)
    >>> mcmc = MCMC(kernel, num_warmup=10, num_samples=50, progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> mcmc.get_samples()["x"].shape
    (50,)
    """

    _adapts = False

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        step_size: float = 1e-2,
        init_strategy: Callable = init_to_uniform,
    ):
        super().__init__(model, potential_fn, step_size, init_strategy)

    def _kernel(self, step_size):
        return _HoldNonFinite(step_size, geometry=self._geometry)


class MALA(LangevinMCMC):
    """Metropolis-adjusted Langevin sampler as a NumPyro `MCMCKernel`.

    Sites on a sphere move along geodesics, bounded sites in their unconstrained space. Where all of
    a model stands in a plate, its elements are accepted each on its own. A block of
    :class:`numpyro.infer.Gibbs` as well. ``az.from_numpyro`` finds acceptance rate, lp, step size and
    divergences by itself.

    Parameters
    ----------
    model
        NumPyro model; or give `potential_fn`.
    potential_fn
        Potential energy of unconstrained values, as in :class:`numpyro.infer.NUTS`.
    step_size
        Positive number, in the units of ``x + step_size * grad log p + sqrt(2 * step_size) * noise``;
        the first one, where it adapts.
    adapt_step_size
        Adapt the step size during warm-up, by dual averaging.
    target_accept_prob
        Acceptance that is aimed at; 0.574 is optimal in high dimension.
    init_strategy
        As in :class:`numpyro.infer.NUTS`.

    Raises
    ------
    ValueError
        If a number is out of its range, or not exactly one of `model` and `potential_fn` is given.

    References
    ----------
    Roberts and Rosenthal (1998), Optimal scaling of discrete approximations to Langevin diffusions.

    Examples
    --------
    >>> import numpyro, numpyro_ebm as ebm
    >>> from jax import random
    >>> from numpyro.infer import MCMC
    >>> fitted = ebm.EnergyBased(lambda x: -2 * x[2], ebm.SphereUniform(3))
    >>> kernel = MALA(lambda: numpyro.sample("x", fitted))
    >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=100, num_chains=4, chain_method="vectorized", progress_bar=False)
    >>> mcmc.run(random.key(0))
    >>> mcmc.get_samples()["x"].shape
    (400, 3)
    """

    def __init__(
        self,
        model: Callable | None = None,
        potential_fn: Callable | None = None,
        step_size: float = 0.1,
        adapt_step_size: bool = True,
        target_accept_prob: float = 0.574,
        init_strategy: Callable = init_to_uniform,
    ):
        super().__init__(model, potential_fn, step_size, init_strategy)
        check_probability("target_accept_prob", target_accept_prob)
        if target_accept_prob in (0, 1):
            raise ValueError(f"target_accept_prob must be between 0 and 1, got {target_accept_prob!r}")
        self._adapts = adapt_step_size
        self._target_accept_prob = target_accept_prob

    def _kernel(self, step_size):
        return AdjustedLangevin(step_size, geometry=self._geometry)

    def _adapt(self, i, acceptance_rate, state):
        if not self._adapts:
            return state
        recent = 0.9 * state.recent_acceptance + 0.1 * acceptance_rate
        # an element that is stuck in a tail is lost in the mean: it alone makes the step smaller
        accept_prob = jnp.where(jnp.min(recent) < 0.1, 0, jnp.mean(acceptance_rate))
        averaging = dual_averaging()[1](self._target_accept_prob - accept_prob, state.dual_averaging)
        # the average over warm-up is kept from its last iteration on
        log_step_size = jnp.where(i == self._num_warmup - 1, averaging[1], averaging[0])
        adapted = AdaptState(jnp.exp(log_step_size), averaging, recent)
        return jax.tree.map(lambda new, old: jnp.where(i < self._num_warmup, new, old), adapted, state)
