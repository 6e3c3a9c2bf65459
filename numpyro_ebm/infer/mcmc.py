"""Langevin kernels for any NumPyro model, in NumPyro's `MCMC`."""

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from numpyro.distributions import biject_to, constraints
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.infer.hmc_util import dual_averaging
from numpyro.infer.initialization import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import compute_log_probs, initialize_model
from numpyro.primitives import Messenger
from numpyro.util import find_stack_level, identity, is_prng_key, not_jax_tracer

from numpyro_ebm.distributions import IntractableNormalizerError, is_sphere
from numpyro_ebm.handlers import normalizer_dependencies
from numpyro_ebm.kernels import EUCLIDEAN, SPHERE, Langevin, LangevinState
from numpyro_ebm.kernels.langevin import AdjustedLangevin


class AdaptState(NamedTuple):
    """Step size; the state of its adaptation and each element's recent acceptance (None where it is fixed)."""

    step_size: jax.Array
    dual_averaging: Any
    recent_acceptance: Any


class LangevinMCMCState(NamedTuple):
    """State of :class:`ULA` and :class:`MALA`.

    Attributes
    ----------
    i
        Iteration, warm-up included.
    z
        Values of the latent sites: on a sphere as they are, elsewhere unconstrained.
    potential_energy
        Minus the log-density of `z`.
    logdensity, z_grad
        Log-density of `z`, per element where elements are accepted on their own, and its gradient.
    accept_prob
        Probability of the last acceptance; the mean over elements.
    mean_accept_prob
        Its mean since the start, or since warm-up.
    diverging
        Whether a proposal was not finite, or had an energy error over 1000.
    num_nonfinite
        Proposals that were not finite, in this iteration.
    adapt_state
        :class:`AdaptState`, with the step size.
    rng_key
        Key of the next iteration.
    """

    i: jax.Array
    z: Any
    potential_energy: jax.Array
    logdensity: jax.Array
    z_grad: Any
    accept_prob: jax.Array
    mean_accept_prob: jax.Array
    diverging: jax.Array
    num_nonfinite: jax.Array
    adapt_state: AdaptState
    rng_key: jax.Array


class _Ambient(dist.Distribution):
    """A distribution on a sphere, as one on the space around it: geodesic moves stay on the sphere."""

    arg_constraints: dict = {}
    pytree_data_fields = ("fn",)

    def __init__(self, fn):
        self.fn = fn
        super().__init__(fn.batch_shape, fn.event_shape)

    @property
    def support(self):
        return constraints.independent(constraints.real_vector, self.event_dim - 1)

    def sample(self, key, sample_shape=()):
        return self.fn.sample(key, sample_shape)

    def log_prob(self, value):
        return self.fn.log_prob(value / jnp.linalg.norm(value, axis=-1, keepdims=True))


class _ambient(Messenger):
    def process_message(self, msg):
        if msg["type"] == "sample" and not msg["is_observed"] and _on_sphere(msg["fn"].support):
            msg["fn"] = _Ambient(msg["fn"])


def _on_sphere(support):
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return is_sphere(support)


