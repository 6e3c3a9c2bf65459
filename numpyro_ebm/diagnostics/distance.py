"""How far apart the scores of two densities are."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.typing import ArrayLike

from numpyro_ebm.distributions import EnergyBased, is_sphere, validate_observations
from numpyro_ebm.energies import as_float, check_size
from numpyro_ebm.normalizer import ParticleSampler, log_normalizer

_LEAST_DRAWS = 160


class ScoreDistance(NamedTuple):
    """Estimate of a relative Fisher information.

    Attributes
    ----------
    value, stderr
        Estimate and its standard error, in units of ``1 / x**2``.
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
) -> ScoreDistance:
    r"""Estimate the score-matching distance of two densities, which needs neither's normaliser.

    .. math:: \mathrm{SM}(p, q) = E_{x \sim p} \big| \nabla \log p(x) - \nabla \log q(x) \big|^2

    Not symmetric. On spheres the gradients are those along the sphere.

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
    difference = _score(p, x) - _score(q, x)
    if is_sphere(p.support):
        difference -= jnp.sum(difference * x, -1, keepdims=True) * x
    squares = np.asarray(jnp.sum(jnp.reshape(difference**2, (len(x), -1)), -1), np.float64)
    # particles of an island of SMC stand side by side: their means are independent
    parts = (
        squares if num_batches is None else squares[: len(x) - len(x) % num_batches].reshape(num_batches, -1).mean(1)
    )
    stderr = float(np.std(parts, ddof=1) / np.sqrt(len(parts)))
    return ScoreDistance(float(np.mean(squares)), stderr, reliable, reason)


def _score(distribution, x):
    if isinstance(distribution, EnergyBased):
        return distribution.score(x)
    return jax.vmap(jax.grad(distribution.log_prob))(x)


def _zero(distribution):
    return lambda x: 0.0 * jnp.sum(x)
