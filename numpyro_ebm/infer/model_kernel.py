"""What kernels of NumPyro's `MCMC` share that are made from a model."""

import copy
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from numpyro import handlers
from numpyro.distributions import Distribution, biject_to
from numpyro.infer.gibbs import GIBBS_SITES_KWARG, prototype_trace, subsample_plate_sizes
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import initialize_model
from numpyro.util import find_stack_level, identity, is_prng_key

from numpyro_ebm.distributions import Ambient, IntractableNormalizerError, ambient
from numpyro_ebm.handlers import normalizer_dependencies
from numpyro_ebm.infer.elements import independent_elements
from numpyro_ebm.kernels import EUCLIDEAN, SPHERE


class ModelKernel(MCMCKernel):
    """A kernel of a model, or of a potential: latent sites unconstrained, those on a sphere as they are."""

    _uses_gradient = True

    def __init__(self, model, potential_fn, init_strategy):
        if (model is None) == (potential_fn is None):
            raise ValueError(
                f"give either model or potential_fn, and not both, got model={model!r} and potential_fn={potential_fn!r}"
            )
        if isinstance(model, Distribution):
            raise TypeError(
                'model must be a function: wrap the distribution, as in lambda: numpyro.sample("x", distribution)'
            )
        if not callable(potential_fn if model is None else model):
            name, given = ("model", model) if potential_fn is None else ("potential_fn", potential_fn)
            raise TypeError(f"{name} must be callable, got {given!r}")
        self._model = model
        self._potential_fn = potential_fn
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
            validate_grad=self._uses_gradient,
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
        if self._uses_gradient:
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

    def _logdensity_fn(self, model_args, model_kwargs):
        model_kwargs = {} if model_kwargs is None else model_kwargs
        if self._elements is not None:
            return self._elements.logdensity_fn(ambient(self._model), model_args, model_kwargs)
        gen = self._potential_fn_gen
        potential_fn = self._potential_fn if gen is None else gen(*model_args, **model_kwargs)
        return lambda z: -potential_fn(z)

    def postprocess_fn(self, args, kwargs):
        return identity if self._postprocess_fn is None else self._postprocess_fn(*args, **kwargs)

    def get_constrain_fn(self, model_args, model_kwargs):
        """Return the map from `z` to values in the supports."""
        if self._dynamic_support:
            return self.postprocess_fn(model_args, {} if model_kwargs is None else model_kwargs)
        return lambda z: {name: self._transforms[name](value) for name, value in z.items()}

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