class _LangevinMCMC(MCMCKernel):
    """What :class:`ULA` and :class:`MALA` share."""

    def __init__(self, model, potential_fn, step_size, init_strategy):
        if (model is None) == (potential_fn is None):
            raise ValueError("give either model or potential_fn, and not both")
        if not (np.isfinite(step_size) and step_size > 0):
            raise ValueError(f"step_size must be positive and finite, got {step_size!r}")
        self._model = model
        self._potential_fn = potential_fn
        self._step_size = step_size
        self._init_strategy = init_strategy
        self._num_warmup = 0
        self._reset()

    def _reset(self):
        self._potential_fn_gen = None
        self._postprocess_fn = None
        self._transforms: dict = {}
        self._geometry: Any = EUCLIDEAN
        self._elements = None

    @property
    def model(self):
        return self._model

    @property
    def sample_field(self):
        return "z"

    @property
    def default_fields(self):
        return ("z", "potential_energy", "accept_prob", "diverging", "num_nonfinite", "adapt_state.step_size")

    def get_diagnostics_str(self, state):
        return f"step size {state.adapt_state.step_size:.2e}. acc. prob={state.mean_accept_prob:.2f}"

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        """Return the first state, or a batch of states for a batch of keys.

        Raises
        ------
        ValueError
            If `init_params` are missing where there is no model, or density or gradient are not
            finite there.
        IntractableNormalizerError
            If the model has an energy-based site whose normaliser depends on a latent variable.
        """
        self._num_warmup = num_warmup
        model_kwargs = {} if model_kwargs is None else model_kwargs
        vectorized = not is_prng_key(rng_key)
        keys = jax.vmap(random.split, out_axes=1)(rng_key) if vectorized else random.split(rng_key)
        rng_key, key_model = keys[0], keys[1]
        if self._model is not None:
            init_params = self._init_model(key_model, init_params, model_args, model_kwargs)
        elif init_params is None:
            raise ValueError("init_params are needed with potential_fn")
        else:
            self._geometry = jax.tree.map(lambda _: EUCLIDEAN, init_params)

        def start(rng_key, z):
            state = self._kernel(self._step_size).init(z, self._logdensity_fn(model_args, model_kwargs))
            dtype = state.logdensity.dtype
            step_size = jnp.asarray(self._step_size, dtype)
            adapt_state = AdaptState(step_size, None, None)
            if self._adapts:
                averaging = dual_averaging()[0](jnp.log(10 * step_size))
                adapt_state = AdaptState(step_size, averaging, jnp.ones_like(state.logdensity))
            zero = jnp.zeros((), dtype)
            return LangevinMCMCState(
                jnp.zeros((), jnp.int32),
                z,
                -jnp.sum(state.logdensity),
                state.logdensity,
                state.logdensity_grad,
                zero,
                zero,
                jnp.array(False),
                jnp.zeros((), jnp.int32),
                adapt_state,
                rng_key,
            )

        state = jax.vmap(start)(rng_key, init_params) if vectorized else start(rng_key, init_params)
        self._check_start(state, vectorized)
        return state

    def _init_model(self, rng_key, init_params, model_args, model_kwargs):
        model = _ambient(self._model)
        info = initialize_model(
            rng_key,
            model,
            init_strategy=self._init_strategy,
            dynamic_args=True,
            model_args=model_args,
            model_kwargs=model_kwargs,
        )
        self._potential_fn_gen, self._postprocess_fn = info.potential_fn, info.postprocess_fn
        trace = info.model_trace
        latent = {
            name: site
            for name, site in trace.items()
            if site["type"] == "sample" and not site["is_observed"] and not site["fn"].support.is_discrete
        }
        self._check_model(trace, model_args, model_kwargs)
        self._transforms = {name: biject_to(site["fn"].support) for name, site in latent.items()}
        self._geometry = {n: SPHERE if isinstance(s["fn"], _Ambient) else EUCLIDEAN for n, s in latent.items()}
        self._elements = _independent_elements(trace, latent)
        z = info.param_info.z
        if init_params is not None:
            # Gibbs hands over constrained values
            given = {
                name: self._transforms[name].inv(value) if GIBBS_SITES_KWARG in model_kwargs else value
                for name, value in init_params.items()
            }
            z = {name: given.get(name, value) for name, value in z.items()}
        return {
            name: z / jnp.linalg.norm(z, axis=-1, keepdims=True) if self._geometry[name] is SPHERE else z
            for name, z in z.items()
        }

    def _check_model(self, trace, model_args, model_kwargs):
        params = {name for name, site in trace.items() if site["type"] == "param"}
        for name, (depends, known) in normalizer_dependencies(self._model, model_args, model_kwargs).items():
            if depends - known - params:
                raise IntractableNormalizerError(
                    f"site {name!r}: its normaliser depends on latent {sorted(depends - known - params)} and is unknown, so that "
                    "samples would be silently wrong. Give log Z as EnergyBased(..., log_normalizer=...), as a function of "
                    "the same variables, or train by SVI(numpyro_ebm.estimate(model, ...), guide, ...)"
                )
        for name, site in trace.items():
            if site["type"] == "plate" and site["args"][1] is not None and site["args"][1] < site["args"][0]:
                warnings.warn(
                    f"plate {name!r} is subsampled: {type(self).__name__} samples the posterior of one fixed subsample, "
                    "not of all data. Use SVI for minibatches, or give all the data",
                    stacklevel=find_stack_level(),
                )

    def _check_start(self, state, vectorized):
        if not not_jax_tracer(state.potential_energy):
            return
        energies = np.atleast_1d(np.asarray(state.potential_energy))
        count = len(energies)
        gradients = [np.asarray(g).reshape(count, -1) for g in jax.tree.leaves(state.z_grad) if np.size(g)]
        for chain in range(count):
            finite = np.isfinite(energies[chain]), all(np.isfinite(g[chain]).all() for g in gradients)
            if not all(finite):
                z = jax.tree.map(lambda z, c=chain: np.asarray(z)[c] if vectorized else np.asarray(z), state.z)
                what = "gradient" if finite[0] else "log-density"
                raise ValueError(
                    f"chain {chain if vectorized else ''}{' ' if vectorized else ''}can't start: its {what} is not finite at "
                    f"{z} (potential energy {energies[chain]:.6g}). Start elsewhere by init_params or init_strategy"
                )

    def _logdensity_fn(self, model_args, model_kwargs):
        model_kwargs = {} if model_kwargs is None else model_kwargs
        if self._elements is not None:
            return self._elements.logdensity_fn(_ambient(self._model), model_args, model_kwargs, self._transforms)
        gen = self._potential_fn_gen
        potential_fn = self._potential_fn if gen is None else gen(*model_args, **model_kwargs)
        return lambda z: -potential_fn(z)

    def sample(self, state, model_args, model_kwargs):
        """Move once."""

        def step(state):
            rng_key, key_step = random.split(state.rng_key)
            chain = LangevinState(state.z, state.logdensity, state.z_grad, state.i)
            kernel = self._kernel(state.adapt_state.step_size)
            chain, info = kernel.step(key_step, chain, self._logdensity_fn(model_args, model_kwargs))
            accept_prob = jnp.mean(info.acceptance_rate)
            i = state.i + 1
            n = jnp.where(i <= self._num_warmup, i, i - self._num_warmup)
            return LangevinMCMCState(
                i,
                chain.position,
                -jnp.sum(chain.logdensity),
                chain.logdensity,
                chain.logdensity_grad,
                accept_prob,
                state.mean_accept_prob + (accept_prob - state.mean_accept_prob) / n,
                jnp.any(info.is_divergent),
                jnp.sum(info.is_nonfinite, dtype=jnp.int32),
                self._adapt(state.i, info.acceptance_rate, state.adapt_state),
                rng_key,
            )

        return step(state) if is_prng_key(state.rng_key) else jax.vmap(step)(state)

    def _adapt(self, i, acceptance_rate, state):
        return state

    def postprocess_fn(self, args, kwargs):
        return identity if self._postprocess_fn is None else self._postprocess_fn(*args, **kwargs)

    def get_constrain_fn(self, model_args, model_kwargs):
        """Return the map from `z` to values in the supports."""
        if self._elements is None:
            return self.postprocess_fn(model_args, {} if model_kwargs is None else model_kwargs)
        return lambda z: {name: self._transforms[name](value) for name, value in z.items()}

    def refresh(self, state, model_args, model_kwargs):
        """Recompute log-density and gradient of `state.z` for new arguments."""
        chain = self._kernel(self._step_size).init(state.z, self._logdensity_fn(model_args, model_kwargs))
        return state._replace(
            potential_energy=-jnp.sum(chain.logdensity), logdensity=chain.logdensity, z_grad=chain.logdensity_grad
        )

    def wrap_model(self, wrapper):
        """Return a copy of this kernel for `wrapper(model)`."""
        if self._model is None:
            raise ValueError("wrap_model needs a kernel that was given a model, not a potential_fn")
        kernel = copy.copy(self)
        kernel._model = wrapper(self._model)
        kernel._reset()
        return kernel

    def __getstate__(self):
        state = self.__dict__.copy()
        return state | {"_potential_fn_gen": None, "_postprocess_fn": None}


