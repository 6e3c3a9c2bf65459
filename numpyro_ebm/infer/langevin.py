"""What Langevin kernels of NumPyro's `MCMC` share."""

import copy
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers
from numpyro.distributions import Distribution, biject_to
from numpyro.infer.gibbs import GIBBS_SITES_KWARG, prototype_trace, subsample_plate_sizes
from numpyro.infer.hmc_util import dual_averaging
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import initialize_model
from numpyro.util import find_stack_level, identity, is_prng_key, not_jax_tracer

from numpyro_ebm.distributions import Ambient, IntractableNormalizerError, ambient
from numpyro_ebm.energies import check_positive
from numpyro_ebm.handlers import normalizer_dependencies
from numpyro_ebm.infer.elements import independent_elements
from numpyro_ebm.kernels import EUCLIDEAN, SPHERE, LangevinState


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


class LangevinMCMC(MCMCKernel):
    """What :class:`ULA` and :class:`MALA` share."""

    def __init__(self, model, potential_fn, step_size, init_strategy):
        if (model is None) == (potential_fn is None):
            raise ValueError("give either model or potential_fn, and not both")
        if isinstance(model, Distribution):
            raise TypeError(
                'model must be a function: wrap the distribution, as in lambda: numpyro.sample("x", distribution)'
            )
        if not callable(potential_fn if model is None else model):
            raise TypeError(
                f"model must be callable, got {model!r}" if potential_fn is None else "potential_fn must be callable"
            )
        check_positive("step_size", step_size)
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
        self._dynamic_support = False
        self._fixed_plates: dict = {}

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
                state.position,
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
        self._refuse_unknown_normalizers(model_args, model_kwargs)
        model = ambient(self._model)
        trace = prototype_trace(model, rng_key if is_prng_key(rng_key) else rng_key[0], model_args, model_kwargs)
        self._fixed_plates = {name: trace[name]["value"] for name in subsample_plate_sizes(trace)}
        for name in self._fixed_plates:
            warnings.warn(
                f"plate {name!r} is subsampled: {type(self).__name__} samples the posterior of one fixed subsample, "
                "not of all data. Use SVI for minibatches, or give all the data",
                stacklevel=find_stack_level(),
            )
        info = initialize_model(
            rng_key,
            handlers.substitute(model, data=self._fixed_plates) if self._fixed_plates else model,
            init_strategy=self._init_strategy,
            dynamic_args=True,
            model_args=model_args,
            model_kwargs=model_kwargs,
        )
        self._potential_fn_gen, self._postprocess_fn = info.potential_fn, info.postprocess_fn
        latent = {
            name: site
            for name, site in info.model_trace.items()
            if site["type"] == "sample" and not site["is_observed"] and not site["fn"].support.is_discrete
        }
        if not latent:
            raise ValueError(f"{type(self).__name__} needs a continuous latent site, and the model has none")
        self._transforms = {name: biject_to(site["fn"].support) for name, site in latent.items()}
        self._geometry = {n: SPHERE if isinstance(s["fn"], Ambient) else EUCLIDEAN for n, s in latent.items()}
        self._dynamic_support = any(
            not isinstance(bound, int | float)
            for site in latent.values()
            for bound in jax.tree.leaves(site["fn"].support)
        )
        if self._dynamic_support and model_kwargs.get(GIBBS_SITES_KWARG):
            raise ValueError(
                f"the supports of {sorted(latent)} depend on other sites, or have arrays as bounds; Gibbs does not serve "
                "supports that depend on another block: put these sites into one block"
            )
        self._elements = independent_elements(model, info.model_trace, latent, model_args, model_kwargs)
        z = info.param_info.z
        if init_params is not None:
            unknown = sorted(set(init_params) - set(z))
            if unknown:
                raise ValueError(f"init_params names {unknown}, but the continuous latent sites are {sorted(z)}")
            # Gibbs hands over constrained values
            given = {
                name: self._transforms[name].inv(value) if GIBBS_SITES_KWARG in model_kwargs else value
                for name, value in init_params.items()
            }
            z = {name: jnp.asarray(given.get(name, value), value.dtype) for name, value in z.items()}
        return {
            name: z / jnp.linalg.norm(z, axis=-1, keepdims=True) if self._geometry[name] == SPHERE else z
            for name, z in z.items()
        }

    def _refuse_unknown_normalizers(self, model_args, model_kwargs):
        # Gibbs conditions on the other blocks' variables, which are latent all the same
        whole = {name: value for name, value in model_kwargs.items() if name != GIBBS_SITES_KWARG}
        for name, depends in normalizer_dependencies(self._model, model_args, whole).items():
            unknown = sorted(depends.latents - depends.known)
            if unknown:
                raise IntractableNormalizerError(
                    f"site {name!r}: its normaliser depends on latent {unknown} and is unknown, so that samples would be "
                    "silently wrong. Give log Z as EnergyBased(..., log_normalizer=...), as a function of the same "
                    "variables, or train by SVI(numpyro_ebm.estimate(model, ...), guide, ...)"
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
            return self._elements.logdensity_fn(ambient(self._model), model_args, model_kwargs)
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
            accept_prob = jnp.mean(info.acceptance_rate).astype(state.accept_prob.dtype)
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
        if self._dynamic_support:
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
