"""The duality gap: what any other energy in the ball could gain."""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random
from jax.typing import ArrayLike
from scipy.stats import t as student

from numpyro_ebm.distributions import EnergyBased, StandardizedEnergy, validate_observations
from numpyro_ebm.energies import F1Energy, as_float, check_size
from numpyro_ebm.normalizer import log_normalizer

_NUM_RANDOM = 1_000
_NUM_STEPS = 300
_NUM_BATCHES = 16
_LEAST_DRAWS = 160


class DualityGap(NamedTuple):
    """How much log-likelihood an energy may leave on the table.

    Attributes
    ----------
    value
        Upper bound, in nats per observation, on what the best energy in the ball has more.
    stderr
        Its Monte Carlo error, at the neuron that was found.
    floor
        Mean of the gap that the noise of as many draws makes by itself: values up to about twice of it are no evidence
        of anything to gain on these observations. The noise of the observations is not in it.
    neuron
        The feature at which the supremum is taken, of unit norm, shape ``(d,)`` (``(d + 1,)`` with bias); adding
        it with the sign of `slope` lowers the loss fastest.
    slope
        F at that neuron: its mean activation over the model less that over the data. Negative: the data have more.
    reliable, reason
        Whether the draws can be trusted, as in :class:`~numpyro_ebm.normalizer.LogNormalizer`.
    """

    value: float
    stderr: float
    floor: float
    neuron: np.ndarray
    slope: float
    reliable: bool
    reason: str


def duality_gap(
    distribution: EnergyBased,
    x: ArrayLike,
    rng_key: jax.Array,
    *,
    particles: ArrayLike | None = None,
    num_particles: int = 50_000,
    num_starts: int = 32,
    num_bootstrap: int = 4,
    **options: Any,
) -> DualityGap:
    r"""Bound what any other energy in the F1 ball could gain on these observations, in nats per observation.

    .. math::
        \max_{\|\gamma'\| \le R} \ell(\gamma') - \ell(\gamma) \le
        \beta \Big( R \sup_\theta |F(\theta)| - \int F \, d\gamma \Big), \quad
        F(\theta) = E_\nu[\phi(X, \theta)] - \frac{1}{n} \sum_i \phi(x_i, \theta)

    where :math:`\ell` is the mean log-likelihood and :math:`\nu` the model of :math:`\gamma`. It needs no log Z, but
    draws of the model: they come from tempered SMC, not from chains, which may hide modes of the wrong weight.

    Parameters
    ----------
    distribution
        A fitted distribution of an :class:`~numpyro_ebm.F1Energy`, or of one of a standardised table.
    x
        The observations that it was fitted to, shape ``(n, d)``.
    rng_key
        Key.
    particles
        Draws of the model, shape ``(num, d)``, where better ones are at hand than those of SMC.
    num_particles
        Number of draws otherwise.
    num_starts
        Number of neurons, the best among the energy's own and 1,000 random ones, from which the supremum is searched.
    num_bootstrap
        Number of resampled noises, whose mean is `floor`.
    **options
        Of :func:`~numpyro_ebm.log_normalizer`: `num_moves`, `target_ess`, `reference`.

    Returns
    -------
    DualityGap
        The bound in nats per observation, its standard error, and whether it is reliable.

    Raises
    ------
    TypeError, ValueError
        If the energy is not an `F1Energy`, has a batch shape, or observations are faulty.

    Notes
    -----
    The bound is concavity's: it holds for the empirical likelihood, over the ball of the energy's radius, power and activation. Not
    covered: the search for the supremum, which is not convex and may miss it (low); what the fit would be worth on other data;
    energies outside of the ball. Nonnegative by construction, as the energy's own neurons are among the
    candidates and both terms use the same draws. Monte Carlo noise biases it upwards, by about `floor`.

    References
    ----------
    Domingo-Enrich et al. (2022), Dual training of energy-based models with overparametrized shallow neural networks,
    arXiv:2107.05134.

    Examples
    --------
    >>> import numpyro_ebm as ebm
    >>> from jax import random
    >>> energy = ebm.F1Energy(jnp.eye(3), jnp.full(3, -9.0), jnp.ones(3), radius=2.0)      # nearly uniform
    >>> d = ebm.EnergyBased(energy, ebm.SphereUniform(3))
    >>> x = ebm.SphereUniform(3).sample(random.key(0), (1000,))
    >>> gap = duality_gap(d, x, random.key(1), num_particles=16_000)
    >>> bool(0 <= gap.value < 0.1), gap.neuron.shape
    (True, (3,))
    """
    energy, data, unit = _shallow(distribution, x)
    check_size("num_starts", num_starts)
    check_size("num_bootstrap", num_bootstrap)
    key_draws, key_search, key_floor = random.split(rng_key, 3)
    reliable, reason = True, ""
    if particles is None:
        z = log_normalizer(distribution, key_draws, num_particles=num_particles, **options)
        particles, reliable, reason = z.particles, z.reliable, z.reason
    draws = as_float(particles)
    validate_observations("particles", distribution, draws)
    if len(draws) < _LEAST_DRAWS:
        raise ValueError(f"take at least {_LEAST_DRAWS} particles, got {len(draws)}")
    draws = unit(draws)

    num, radius = draws.shape[0], jnp.asarray(energy.radius)
    over_model = jnp.full(num, 1 / num)
    points = jnp.concatenate([draws, data])
    weights = jnp.concatenate([over_model, jnp.full(data.shape[0], -1 / data.shape[0])])
    neuron, slope = _supremum(energy, points, weights, key_search, num_starts)

    beta = float(distribution.inverse_temperature)
    own = energy(points)
    value = beta * float(radius * jnp.abs(slope) - weights @ own)
    # draws of an island of SMC stand side by side: their means are independent
    terms = radius * jnp.sign(slope) * energy.activations(draws, neuron[None])[:, 0] - energy(draws)
    means = np.asarray(jnp.mean(jnp.reshape(terms[: num - num % _NUM_BATCHES], (_NUM_BATCHES, -1)), 1), np.float64)
    scale = student.ppf(0.975, _NUM_BATCHES - 1) / 1.96
    stderr = float(beta * scale * np.std(means, ddof=1) / math.sqrt(_NUM_BATCHES))

    floors = []
    for key in random.split(key_floor, num_bootstrap):
        key_noise, key_search = random.split(key)
        noise = random.exponential(key_noise, (num,))
        noise = noise / jnp.sum(noise) - over_model
        floors.append(abs(float(_supremum(energy, draws, noise, key_search, num_starts)[1])))
    floor = beta * float(radius) * float(np.mean(floors))
    return DualityGap(value, stderr, floor, np.asarray(neuron), float(slope), reliable, reason)


