"""Models whose elements are independent, and can be accepted each on its own."""

import jax.numpy as jnp
from numpyro import handlers
from numpyro.infer.util import compute_log_probs


class Elements:
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


def independent_elements(trace, latent):
    """Plates that hold every sample site of a model, if these are the leftmost dimensions of all."""
    sites = [site for site in trace.values() if site["type"] == "sample"]
    if not latent or any(site["fn"].support.is_discrete and not site["is_observed"] for site in sites):
        return None
    common = set.intersection(*(set(site["cond_indep_stack"]) for site in sites))
    dims = sorted(frame.dim for frame in common)
    if not dims:
        return None
    for _name, site in latent.items():
        ndim = len(site["fn"].batch_shape)
        if dims != list(range(-ndim, -ndim + len(dims))):
            return None
    for site in sites:
        shape = site["fn"].batch_shape
        if any(len(shape) < -f.dim or shape[f.dim] != f.size for f in common):
            return None
    params = {name: site["value"] for name, site in trace.items() if site["type"] in ("param", "mutable", "plate")}
    return Elements(dims, params)
