"""The exchange algorithm: posteriors over an energy's own parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.flatten_util import ravel_pytree
from numpyro.infer.gibbs import GIBBS_SITES_KWARG, prototype_trace, subsample_plate_sizes
from numpyro.infer.hmc_util import welford_covariance
from numpyro.infer.initialization import init_to_median
from numpyro.util import is_prng_key

from numpyro_ebm.distributions import ambient, detached, unwrap
from numpyro_ebm.energies import check_positive, check_size
from numpyro_ebm.handlers import normalizer_dependencies, observed_sites
from numpyro_ebm.infer.model_kernel import ModelKernel
from numpyro_ebm.kernels import SPHERE, mala
from numpyro_ebm.pool import moves_on

_AUXILIARY_TARGET = 0.8  # the optimum of high dimensions lets chains in few of them stick
_LEAST_AUXILIARY = 0.1
_MOST_CORRELATED = 100  # coordinates
_TARGET = 0.3  # acceptance of proposals; optimal between 0.44 in one dimension and 0.234 in many


class ExchangeAdapt(NamedTuple):
    """What warm-up adapts: the scale of proposals, a factor of their covariance, and the auxiliary step sizes.

    Above a hundred coordinates the factor is diagonal, shape ``(d,)``; else triangular, shape ``(d, d)``.
    """

    step_size: jax.Array
    factor: jax.Array
    moments: Any
    auxiliary_step_size: dict


class ExchangeState(NamedTuple):
    """State of :class:`Exchange`.

    Attributes
    ----------
    i
        Iteration, warm-up included.
    z
        Values of the latent sites: on a sphere as they are, elsewhere unconstrained.
    potential_energy
        Minus the joint log-density of `z`, less the normalisers that are unknown.
    accept_prob
        Probability of the last acceptance.
    mean_accept_prob
        Its mean since the start, or since warm-up.
    auxiliary_accept_prob
        Acceptance in the last auxiliary chains; 1 where they are drawn exactly.
    diverging
        Whether auxiliary data or the log-density of the proposal were not finite, or auxiliary chains stood still
        (acceptance below 0.1): with data that have not moved, a proposal is accepted whatever it is worth.
    adapt_state
        :class:`ExchangeAdapt`.
    rng_key
        Key of the next iteration.
    """

    i: jax.Array
    z: Any
    potential_energy: jax.Array
    accept_prob: jax.Array
    mean_accept_prob: jax.Array
    auxiliary_accept_prob: jax.Array
    diverging: jax.Array
    adapt_state: ExchangeAdapt
    rng_key: jax.Array


class Exchange(ModelKernel):
    r"""Sample the posterior of parameters on which the unknown normaliser of an energy-based site depends.

    A proposal z' is accepted with

    .. math::
        \min\Big(1, \frac{\pi(z')\, \tilde p(x | z')\, \tilde p(w | z)}{\pi(z)\, \tilde p(x | z)\, \tilde p(w | z')}\Big),
        \quad w \sim p(\cdot | z'),

    in which both normalisers cancel; w is an auxiliary data set as large as the data. It comes from chains that start at the
    data, `num_auxiliary_steps` moves at z' (double Metropolis-Hastings). In NumPyro's `MCMC`, or as a block of its
    ``Gibbs`` beside ``NUTS`` on latent variables that no unknown normaliser depends on.

    Parameters
    ----------
    model
        NumPyro model with observed :class:`~numpyro_ebm.EnergyBased` sites whose normaliser depends on its latent
        variables, which must be continuous.
    proposal
        Positive number: standard deviation of a Gaussian step of unconstrained values, which warm-up adapts, together
        with its covariance, to an acceptance of 0.3. Or a function ``proposal(rng_key, z)`` that returns
        a new dict of unconstrained values, and is symmetric.
    auxiliary
        Kernel of the auxiliary chains, from :mod:`numpyro_ebm.kernels`; by default MALA, whose step size warm-up adapts, and
        the first half of the moves at each proposal.
        Or a function ``auxiliary(rng_key, distribution, sample_shape)`` that draws exactly.
    num_auxiliary_steps
        Moves of each auxiliary chain.
    adapt
        Adapt during warm-up.
    init_strategy
        As in :class:`numpyro.infer.NUTS`.

    Raises
    ------
    TypeError, ValueError
        If an argument is out of its range. When run: if no observed energy-based site has a normaliser that depends on
        latent variables, a latent one has, there are discrete latent variables, or data are subsampled or scaled.

    Notes
    -----
    Exact where w is. With chains the posterior is biased until `num_auxiliary_steps` are enough: run with twice as many and
    compare. All the data, no subsampling. Costs ``num_auxiliary_steps`` gradients in x for each observation and iteration.

    References
    ----------
    Murray, Ghahramani and MacKay (2006), MCMC for doubly-intractable distributions.
    Liang (2010), A double Metropolis-Hastings sampler for spatial models with intractable normalizing constants.

    Examples
    --------
    >>> import numpyro, numpyro_ebm as ebm, numpyro.distributions as dist
    >>> from jax import random
    >>> from numpyro.infer import MCMC
    >>> def model(x):
    ...     theta = numpyro.sample("theta", dist.Gamma(1, 1))
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x, dist.Uniform(0, 1)), obs=x)
    >>> mcmc = MCMC(Exchange(model), num_warmup=100, num_samples=100, progress_bar=False)
    >>> mcmc.run(random.key(0), random.uniform(random.key(1), (20,)))
    >>> mcmc.get_samples()["theta"].shape
    (100,)
    """

    _uses_gradient = False

    def __init__(
        self,
        model: Callable,
        *,
        proposal: Any = 0.5,
        auxiliary: Any = None,
        num_auxiliary_steps: int = 20,
        adapt: bool = True,
        init_strategy: Callable = init_to_median,
    ):
        super().__init__(model, None, init_strategy)
        if not callable(proposal):
            check_positive("proposal", proposal)
        auxiliary = mala() if auxiliary is None else auxiliary
        if not (hasattr(auxiliary, "step") or callable(auxiliary)):
            raise TypeError(
                f"auxiliary must be a kernel, such as numpyro_ebm.kernels.mala(), or a sampler, got {auxiliary!r}"
            )
        check_size("num_auxiliary_steps", num_auxiliary_steps)
        self._proposal = proposal
        self._auxiliary = auxiliary
        self._num_auxiliary_steps = num_auxiliary_steps
        self._adapts = adapt
        self._names: tuple[str, ...] = ()

    @property
    def default_fields(self):
        fields = ("z", "potential_energy", "accept_prob", "auxiliary_accept_prob", "diverging")
        return fields if callable(self._proposal) else (*fields, "adapt_state.step_size")

    def get_diagnostics_str(self, state):
        return f"acc. prob={state.mean_accept_prob:.2f}. auxiliary acc. prob={state.auxiliary_accept_prob:.2f}"

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        """Return the first state, or a batch of states for a batch of keys."""
        self._num_warmup = num_warmup
        model_kwargs = {} if model_kwargs is None else model_kwargs
        vectorized = not is_prng_key(rng_key)
        keys = jax.vmap(random.split, out_axes=1)(rng_key) if vectorized else random.split(rng_key)
        rng_key, key_model = keys[0], keys[1]
        self._inspect(rng_key[0] if vectorized else rng_key, model_args, model_kwargs)
        init_params = self._init_model(key_model, init_params, model_args, model_kwargs)

        def start(rng_key, z):
            potential = -self._logdensity_fn(model_args, model_kwargs)(z)
            flat, _ = ravel_pytree(z)
            is_diagonal = flat.size > _MOST_CORRELATED
            zero = jnp.zeros((), potential.dtype)
            kernel_step = getattr(self._auxiliary, "step_size", None)
            adapt_state = ExchangeAdapt(
                zero + (1.0 if callable(self._proposal) else self._proposal),
                jnp.ones_like(flat) if is_diagonal else jnp.eye(flat.size, dtype=flat.dtype),
                welford_covariance(diagonal=is_diagonal)[0](flat.size),
                {
                    name: zero + (0.1 if kernel_step is None or callable(kernel_step) else kernel_step)
                    for name in self._names
                },
            )
            count = jnp.zeros((), jnp.int32)
            return ExchangeState(count, z, potential, zero, zero, zero, jnp.array(False), adapt_state, rng_key)

        state = jax.vmap(start)(rng_key, init_params) if vectorized else start(rng_key, init_params)
        if not isinstance(state.potential_energy, jax.core.Tracer) and not np.all(np.isfinite(state.potential_energy)):
            raise ValueError(
                f"a chain can't start: its log-density is not finite (potential energies {np.asarray(state.potential_energy)}). Start "
                "elsewhere by init_params or init_strategy"
            )
        return state

    def _refuse_unknown_normalizers(self, model_args, model_kwargs):
        """These are what it is for; :meth:`_inspect` refuses what it can't serve."""

    def _inspect(self, rng_key, model_args, model_kwargs):
        """Find the sites whose unknown normaliser depends on latent variables; refuse what the algorithm can't serve."""
        whole = {name: value for name, value in model_kwargs.items() if name != GIBBS_SITES_KWARG}
        depends = normalizer_dependencies(self._model, model_args, whole)
        self._names = tuple(name for name, found in depends.items() if found.latents - found.known)
        trace = prototype_trace(ambient(self._model), rng_key, model_args, model_kwargs)
        if not self._names:
            raise ValueError(
                f"Exchange: no normaliser of the energy-based sites {sorted(depends)} depends on a latent variable: use NUTS or MALA"
            )
        latent = {n: s for n, s in trace.items() if s["type"] == "sample" and not s["is_observed"]}
        hidden = [name for name in self._names if name not in latent and unwrap(trace[name]["fn"]) is None]
        if hidden:
            raise ValueError(
                f"Exchange: the energies of sites {hidden} stand below a transform or in a mixture: observe them directly"
            )
        faults = [name for name in self._names if name in latent]
        if faults:
            raise ValueError(
                f"Exchange is for observed sites, but {faults} are latent and their unknown normaliser depends on a latent variable"
            )
        discrete = [name for name, site in latent.items() if site["fn"].support.is_discrete]
        if discrete:
            raise ValueError(f"Exchange: the latent sites {discrete} are discrete: give them a block of Gibbs")
        if subsample_plate_sizes(trace):
            raise ValueError(
                f"Exchange needs all the data, but plates {sorted(subsample_plate_sizes(trace))} are subsampled"
            )
        scaled = [
            name
            for name in self._names
            if trace[name]["scale"] is not None and np.any(np.asarray(trace[name]["scale"]) != 1)
        ]
        if scaled:
            raise ValueError(f"Exchange: the sites {scaled} are scaled, and data sets of a fraction can't be drawn")

    def _sites(self, z, model_args, model_kwargs):
        """The energy-based sites of the model at z."""
        values = self.get_constrain_fn(model_args, model_kwargs)(z)
        return observed_sites(self._model, values, model_args, model_kwargs)

    def _propose(self, rng_key, z, adapt_state):
        if callable(self._proposal):
            return self._proposal(rng_key, z)
        flat, unravel = ravel_pytree(z)
        noise, factor = random.normal(rng_key, flat.shape, flat.dtype), adapt_state.factor
        moved = unravel(flat + adapt_state.step_size * (factor * noise if factor.ndim == 1 else factor @ noise))
        return {
            name: value / jnp.linalg.norm(value, axis=-1, keepdims=True) if self._geometry[name] == SPHERE else value
            for name, value in moved.items()
        }

    def _draw(self, rng_key, site, step_size):
        """Auxiliary data at a site, and the acceptance of the chains that they come from."""
        if not hasattr(self._auxiliary, "step"):
            own = site.distribution.batch_shape + site.distribution.event_shape
            drawn = self._auxiliary(rng_key, site.distribution, site.value.shape[: site.value.ndim - len(own)])
            return jnp.broadcast_to(drawn, site.value.shape), jnp.ones(())
        logdensity_fn = detached(site.distribution, site.value)
        num, adapts = self._num_auxiliary_steps, self._auxiliary.step_size is None

        def move(carry, inputs):
            state, step_size = carry
            i, key = inputs
            state, info = moves_on(site.distribution, self._auxiliary, step_size).step(key, state, logdensity_fn)
            rate = info.acceptance_rate
            if adapts:  # each element to the proposal, in the first half of the moves: elsewhere another step is right
                change = jnp.where(i < num // 2, jnp.exp(rate - _AUXILIARY_TARGET), 1).astype(step_size.dtype)
                step_size *= jnp.reshape(change, step_size.shape)
            rate = jnp.mean(rate) if site.mask is None else jnp.sum(rate * site.mask) / jnp.sum(site.mask)
            return (state, step_size), rate

        value = site.value
        if site.mask is not None:
            hidden = jnp.reshape(~site.mask, site.mask.shape + (1,) * site.distribution.event_dim)
            value = jnp.where(hidden, site.distribution.support.feasible_like(value), value)
        event_dim = site.distribution.event_dim
        step_size = jnp.full(value.shape[: value.ndim - event_dim] + (1,) * event_dim, step_size)
        state = moves_on(site.distribution, self._auxiliary, step_size).init(value, logdensity_fn)
        (state, _), rates = lax.scan(move, (state, step_size), (jnp.arange(num), random.split(rng_key, num)))
        return state.position, jnp.mean(rates[num // 2 :])

    def sample(self, state, model_args, model_kwargs):
        """Propose once."""
        model_kwargs = {} if model_kwargs is None else model_kwargs

        def step(state):
            rng_key, key_propose, key_draw, key_accept = random.split(state.rng_key, 4)
            adapt_state = state.adapt_state
            z = self._propose(key_propose, state.z, adapt_state)
            potential = -self._logdensity_fn(model_args, model_kwargs)(z)
            here, there = (self._sites(point, model_args, model_kwargs) for point in (state.z, z))
            log_ratio, rates = state.potential_energy - potential, {}
            is_finite = jnp.isfinite(potential)
            for key, name in zip(random.split(key_draw, len(self._names)), self._names, strict=True):
                drawn, rates[name] = self._draw(key, there[name], adapt_state.auxiliary_step_size[name])
                old, new = (sites[name].distribution.unnormalized_log_prob(drawn) for sites in (here, there))
                mask = True if here[name].mask is None else here[name].mask
                log_ratio += jnp.sum(jnp.where(mask, old - new, 0))
            is_finite &= jnp.isfinite(log_ratio)
            accept_prob = jnp.where(is_finite, jnp.exp(jnp.minimum(log_ratio, 0)), 0).astype(state.accept_prob.dtype)
            is_accepted = random.uniform(key_accept) < accept_prob
            z, potential = jax.tree.map(
                lambda new, old: jnp.where(is_accepted, new, old), (z, potential), (state.z, state.potential_energy)
            )
            i = state.i + 1
            n = jnp.where(i <= self._num_warmup, i, i - self._num_warmup)
            rate = jnp.mean(jnp.stack(list(rates.values()))).astype(state.accept_prob.dtype)
            return ExchangeState(
                i,
                z,
                potential,
                accept_prob,
                state.mean_accept_prob + (accept_prob - state.mean_accept_prob) / n,
                rate,
                ~is_finite | (rate < _LEAST_AUXILIARY),
                self._adapt(state.i, z, accept_prob, rates, adapt_state),
                rng_key,
            )

        return step(state) if is_prng_key(state.rng_key) else jax.vmap(step)(state)

    def _adapt(self, i, z, accept_prob, rates, state):
        """The covariance of the second and of the third quarter of warm-up; scales by Robbins and Monro all the way."""
        if not self._adapts:
            return state
        flat, _ = ravel_pytree(z)
        is_diagonal = state.factor.ndim == 1
        begin, update, final = welford_covariance(diagonal=is_diagonal)
        quarter = max(self._num_warmup // 4, 1)
        switches = ((i == 2 * quarter) | (i == 3 * quarter)) & (state.moments[2] > 2 * flat.size)
        covariance = self._symmetric(final(state.moments, regularize=True)[0], z)
        factor = jnp.sqrt(covariance) if is_diagonal else jnp.linalg.cholesky(covariance)
        factor = jnp.where(switches, factor, state.factor)
        moments = jax.tree.map(lambda new, old: jnp.where(switches, new, old), begin(flat.size), state.moments)
        collects = (i >= quarter) & (i < 3 * quarter)
        moments = jax.tree.map(lambda new, old: jnp.where(collects, new, old), update(flat, moments), moments)
        gain = (i - quarter * jnp.minimum(i // quarter, 3) + 1.0) ** -0.6
        step_size = state.step_size * jnp.exp(gain * (accept_prob - _TARGET))
        step_size = jnp.where(switches, 2.38 / flat.size**0.5, step_size)
        auxiliary = state.auxiliary_step_size
        if hasattr(self._auxiliary, "step") and self._auxiliary.step_size is None:
            gain = (i + 1.0) ** -0.6
            auxiliary = {n: step * jnp.exp(gain * (rates[n] - _AUXILIARY_TARGET)) for n, step in auxiliary.items()}
        adapted = ExchangeAdapt(step_size, factor, moments, auxiliary)
        return jax.tree.map(
            lambda new, old: jnp.where(i < self._num_warmup, new, old).astype(old.dtype), adapted, state
        )

    def _symmetric(self, covariance, z):
        """A covariance that is one number for a site on a sphere: there only such steps are as likely there as back."""
        numbers = {name: i if self._geometry[name] == SPHERE else -1 for i, name in enumerate(z)}
        site, _ = ravel_pytree({name: jnp.full(jnp.shape(value), numbers[name]) for name, value in z.items()})
        variance = covariance if covariance.ndim == 1 else jnp.diagonal(covariance)
        for number in numbers.values():
            if number >= 0:
                mean = jnp.sum(jnp.where(site == number, variance, 0)) / jnp.sum(site == number)
                variance = jnp.where(site == number, mean, variance)
        if covariance.ndim == 1:
            return variance
        is_free = (site[:, None] < 0) & (site[None, :] < 0)
        return jnp.where(is_free, covariance, jnp.diag(variance))

    def refresh(self, state, model_args, model_kwargs):
        """Recompute the log-density of `state.z` for new arguments."""
        return state._replace(potential_energy=-self._logdensity_fn(model_args, model_kwargs)(state.z))
