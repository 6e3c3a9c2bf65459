"""How far apart two densities are: Kullback-Leibler divergence, total variation, score-matching distance."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.typing import ArrayLike
from scipy.special import logsumexp

from numpyro_ebm.distributions import EnergyBased, is_sphere, validate_observations
from numpyro_ebm.energies import as_float, check_size
from numpyro_ebm.normalizer import ParticleSampler, log_normalizer, pareto_k

_LEAST_DRAWS = 160
_LARGEST_PARETO_K = 0.7  # over which means of importance weights do not converge in practice


class Distance(NamedTuple):
    """Estimate of how far apart two densities are.

    Attributes
    ----------
    value, stderr
        Estimate and its standard error.
    reliable, reason
        Whether the draws can be trusted, as in :class:`~numpyro_ebm.normalizer.LogNormalizer`.
    """

    value: float
    stderr: float
    reliable: bool
    reason: str


def score_distance(
    p: dist.Distribution,
    q: dist.Distribution,
    rng_key: jax.Array,
    *,
    x: ArrayLike | None = None,
    num_draws: int = 20_000,
    **options: Any,
) -> Distance:
    r"""Estimate the score-matching distance of two densities, which needs neither's normaliser.

    .. math:: \mathrm{SM}(p, q) = E_{x \sim p} \big| \nabla \log p(x) - \nabla \log q(x) \big|^2

    In units of ``1 / x**2``. Not symmetric. On spheres the gradients are those along the sphere.

    Parameters
    ----------
    p, q
        :class:`~numpyro_ebm.EnergyBased`, or NumPyro distributions of known density, without batch shape, of the same events.
    rng_key
        Key.
    x
        Independent draws of `p`, shape ``(n, *event_shape)``. By default `p` is drawn from where it can be, by tempered
        SMC (:func:`~numpyro_ebm.log_normalizer`) where it is an `EnergyBased` without a sampler.
    num_draws
        Number of draws otherwise.
    **options
        Of `log_normalizer`.

    Returns
    -------
    Distance
        Estimate, standard error, and whether they are reliable.

    Raises
    ------
    TypeError, ValueError
        If `p` and `q` are not distributions over the same events.

    Notes
    -----
    Blind to the weights of modes that are far apart: small distances do not imply small divergences.

    References
    ----------
    Hyvarinen (2005), Estimation of non-normalized statistical models by score matching.

    Examples
    --------
    >>> import numpyro_ebm as ebm, numpyro.distributions as dist
    >>> from jax import random
    >>> d = ebm.EnergyBased(lambda x: x**2 / 2, dist.Normal(0, 1))
    >>> distance = score_distance(dist.Normal(0, 1), d, random.key(0))       # E (-x + 2x)**2 = 1
    >>> bool(abs(distance.value - 1) < 4 * distance.stderr)
    True
    """
    points, num_batches, reliable, reason = _draws(p, q, rng_key, x, num_draws, options)
    difference = _score(p, points) - _score(q, points)
    if is_sphere(p.support):
        difference -= jnp.sum(difference * points, -1, keepdims=True) * points
    squares = jnp.sum(jnp.reshape(difference**2, (len(points), -1)), -1)
    return _distance(squares, num_batches, reliable, reason)


def kl_divergence(
    p: dist.Distribution,
    q: dist.Distribution,
    rng_key: jax.Array,
    *,
    x: ArrayLike | None = None,
    num_draws: int = 20_000,
    **options: Any,
) -> Distance:
    r"""Estimate the Kullback-Leibler divergence of two densities, of unknown normalisers perhaps, in nats.

    .. math:: \mathrm{KL}(p, q) = E_{x \sim p} \log \frac{p(x)}{q(x)}

    Draws of `p` serve for the ratio of the normalisers too, as :math:`Z_q / Z_p = E_p[\tilde q / \tilde p]`: most of the
    error cancels where `p` and `q` are near to each other; where they are far apart the estimate is not *reliable*.

    Parameters
    ----------
    p, q, rng_key, x, num_draws, **options
        As in :func:`score_distance`.

    Returns
    -------
    Distance
        Estimate, standard error, and whether they are reliable.

    Raises
    ------
    TypeError, ValueError
        If `p` and `q` are not distributions over the same events.

    Examples
    --------
    >>> import numpyro_ebm as ebm, numpyro.distributions as dist
    >>> from jax import random
    >>> d = ebm.EnergyBased(lambda x: x**2 / 2, dist.Normal(0, 1))            # a normal of variance 1/2
    >>> kl = kl_divergence(d, dist.Normal(0, 1), random.key(0))
    >>> bool(abs(kl.value - (0.5 - 1 + np.log(2)) / 2) < 4 * kl.stderr)
    True
    """
    log_ratio, num_batches, reliable, reason = _log_ratio(p, q, rng_key, x, num_draws, options)
    # to first order, the mean of these has the error of the whole
    return _distance(log_ratio + np.expm1(-log_ratio), num_batches, reliable, reason)


def total_variation(
    p: dist.Distribution,
    q: dist.Distribution,
    rng_key: jax.Array,
    *,
    x: ArrayLike | None = None,
    num_draws: int = 20_000,
    **options: Any,
) -> Distance:
    r"""Estimate the total variation distance of two densities, of unknown normalisers perhaps: between 0 and 1.

    .. math:: \mathrm{TV}(p, q) = E_{x \sim p} \max\Big(1 - \frac{q(x)}{p(x)}, 0\Big)

    Parameters
    ----------
    p, q, rng_key, x, num_draws, **options
        As in :func:`score_distance`.

    Returns
    -------
    Distance
        Estimate, standard error, and whether they are reliable.

    Raises
    ------
    TypeError, ValueError
        If `p` and `q` are not distributions over the same events.

    Examples
    --------
    >>> import numpyro_ebm as ebm, numpyro.distributions as dist
    >>> from jax import random
    >>> tv = total_variation(dist.Normal(0, 1), dist.Normal(1, 1), random.key(0))
    >>> bool(abs(tv.value - 0.3829) < 4 * tv.stderr)
    True
    """
    log_ratio, num_batches, reliable, reason = _log_ratio(p, q, rng_key, x, num_draws, options)
    excess = -np.expm1(-log_ratio)
    # less what the error of the normalisers' ratio adds, to first order
    terms = np.maximum(excess, 0) - np.mean(excess > 0) * excess
    return _distance(terms, num_batches, reliable, reason)


def _log_ratio(p, q, rng_key, x, num_draws, options):
    """log(p / q) at draws of p, with the ratio of normalisers that these give: exp(-log_ratio) has a mean of 1."""
    x, num_batches, reliable, reason = _draws(p, q, rng_key, x, num_draws, options)
    log_ratio = np.asarray(_log_density(p, x) - _log_density(q, x), np.float64)
    if not np.all(np.isfinite(log_ratio)):
        raise ValueError(
            "log-densities of p and q must be finite at draws of p, but one of them is not at "
            f"{np.sum(~np.isfinite(log_ratio))} of {len(log_ratio)}: give draws x at which both are"
        )
    if reliable and not pareto_k(-log_ratio) <= _LARGEST_PARETO_K:
        reliable, reason = False, "draws of p say too little of q, which has its mass elsewhere (Pareto k over 0.7)"
    return log_ratio + logsumexp(-log_ratio) - np.log(len(log_ratio)), num_batches, reliable, reason


def _draws(p, q, rng_key, x, num_draws, options):
    """Draws of p, shape ``(n, *event_shape)``; how many independent parts they have, None for all; whether to trust them."""
    for name, d in (("p", p), ("q", q)):
        if not isinstance(d, dist.Distribution):
            raise TypeError(f"{name} must be a distribution, got {type(d).__name__}")
        if d.batch_shape or d.event_shape != p.event_shape:
            raise ValueError(
                f"p and q must be over the same events, without batch shape, got {name} of batch shape {d.batch_shape} and event shape "
                f"{d.event_shape} for {p.event_shape}"
            )
    check_size("num_draws", num_draws)
    reliable, reason, num_batches = True, "", None
    if x is not None:
        x = as_float(x)
        validate_observations("x", p if isinstance(p, EnergyBased) else EnergyBased(_zero(p), p), x)
    elif isinstance(p, EnergyBased) and isinstance(p.sampler, ParticleSampler):
        x, num_batches = p.sampler.particles, 16
    elif isinstance(p, EnergyBased) and p.sampler is None:
        z = log_normalizer(p, rng_key, num_particles=num_draws, **options)
        x, reliable, reason, num_batches = z.particles, z.reliable, z.reason, 16
    else:
        x = p.sample(rng_key, (num_draws,))
    x = jnp.reshape(x, (-1, *p.event_shape))
    if q.support.is_discrete or not bool(jnp.all(q.support(x))):
        raise ValueError(f"q must have density wherever p has, but draws of p lie outside of its support {q.support}")
    if len(x) < _LEAST_DRAWS:
        raise ValueError(f"take at least {_LEAST_DRAWS} draws, got {len(x)}")
    return x, num_batches, reliable, reason


def _distance(terms, num_batches, reliable, reason):
    terms = np.asarray(terms, np.float64)
    # particles of an island of SMC stand side by side: their means are independent
    parts = terms
    if num_batches is not None:
        parts = terms[: len(terms) - len(terms) % num_batches].reshape(num_batches, -1).mean(1)
    stderr = float(np.std(parts, ddof=1) / np.sqrt(len(parts)))
    return Distance(float(np.mean(terms)), stderr, reliable, reason)


def _log_density(distribution, x):
    if isinstance(distribution, EnergyBased):
        return distribution.unnormalized_log_prob(x)
    return distribution.log_prob(x)


def _score(distribution, x):
    if isinstance(distribution, EnergyBased):
        return distribution.score(x)
    return jax.vmap(jax.grad(distribution.log_prob))(x)


def _zero(distribution):
    return lambda x: 0.0 * jnp.sum(x)
