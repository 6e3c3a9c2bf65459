"""Quadrature: the exact normaliser, in one or two dimensions."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax
from jax.scipy.special import logsumexp
from numpyro.distributions import biject_to, constraints
from numpyro.util import not_jax_tracer

from numpyro_ebm.distributions import EnergyBased, is_sphere
from numpyro_ebm.energies import check_size
from numpyro_ebm.pool import Observations, deviation_of

_FARTHEST = 50.0  # standard deviations
_FARTHEST_LOGIT = 20.0  # unconstrained units
_LARGEST_ERROR = 0.05  # nats that the base's own log Z may be off


@dataclass(frozen=True)
class Quadrature:
    r"""Compute log Z on a grid: exact to the rule's error, in one or two dimensions.

    On R^d nodes are spread by a hyperbolic sine around the base's mean, in units of its standard deviation;
    on bounded supports the same in the unconstrained space of NumPyro's ``biject_to``; both by the
    trapezoidal rule, which converges exponentially for smooth densities. On S^2 by Gauss-Legendre's rule in the
    last coordinate and an even one in the angle; on S^1 by an even one.

    Parameters
    ----------
    num_points
        Number of nodes in each dimension; by default 2,000 in one, 200 in each of two.
    bounds
        ``(low, high)``, numbers or one for each coordinate: integrate over this box instead, by Gauss-Legendre's
        rule. What a flat base on R^d needs.

    Raises
    ------
    ValueError
        If an argument is out of its range. At a site: for more than two dimensions, a base on R^d without mean
        and variance and no `bounds`, a base whose own mass the nodes miss by 5 % (outside `jax.jit`), or `bounds` on a
        sphere.

    Notes
    -----
    Costs ``num_points**d`` densities per update. Kinks leave an error of the order of ``1 / num_points**2``. The
    grid has to resolve the energy: what is narrower than the distance of nodes (at 200, a twentieth of the base's
    standard deviation at its mean, a seventh three of them away) is missed, and a large network can learn to hide
    there. Compare :meth:`log_normalizer` with that of another `num_points`.

    Examples
    --------
    >>> import numpyro_ebm as ebm, numpyro.distributions as dist
    >>> d = ebm.EnergyBased(lambda x: 4 * x**2, dist.Normal(0, 1))
    >>> round(float(Quadrature().log_normalizer(d)), 4)     # log(1 / 3)
    -1.0986
    """

    num_points: int | None = None
    bounds: Any = None

    has_state: ClassVar[bool] = False

    def __post_init__(self):
        if self.num_points is not None:
            check_size("num_points", self.num_points)
            if self.num_points < 10:
                raise ValueError(f"num_points must be at least 10, got {self.num_points}")
        if self.bounds is not None:
            low, high = self._box(None)
            if not (np.all(np.isfinite(low)) and np.all(np.isfinite(high)) and np.all(low < high)):
                raise ValueError(f"bounds must be finite, with low < high, got {self.bounds!r}")

    def _box(self, size):
        try:
            low, high = (np.asarray(bound, float) for bound in self.bounds)
            return (low, high) if size is None else (np.broadcast_to(low, size), np.broadcast_to(high, size))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"bounds must be (low, high), numbers or one for each coordinate, got {self.bounds!r}"
            ) from error

    def init(self, rng_key: jax.Array, distribution: EnergyBased, observations: Observations) -> tuple:
        """Return the state before the first update, which is empty."""
        self.log_normalizer(distribution)
        return ()

    def update(
        self, rng_key: jax.Array, state: tuple, distribution: EnergyBased, observations: Observations
    ) -> tuple[Callable, tuple]:
        """Return the log-likelihood as a function of observations, and the empty state."""
        log_z = self.log_normalizer(distribution)
        return lambda value: distribution.unnormalized_log_prob(value) - log_z, state

    def log_normalizer(self, distribution: EnergyBased) -> jax.Array:
        """log Z, of the batch shape; differentiable in what the distribution is made of."""
        nodes, log_weights = self.nodes(distribution)
        if self.bounds is None and not isinstance(distribution.base, dist.ImproperUniform):
            mass = logsumexp(distribution.base.log_prob(nodes) + log_weights, axis=0)
            if not_jax_tracer(mass) and not np.all(np.abs(mass) < _LARGEST_ERROR):
                raise ValueError(
                    f"the nodes miss the base {type(distribution.base).__name__}: its own log Z comes out as {mass}, not 0. Say where "
                    "its mass is by Quadrature(bounds=(low, high)), or take more num_points"
                )
        log_z = logsumexp(distribution.unnormalized_log_prob(nodes) + log_weights, axis=0)
        return jnp.broadcast_to(log_z, distribution.batch_shape)

    def nodes(self, distribution: EnergyBased) -> tuple[jax.Array, jax.Array]:
        """Nodes, and the logarithms of their weights with respect to the measure that densities have.

        Returns
        -------
        jax.Array
            Shape ``(n, *batch, *event_shape)``, where ``batch`` broadcasts against the batch shape.
        jax.Array
            Shape ``(n, *batch)``.
        """
        support, event_shape = distribution.support, distribution.event_shape
        while isinstance(support, constraints.independent):
            support = support.base_constraint
        size = math.prod(event_shape)
        if support.is_discrete:
            raise ValueError(f"Quadrature needs a continuous support, got {distribution.support}")
        if is_sphere(support):
            nodes, log_weights = self._sphere(size)
        elif size > 2:
            raise ValueError(f"Quadrature is for one or two dimensions, got events of shape {event_shape}")
        elif self.bounds is not None:
            nodes, log_weights = self._bounded(size)
        else:
            nodes, log_weights = self._spread(size, _FARTHEST if support is constraints.real else _FARTHEST_LOGIT)
        ones = [1] * len(distribution.batch_shape)
        nodes = jnp.asarray(nodes, jnp.result_type(float)).reshape(-1, *ones, *event_shape)
        log_weights = jnp.asarray(log_weights, nodes.dtype).reshape(-1, *ones)
        if self.bounds is not None or is_sphere(support):
            return nodes, log_weights
        event = tuple(range(-len(event_shape), 0))
        if support is constraints.real:
            mean, deviation = _moments(distribution)
            return mean + deviation * nodes, log_weights + jnp.sum(jnp.log(deviation), event)
        transform = biject_to(support)
        if transform.domain.event_dim:
            raise ValueError(f"Quadrature is for R^d, boxes and spheres, got the support {distribution.support}")
        moved = transform(nodes)
        return moved, log_weights + jnp.sum(transform.log_abs_det_jacobian(nodes, moved), event)

    def _number(self, size):
        return self.num_points or (2_000 if size == 1 else 200)

    def _spread(self, size, farthest):
        """Equal steps in t, where u = sinh(t)."""
        end = np.arcsinh(farthest)
        t, step = np.linspace(-end, end, self._number(size), retstep=True)
        return _product([np.sinh(t)] * size, [np.log(step * np.cosh(t))] * size)

    def _bounded(self, size):
        low, high = self._box(size)
        points, weights = np.polynomial.legendre.leggauss(self._number(size))
        nodes = [low[i] + (high[i] - low[i]) * (points + 1) / 2 for i in range(size)]
        return _product(nodes, [np.log(weights * (high[i] - low[i]) / 2) for i in range(size)])

    def _sphere(self, dim):
        if self.bounds is not None:
            raise ValueError("bounds are for R^d, but the support is a sphere")
        if dim > 3:
            raise ValueError(f"Quadrature is for the spheres S^1 and S^2, got one in {dim} dimensions")
        num = self._number(dim - 1)
        angle = 2 * np.pi * np.arange(num) / num
        if dim == 2:
            return np.stack([np.cos(angle), np.sin(angle)], -1), np.full(num, -np.log(num))
        height, weights = np.polynomial.legendre.leggauss(num)
        height, angle = (part.ravel() for part in np.meshgrid(height, angle, indexing="ij"))
        radius = np.sqrt(1 - height**2)
        nodes = np.stack([radius * np.cos(angle), radius * np.sin(angle), height], -1)
        return nodes, np.repeat(np.log(weights / (2 * num)), num)


def _product(points, log_weights):
    """The product rule of one-dimensional ones: nodes ``(n, size)`` and log-weights ``(n,)``."""
    if not points:
        raise ValueError("Quadrature needs events of at least one dimension")
    nodes = np.stack([part.ravel() for part in np.meshgrid(*points, indexing="ij")], -1)
    return nodes, sum(part.ravel() for part in np.meshgrid(*log_weights, indexing="ij"))


def _moments(distribution):
    """Mean and standard deviation of the base; 0 and 1 where heavy tails have none."""
    try:
        mean, deviation = distribution.base.mean, deviation_of(distribution.base)
    except NotImplementedError as error:
        raise ValueError(
            f"Quadrature spreads its nodes by the base's mean and variance, which {type(distribution.base).__name__} lacks: say "
            "where by Quadrature(bounds=(low, high))"
        ) from error
    known = jnp.isfinite(mean) & jnp.isfinite(deviation)
    return lax.stop_gradient((jnp.where(known, mean, 0), jnp.where(known, deviation, 1)))
