"""log Z with its error and whether to believe it, and log-likelihoods by it."""

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from blackjax.smc import resampling
from jax import lax, random
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike
from scipy.stats import t as student

from numpyro_ebm.distributions import EnergyBased, is_sphere, validate_observations
from numpyro_ebm.energies import as_float, check_size
from numpyro_ebm.estimators import Quadrature
from numpyro_ebm.normalizer.smc import LARGEST_DRIFT, NUM_ISLANDS, check_reference, gather, is_spreading, tempered_smc
from numpyro_ebm.normalizer.tail import pareto_k

_LEAST_ESS = 0.05  # of the particles, at the worst temperature
_LEAST_PARTICLES = 320
_LARGEST_STDERR = 1.0  # nats
_LEAST_IMPORTANCE_ESS = 100
_LARGEST_PARETO_K = 0.5  # over which weights have no variance
_LARGEST_EDGE = 1e-6  # share of Z at the outermost nodes
_LARGEST_CHANGE = 1e-3  # nats, of quadrature with half the nodes, or in twice the box


class LogNormalizer(NamedTuple):
    """log Z of a distribution, or of each one of a batch.

    Attributes
    ----------
    value
        Estimate of log Z, in nats, double precision, of the batch shape; infinite where the density can't be
        normalised, NaN where nothing could be computed.
    stderr
        Its standard error; ``value`` plus and minus 1.96 of it covers log Z in 95 % of all runs.
    ess
        Effective sample size: of SMC the least over temperatures; infinite for quadrature.
    reliable
        Whether nothing speaks against the estimate.
    reason
        What does, in words; "" where it is reliable. An array of strings for a batch.
    particles
        Draws of the distribution, shape ``(num_particles, *batch_shape, *event_shape)``; None for quadrature.
    num_temperatures
        Temperatures from the base to the model, of the batch shape; None but for SMC.
    """

    value: Any
    stderr: Any
    ess: Any
    reliable: Any
    reason: Any
    particles: Any = None
    num_temperatures: Any = None


@jax.jit
def _density(distribution, x):
    return distribution.unnormalized_log_prob(x)


@jax.jit
def _density_of_many(distribution, x):
    return lax.map(distribution.unnormalized_log_prob, x, batch_size=16_384)


def log_normalizer(distribution: EnergyBased, rng_key: jax.Array, method: str = "smc", **options: Any) -> LogNormalizer:
    r"""Estimate the logarithm of the normaliser,

    .. math:: \log Z = \log \int e^{-\beta f(x)} \, d\tau(x)

    Parameters
    ----------
    distribution
        Any :class:`~numpyro_ebm.EnergyBased`; each element of a batch has a normaliser of its own.
    rng_key
        Key; quadrature does not use it.
    method
        ``"smc"``: tempered sequential Monte Carlo from the base to the model, in any dimension.
        ``"quadrature"``: on a grid in double precision, in one or two dimensions, on S^1 and S^2.
        ``"importance"``: draws of the base, weighted; for energies that vary by a few nats.
    **options
        Of SMC: `num_particles` (20,000), `num_moves` at each temperature (10), `target_ess` (0.8), and `reference`, a proper
        distribution to start from where the base is not one. Of quadrature: `num_points` in each dimension
        and `bounds`, as in :class:`~numpyro_ebm.Quadrature`. Of importance sampling: `num_draws` (100,000) and `reference`.

    Returns
    -------
    LogNormalizer
        The estimate, its standard error, and whether it can be trusted.

    Raises
    ------
    ValueError
        If an option is out of its range, there is nothing to start from, or quadrature can't serve the
        distribution.
    TypeError
        If `distribution` is not an `EnergyBased`, or an option is unknown.

    Notes
    -----
    SMC's error comes from the scatter of sixteen independent runs on one ladder of temperatures. It takes the more moves, the higher
    the dimension: at 100 dimensions `num_moves` of 20 to 50. Costs ``2 * num_moves`` gradients per particle and temperature; the
    number of temperatures grows with the square root of the dimension. SMC is *not* reliable where few particles carry the
    weight, where estimates on the way up and on the way down disagree, where particles still move after the
    last temperature (outwards: the density may have no normaliser), and where anything is not finite. A mode that no
    particle has come near to is not noticed by any method.

    References
    ----------
    Del Moral, Doucet and Jasra (2006), Sequential Monte Carlo samplers.
    Grosse, Ghahramani and Adams (2015), Sandwiching the marginal likelihood using bidirectional Monte Carlo.

    Examples
    --------
    >>> import numpyro_ebm as ebm, numpyro.distributions as dist
    >>> from jax import random
    >>> d = ebm.EnergyBased(lambda x: 4 * x**2, dist.Normal(0, 1))
    >>> z = log_normalizer(d, random.key(0))
    >>> bool(abs(z.value + np.log(3)) < 4 * z.stderr), z.reliable
    (True, True)
    """
    if not isinstance(distribution, EnergyBased):
        raise TypeError(f"log_normalizer is of an EnergyBased, got {type(distribution).__name__}")
    methods: dict[str, Callable] = {"smc": _by_smc, "quadrature": _by_quadrature, "importance": _by_importance}
    if method not in methods:
        raise ValueError(f"method must be one of {sorted(methods)}, got {method!r}")
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((distribution, rng_key))):
        raise ValueError("log_normalizer looks at its numbers: call it outside of jax.jit, vmap and grad")
    known = [name for name in inspect.signature(methods[method]).parameters if name not in ("distribution", "rng_key")]
    unknown = sorted(set(options) - set(known))
    if unknown:
        raise TypeError(f"method {method!r} has no option {unknown[0]!r}: its options are {known}")
    return methods[method](distribution, rng_key, **options)


