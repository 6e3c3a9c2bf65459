"""Pointwise log-likelihoods over a posterior of an energy's parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from numpyro_ebm.estimators import Quadrature
from numpyro_ebm.handlers import observed_sites
from numpyro_ebm.normalizer import log_normalizer

_NUM_BATCHES = 16
_LEAST_ESS = 0.3  # of the particles, for a draw to go without a reference of its own
_MOST_REFERENCES = 20


class SiteLogLikelihood(NamedTuple):
    """Log-likelihood of each observation of a site, for each draw of a posterior.

    Attributes
    ----------
    value
        Shape ``(chain, draw, *batch_shape)``, in nats.
    log_normalizer, stderr
        log Z at each draw, and its standard error, shape ``(chain, draw, *batch_shape of the energy)``.
    reliable, reason
        Whether all of them can be trusted, as in :class:`~numpyro_ebm.normalizer.LogNormalizer`.
    """

    value: np.ndarray
    log_normalizer: np.ndarray
    stderr: np.ndarray
    reliable: bool
    reason: str


def posterior_log_likelihood(
    model: Callable,
    samples: dict[str, Any],
    *args: Any,
    rng_key: jax.Array | None = None,
    method: str = "smc",
    options: dict | None = None,
    **kwargs: Any,
) -> dict[str, SiteLogLikelihood]:
    r"""Normalised log-likelihood of each observation at each draw of a posterior, for every observed energy-based site.

    log Z at a draw comes from particles at another one nearby, the reference,

    .. math:: \log Z(\theta) = \log Z(\theta_0) + \log \frac{1}{N} \sum_j \frac{\tilde p(X_j | \theta)}{\tilde p(X_j | \theta_0)},

    since a posterior is narrow beside the model's own spread. Draws that are too far off for this get references of their own.

    Parameters
    ----------
    model
        The model.
    samples
        Draws of its latent variables by name, each of shape ``(chain, draw, ...)``:
        ``mcmc.get_samples(group_by_chain=True)``.
    *args, **kwargs
        The model's arguments.
    rng_key
        Key; not needed where all log Z are known.
    method
        Of :func:`~numpyro_ebm.log_normalizer` at references, ``"smc"`` or ``"importance"``; or ``"quadrature"``, at every draw.
    options
        Of `log_normalizer`.

    Returns
    -------
    dict of SiteLogLikelihood
        By the name of the site.

    Raises
    ------
    ValueError
        If the model has no observed energy-based site, samples are not of one shape, or a key is missing.

    Examples
    --------
    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_ebm as ebm
    >>> def model(x):
    ...     theta = numpyro.sample("theta", dist.Gamma(1, 1))
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2 / 2, dist.Normal(0, 1)), obs=x)
    >>> found = posterior_log_likelihood(
    ...     model, {"theta": jnp.ones((2, 10))}, jnp.zeros(3), rng_key=random.key(0), method="quadrature"
    ... )
    >>> found["x"].value.shape     # chain, draw, observation
    (2, 10, 3)
    """
    shapes = {np.shape(value)[:2] for value in samples.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(f"samples must all have shape (chain, draw, ...), got {sorted(shapes)}")
    (shape,) = shapes
    flat = {name: jnp.reshape(jnp.asarray(v), (-1, *np.shape(v)[2:])) for name, v in samples.items()}
    first = observed_sites(model, jax.tree.map(lambda v: v[0], flat), args, kwargs)
    if not first:
        raise ValueError("the model has no observed energy-based site")
    unknown = [name for name, site in first.items() if site.distribution.log_normalizer is None]
    if unknown and rng_key is None:
        raise ValueError(f"log Z of sites {sorted(unknown)} must be estimated: give rng_key")
    found = {}
    for i, name in enumerate(first):

        def at(values, name=name):
            return observed_sites(model, values, args, kwargs)[name].distribution

        reason = ""
        if name not in unknown:
            log_z = _of_each(lambda d: d.log_normalizer_value(), at, flat)
        elif method == "quadrature":
            log_z = _of_each(Quadrature(**(options or {})).log_normalizer, at, flat)
        else:
            assert rng_key is not None
            log_z, stderr, reason = _by_references(at, flat, random.fold_in(rng_key, i), method, options or {})
        if name not in unknown or method == "quadrature":
            stderr = np.zeros_like(log_z)
        value, mask = first[name].value, first[name].mask
        density = np.asarray(
            jax.jit(lambda flat, at=at, x=value: lax.map(lambda v: at(v).unnormalized_log_prob(x), flat))(flat),
            np.float64,
        )
        pad = (slice(None), *[None] * (density.ndim - log_z.ndim))
        density = density - log_z[pad]
        if mask is not None:
            density = np.where(np.asarray(mask), density, np.nan)
        found[name] = SiteLogLikelihood(
            density.reshape(*shape, *density.shape[1:]),
            log_z.reshape(*shape, *log_z.shape[1:]),
            stderr.reshape(*shape, *stderr.shape[1:]),
            not reason,
            reason,
        )
    return found


def _of_each(log_normalizer, at, flat):
    """log Z at each draw, where a function of the distribution gives it."""

    def at_draw(values):
        distribution = at(values)
        return jnp.broadcast_to(log_normalizer(distribution), distribution.batch_shape)

    return np.asarray(jax.jit(lambda flat: lax.map(at_draw, flat))(flat), np.float64)


def _by_references(at, flat, rng_key, method, options):
    """log Z and its standard error at each draw, from particles at a few of them."""
    num = len(next(iter(flat.values())))
    matrix = np.concatenate([np.asarray(v, np.float64).reshape(num, -1) for v in flat.values()], axis=1)
    distance = np.sum(((matrix - matrix.mean(0)) / np.maximum(matrix.std(0), 1e-12)) ** 2, axis=1)
    reference, reason = int(np.argmin(distance)), ""
    best: Any = None
    for key in random.split(rng_key, _MOST_REFERENCES):
        distribution = at(jax.tree.map(lambda v, i=reference: v[i], flat))
        z = log_normalizer(distribution, key, method, **options)
        if not np.all(z.reliable):
            reason = str(np.ravel(z.reason)[np.argmin(np.ravel(z.reliable))])
        log_ratio, error, ess = (np.asarray(part, np.float64) for part in _bridge(at, flat, distribution, z.particles))
        new = z.value + log_ratio, np.hypot(z.stderr, error), ess
        if best is None:
            best = new
        else:
            closer = new[2] > best[2]
            best = tuple(np.where(closer, n, b) for n, b in zip(new, best, strict=True))
        share = best[2].reshape(num, -1).min(1) / len(z.particles)
        reference = int(np.argmin(share))
        if share[reference] > _LEAST_ESS:
            break
    else:
        reason = reason or f"{_MOST_REFERENCES} references do not reach all draws: log Z of some is rough"
    return best[0], best[1], reason


def _bridge(at, flat, reference, particles):
    """log Z of each draw less that of the reference, its standard error and effective sample size."""
    size = len(particles) - len(particles) % _NUM_BATCHES
    particles = particles[:size]

    @jax.jit
    def bridge(flat, reference, particles):
        base = reference.unnormalized_log_prob(particles)

        def at_draw(values):
            log_weights = at(values).unnormalized_log_prob(particles) - base
            largest = jnp.max(log_weights, axis=0)
            weights = jnp.exp(log_weights - largest)
            mean = jnp.mean(weights, axis=0)
            # particles of an island of SMC stand side by side: their means are independent
            parts = jnp.mean(jnp.reshape(weights, (_NUM_BATCHES, -1, *weights.shape[1:])), axis=1)
            error = jnp.std(parts, axis=0, ddof=1) / _NUM_BATCHES**0.5 / mean
            return largest + jnp.log(mean), error, size * mean**2 / jnp.mean(weights**2, axis=0)

        return lax.map(at_draw, flat)

    return bridge(flat, reference, particles)
