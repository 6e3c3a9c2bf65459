"""Models whose elements are independent, and can be accepted each on its own."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.gibbs import prototype_trace
from numpyro.infer.util import _unconstrain_params, compute_log_probs
from numpyro.util import not_jax_tracer


class Elements:
    """The log-density of a model all of which stands in plates, per element of these.

    Parameters
    ----------
    dims
        The plates' dimensions, negative, in increasing order.
    params
        Values of the model's parameters and mutable states, and its plates' indices.
    """

    def __init__(self, dims: list[int], params: dict[str, Any]):
        self.dims = dims
        self.params = params

    def logdensity_fn(self, model: Callable, model_args: tuple, model_kwargs: dict) -> Callable:
        """Map unconstrained values, of shapes ``(*elements, ...)``, to log-densities of shape `elements`."""

        def logdensity(z):
            # as NumPyro's potential energy, but not summed
            unconstrained = _unconstrain_params(handlers.seed(model, 0), z)
            log_probs, _ = compute_log_probs(unconstrained, model_args, model_kwargs, self.params, sum_log_prob=False)
            return sum(self._reduce(log_prob) for log_prob in log_probs.values())

        return logdensity

    def _reduce(self, log_prob):
        others = [dim for dim in range(-log_prob.ndim, 0) if dim not in self.dims]
        return jnp.sum(log_prob, axis=tuple(others))


def independent_elements(
    model: Callable, trace: dict, latent: dict, model_args: tuple, model_kwargs: dict
) -> Elements | None:
    """The elements of a model, if it stands in plates as a whole and its elements are independent."""
    sites = [site for site in trace.values() if site["type"] == "sample"]
    if any(site["fn"].support.is_discrete and not site["is_observed"] for site in sites):
        return None
    common = set.intersection(*(set(site["cond_indep_stack"]) for site in sites))
    dims = sorted(frame.dim for frame in common)
    if not dims:
        return None
    for site in latent.values():
        ndim = len(site["fn"].batch_shape)
        if dims != list(range(-ndim, -ndim + len(dims))):
            return None  # elements are not the leading dimensions
    for site in sites:
        shape = site["fn"].batch_shape
        if any(len(shape) < -frame.dim or shape[frame.dim] != frame.size for frame in common):
            return None
    params = {name: site["value"] for name, site in trace.items() if site["type"] in ("param", "mutable", "plate")}
    elements = Elements(dims, params)
    return elements if _are_independent(elements, model, latent, model_args, model_kwargs) else None


def _are_independent(elements, model, latent, model_args, model_kwargs):
    """Whether no element's density moves with another element: plates promise it, models can break it.

    For independent elements, and for no others, a weighted sum of log-densities has the gradient of the
    plain sum, weighted.
    """
    logdensity = elements.logdensity_fn(model, model_args, model_kwargs)

    def gradients(z):
        value, pullback = jax.vjp(logdensity, z)
        weight = random.uniform(random.key(2), value.shape, value.dtype, 0.5, 1.5)
        return *pullback(jnp.ones_like(value)), *pullback(weight), weight

    with jax.ensure_compile_time_eval(), handlers.block():
        draw = prototype_trace(model, random.key(1), model_args, model_kwargs)
        z = {name: biject_to(draw[name]["fn"].support).inv(draw[name]["value"]) for name in latent}
        plain, weighted, weight = jax.jit(gradients)(z)
    for name in z:
        if not not_jax_tracer(weighted[name]):
            return False
        expected = plain[name] * jnp.reshape(weight, weight.shape + (1,) * (plain[name].ndim - weight.ndim))
        scale = 1 + np.abs(np.asarray(expected))
        if not np.all(np.abs(np.asarray(weighted[name] - expected)) <= 1e-3 * scale):
            return False
    return True