def _by_smc(distribution, rng_key, *, num_particles=20_000, num_moves=10, target_ess=0.8, reference=None):
    key_run, key_gather = random.split(rng_key)
    run = tempered_smc(distribution, key_run, num_particles, num_moves, target_ess, reference, is_reversed=True)
    forward, stderr = log_mean(run.forward)
    assert run.reverse is not None
    reverse, reverse_stderr = log_mean(-run.reverse)
    # of sixteen runs: 1.96 of the scaled error are the interval of Student's t
    stderr, reverse_stderr = (s * student.ppf(0.975, NUM_ISLANDS - 1) / 1.96 for s in (stderr, reverse_stderr))
    gap = np.abs(forward + reverse)
    num = run.particles.shape[0] * run.particles.shape[1]
    drift, drift_stderr = np.asarray(run.drift), np.asarray(run.drift_stderr)
    faults = [
        (~np.asarray(run.is_complete), "the energy is not finite, or unbounded below, where particles came: no log Z"),
        (
            np.asarray(is_spreading(run)),
            "particles still spread after the last temperature: the density can't be normalised, or num_moves is too small",
        ),
        (
            np.asarray(run.has_pole),
            "particles stick at a point: the density has a pole, and perhaps no normaliser, or is narrower than floats resolve",
        ),
        (
            (drift < -5 * drift_stderr) & (drift < -LARGEST_DRIFT),
            "particles still move inwards after the last temperature: take more num_moves",
        ),
        (np.full(forward.shape, num < _LEAST_PARTICLES), f"take at least {_LEAST_PARTICLES} num_particles"),
        (
            pareto_k(run.log_weights) > _LARGEST_PARETO_K,
            "the density has heavier tails than the base, or no normaliser (Pareto k over 0.5 at the last temperature): start from a "
            "wider reference",
        ),
        (np.asarray(run.ess) < _LEAST_ESS * num, "few particles carry the weight: take more num_particles"),
        (
            (stderr > _LARGEST_STDERR) | (gap > 5 * np.hypot(stderr, reverse_stderr) + 0.02),
            "estimates on the way up and on the way down disagree: take more num_moves or num_particles",
        ),
    ]
    value = np.where(faults[1][0], np.inf, forward)
    value = np.where(faults[0][0], np.nan, value)
    return _result(
        value, stderr, np.asarray(run.ess), faults, gather(run, key_gather), np.asarray(run.num_temperatures)
    )