class _HoldNonFinite(Langevin):
    """Unadjusted moves that stay where they are rather than go where nothing is finite."""

    def step(self, rng_key, state, logdensity_fn):
        moved, info = super().step(rng_key, state, logdensity_fn)
        held = jax.tree.map(
            lambda new, old: jnp.where(
                jnp.reshape(info.is_nonfinite, info.is_nonfinite.shape + (1,) * (jnp.ndim(new) - info.is_nonfinite.ndim)),
                old,
                new,
            ),
            moved._replace(num_moves=0),
            state._replace(num_moves=0),
        )
        return held._replace(num_moves=moved.num_moves), info._replace(is_accepted=~info.is_nonfinite)


class ULA(_LangevinMCMC):
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


class MALA(_LangevinMCMC):
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
        if not 0 < target_accept_prob < 1:
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


class _Elements:
    """The log-density of a model all of which stands in plates, per element of these."""

    def __init__(self, dims, params):
        self.dims = dims
        self.params = params

    def logdensity_fn(self, model, model_args, model_kwargs, transforms):
        def logdensity(z):
            values = {name: transforms[name](value) for name, value in z.items()}
            seeded = handlers.seed(model, 0)
            log_probs, _ = compute_log_probs(
                seeded, model_args, model_kwargs, {**self.params, **values}, sum_log_prob=False
            )
            total = sum(self._reduce(log_prob) for log_prob in log_probs.values())
            for name, value in z.items():
                total = total + self._reduce(
                    transforms[name].log_abs_det_jacobian(value, values[name]), log_probs[name].ndim
                )
            return total

        return logdensity

    def _reduce(self, log_prob, batch_ndim=None):
        batch_ndim = log_prob.ndim if batch_ndim is None else batch_ndim
        log_prob = jnp.sum(log_prob, axis=tuple(range(batch_ndim, log_prob.ndim)))
        others = [d for d in range(-log_prob.ndim, 0) if d not in self.dims]
        return jnp.sum(log_prob, axis=tuple(others))


def _independent_elements(trace, latent):
    """Plates that hold every sample site of a model, if these are the leftmost dimensions of all."""
    sites = [site for site in trace.values() if site["type"] == "sample"]
    if not latent or any(site["fn"].support.is_discrete and not site["is_observed"] for site in sites):
        return None
    common = set.intersection(*({f for f in site["cond_indep_stack"]} for site in sites))
    dims = sorted(frame.dim for frame in common)
    if not dims:
        return None
    for name, site in latent.items():
        ndim = len(site["fn"].batch_shape)
        if dims != list(range(-ndim, -ndim + len(dims))):
            return None
        bounds = jax.tree.leaves(site["fn"].support)
        if any(not isinstance(bound, int | float) for bound in bounds):
            return None  # a support that may depend on another site
    for site in sites:
        shape = site["fn"].batch_shape
        if any(len(shape) < -f.dim or shape[f.dim] != f.size for f in common):
            return None
    params = {name: site["value"] for name, site in trace.items() if site["type"] in ("param", "mutable", "plate")}
    return _Elements(dims, params)