def _shallow(distribution, x):
    """The F1 energy, observations as it sees them, and the map to those units."""
    energy = getattr(distribution, "energy", None)
    unit = lambda x: x  # noqa: E731
    if isinstance(energy, StandardizedEnergy):
        table = energy
        energy, unit = table.energy, lambda x: (x - table.mean) / table.deviation
    if not isinstance(energy, F1Energy):
        raise TypeError(f"duality_gap is of a distribution with an F1Energy, got {type(energy).__name__}")
    if distribution.batch_shape:
        raise ValueError(f"duality_gap is of one distribution, got batch shape {distribution.batch_shape}")
    x = as_float(x)
    validate_observations("x", distribution, x)
    return energy, unit(jnp.reshape(x, (-1, x.shape[-1]))), unit


@partial(jax.jit, static_argnames="num_starts")
def _supremum(energy, points, weights, rng_key, num_starts):
    """The unit feature where ``|sum(weights * activation)|`` is largest, and the sum there."""
    dim = jnp.shape(energy.features)[-1]
    candidates = jnp.concatenate([jnp.asarray(energy.features), random.normal(rng_key, (_NUM_RANDOM, dim))])
    candidates = _unit(candidates)

    def slopes(features):
        return weights @ energy.activations(points, features)

    values = lax.map(lambda feature: slopes(feature[None])[0], candidates, batch_size=64)
    best = lax.top_k(jnp.abs(values), min(num_starts, len(candidates)))[1]
    signs = jnp.sign(values[best])
    optimizer = optax.adam(optax.cosine_decay_schedule(0.1, _NUM_STEPS))

    def loss(vectors):
        return -jnp.sum(signs * slopes(_unit(vectors)))

    def step(carry, _):
        vectors, state = carry
        updates, state = optimizer.update(jax.grad(loss)(vectors), state)
        vectors = _unit(optax.apply_updates(vectors, updates))
        return (vectors, state), None

    start = candidates[best]
    (found, _), _ = lax.scan(step, (start, optimizer.init(start)), length=_NUM_STEPS)
    found = jnp.concatenate([start[:1], found])
    values = slopes(found)
    best = jnp.argmax(jnp.abs(values))
    return found[best], values[best]


def _unit(vectors):
    return vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)