def _by_importance(distribution, rng_key, *, num_draws=100_000, reference=None):
    check_size("num_draws", num_draws)
    base = check_reference(distribution, reference)
    batch_shape = distribution.batch_shape
    key_draw, key_resample = random.split(rng_key)
    try:
        x = (base if base.batch_shape == batch_shape else base.expand(batch_shape)).sample(key_draw, (num_draws,))
    except NotImplementedError as error:
        raise ValueError(
            f"importance sampling draws from the base, but {type(base).__name__} can't be drawn from: give a proper distribution "
            "as reference"
        ) from error
    log_weights = _density(distribution, x) - base.log_prob(x)
    value, stderr = log_mean(log_weights)
    weights = jax.nn.softmax(log_weights, axis=0)
    ess = np.asarray(1 / jnp.sum(weights**2, axis=0))
    is_finite = np.isfinite(value)
    faults = [
        (~is_finite, "the energy is not finite, or unbounded below, where the base has mass: no log Z"),
        (
            (pareto_k(log_weights) > _LARGEST_PARETO_K) | (ess < _LEAST_IMPORTANCE_ESS),
            "few draws carry the weight, or no number of them would do (Pareto k over 0.5): take method='smc'",
        ),
    ]
    index = jax.vmap(lambda key, w: resampling.systematic(key, w, num_draws), (0, 1), 1)(
        random.split(key_resample, math.prod(batch_shape)), jnp.reshape(weights, (num_draws, -1))
    )
    index = jnp.reshape(index, (num_draws, *batch_shape, *[1] * distribution.event_dim))
    return _result(
        np.where(np.isfinite(value), value, np.nan), stderr, ess, faults, jnp.take_along_axis(x, index, axis=0)
    )


def _by_quadrature(distribution, rng_key, *, num_points=None, bounds=None):
    if num_points is None:
        spread = 20_000 if bounds is None else 2_000
        num_points = spread if math.prod(distribution.event_shape) == 1 else 800
    coarser = max(num_points // 2, 10)
    with jax.enable_x64(True):
        double = jax.tree.map(lambda leaf: leaf.astype(np.float64) if _is_float(leaf) else leaf, distribution)
        value, edge, mass = _integral(double, Quadrature(num_points, bounds))
        error = np.abs(value - _integral(double, Quadrature(coarser, bounds))[0])
        # a box on an unbounded support leaves something out: what twice its size finds
        outside = edge > _LARGEST_EDGE
        if bounds is not None:
            rule = Quadrature(num_points, _twice(double, bounds))
            outside = np.abs(_integral(double, rule)[0] - value) > _LARGEST_CHANGE
    faults = [
        (~np.isfinite(value), "the density is not finite at some nodes"),
        (
            outside,
            "there is mass beyond the outermost nodes: the density can't be normalised, or bounds leave some out",
        ),
        (np.abs(mass) > _LARGEST_CHANGE, "the nodes miss some of the base's own mass: give bounds, or more num_points"),
        (error > _LARGEST_CHANGE, "half the nodes give another value: take more num_points"),
    ]
    is_infinite = outside & (np.abs(mass) < _LARGEST_CHANGE)
    value = np.where(np.isfinite(value), np.where(is_infinite, np.inf, value), np.nan)
    return _result(value, error, np.full(value.shape, np.inf), faults)


def _integral(distribution, rule):
    """log Z, the share of it at the outermost nodes, and the logarithm of the base's mass, of the batch shape."""
    shape = distribution.batch_shape
    nodes, log_weights = rule.nodes(distribution)
    log_terms = _density_of_many(distribution, nodes) + log_weights
    log_z = logsumexp(log_terms, axis=0)
    edge, mass = jnp.zeros(()), jnp.zeros(())
    if rule.bounds is None and not is_sphere(distribution.support):
        flat = jnp.reshape(nodes, (*nodes.shape[: nodes.ndim - distribution.event_dim], -1))
        is_outermost = jnp.any((flat == jnp.min(flat, axis=0)) | (flat == jnp.max(flat, axis=0)), axis=-1)
        edge = jnp.sum(jnp.where(is_outermost, jnp.exp(log_terms - log_z), 0), axis=0)
        mass = logsumexp(distribution.base.log_prob(nodes) + log_weights, axis=0)
    return tuple(np.asarray(jnp.broadcast_to(part, shape)) for part in (log_z, edge, mass))


def _twice(distribution, bounds):
    """A box of twice the size; None, for all of the support, where that has no room for it."""
    low, high = (np.broadcast_to(np.asarray(bound, float), distribution.event_shape) for bound in bounds)
    wider = low - (high - low) / 2, high + (high - low) / 2
    return wider if np.all(distribution.support(jnp.asarray(np.stack(wider)))) else None


def _is_float(leaf):
    return isinstance(leaf, jax.Array | np.ndarray) and jnp.issubdtype(leaf.dtype, jnp.floating)


class LogLikelihood(NamedTuple):
    """Normalised log-densities of observations.

    Attributes
    ----------
    value
        In nats, double precision, shape ``(n, ...)``.
    stderr
        Standard error of log Z, which all of `value` share (of the batch shape).
    reliable, reason
        As in :class:`LogNormalizer`.
    """

    value: np.ndarray
    stderr: Any
    reliable: Any
    reason: Any

    @property
    def mean(self) -> float:
        """Mean over observations, in nats."""
        return float(np.mean(self.value))

    @property
    def mean_stderr(self) -> float:
        """Standard error of :attr:`mean`: of the observations as draws of their population, and of log Z.

        Infinite for one observation, whose scatter is not known.
        """
        return float(np.hypot(_scatter(self.value), np.mean(self.stderr)))

    def minus(self, other: "LogLikelihood") -> tuple[float, float]:
        """Mean difference from another fit's, at the same observations, and its standard error, paired.

        Raises
        ------
        ValueError
            If the two are not of the same observations' shape.
        """
        if self.value.shape != other.value.shape:
            raise ValueError(
                f"both must be of the same observations, got shapes {self.value.shape} and {other.value.shape}"
            )
        difference = self.value - other.value
        stderr = np.sqrt(_scatter(difference) ** 2 + np.mean(self.stderr) ** 2 + np.mean(other.stderr) ** 2)
        return float(np.mean(difference)), float(stderr)


def _scatter(values):
    """Standard error of a mean of independent values."""
    return np.std(values, ddof=1) / np.sqrt(values.size) if values.size > 1 else np.inf


def log_likelihood(
    distribution: EnergyBased,
    x: ArrayLike,
    rng_key: jax.Array,
    normalizer: LogNormalizer | None = None,
    **options: Any,
) -> LogLikelihood:
    """Normalised log-density of each observation, ``unnormalized_log_prob(x) - log Z``.

    Parameters
    ----------
    distribution
        A fitted distribution, or a batch of them.
    x
        Observations, shape ``(n, *batch_shape, *event_shape)``.
    rng_key
        Key of log Z.
    normalizer
        What :func:`log_normalizer` returned for this distribution; by default it is called, with `options`.
    **options
        Of :func:`log_normalizer`: `method`, and that method's own.

    Returns
    -------
    LogLikelihood
        Of each observation, shape ``(n, *batch_shape)``; `mean` and `mean_stderr` are over observations.

    Raises
    ------
    ValueError
        If observations are not finite, off the support or of the wrong shape.

    Examples
    --------
    >>> import numpyro_ebm as ebm, numpyro.distributions as dist
    >>> from jax import random
    >>> d = ebm.EnergyBased(lambda x: x**2 / 2, dist.Normal(0, 1))
    >>> found = log_likelihood(d, jnp.zeros(3), random.key(0), method="quadrature")
    >>> found.value.round(3)     # log N(0; 0, 1/2)
    array([-0.572, -0.572, -0.572])
    """
    x = as_float(x)
    validate_observations("x", distribution, x)
    shape = distribution.batch_shape + distribution.event_shape
    if x.shape[x.ndim - len(shape) :] != shape:
        raise ValueError(
            f"x must have shape (n, *{distribution.batch_shape}, *{distribution.event_shape}), got {x.shape}"
        )
    if normalizer is not None and np.shape(normalizer.value) != distribution.batch_shape:
        raise ValueError(
            f"normalizer is of batch shape {np.shape(normalizer.value)}, but the distribution of {distribution.batch_shape}"
        )
    if normalizer is None:
        normalizer = log_normalizer(distribution, rng_key, **options)
    value = np.asarray(_density(distribution, x), np.float64) - normalizer.value
    return LogLikelihood(value, normalizer.stderr, normalizer.reliable, normalizer.reason)


def log_mean(log_values: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Logarithm of the mean of exponentials over the first axis, in double precision, with its standard error."""
    log_values = np.asarray(log_values, np.float64)
    largest = np.max(log_values, axis=0)
    with np.errstate(invalid="ignore"):
        weights = np.exp(log_values - largest)
        mean = np.mean(weights, axis=0)
        stderr = np.std(weights, axis=0, ddof=1) / mean / np.sqrt(len(log_values))
    return largest + np.log(mean), stderr


def _result(value, stderr, ess, faults, particles=None, num_temperatures=None):
    shape = np.shape(value)
    reason = np.full(shape, "", dtype=object)
    for condition, words in reversed(faults):
        reason = np.where(condition, words, reason)
    reliable = reason == ""
    if not shape:
        value, stderr, ess = (float(part) for part in (value, stderr, ess))
        return LogNormalizer(value, stderr, ess, bool(reliable), str(reason), particles, num_temperatures)
    return LogNormalizer(value, stderr, ess, reliable, reason, particles, num_temperatures)
