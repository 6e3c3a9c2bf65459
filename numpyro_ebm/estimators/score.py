"""Score matching: no chains and no normaliser, for observed sites on R^d and on spheres."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax import lax, random
from numpyro.distributions import constraints

from numpyro_ebm.distributions import EnergyBased, StandardizedEnergy, guard, is_sphere
from numpyro_ebm.energies import F1Energy, F2Energy, check_positive, check_size
from numpyro_ebm.kernels import SPHERE
from numpyro_ebm.pool import Observations

_LARGEST_ANGLE = 0.5


@dataclass(frozen=True)
class ScoreMatching:
    r"""Fit the score of the model to that of the data.

    With the model's score :math:`s = \nabla \log \tau - \beta \nabla f`, on R^d or, with its own
    gradient and divergence, on the sphere, the objective of an observation x is minus

    - ``"explicit"``: :math:`|s(x)|^2 / 2 + \mathrm{div}\, s(x)`,
    - ``"sliced"``: the same, its divergence estimated by :math:`v^\top \nabla s(x)\, v` for Gaussian v,
    - ``"denoising"``: :math:`|s(\tilde x) - \nabla \log q(\tilde x | x)|^2 / 2`, where q adds noise of
      the scale `noise_scale` (on the sphere, along a random geodesic).

    Parameters
    ----------
    kind
        ``"explicit"``, ``"sliced"`` or ``"denoising"``.
    num_slices
        Number of directions of the sliced kind, or of noisy copies of the denoising one, per observation.
    noise_scale
        Standard deviation of the noise of the denoising kind, in the units of x; on the sphere in radians.

    Raises
    ------
    ValueError
        If an argument is out of its range. At a site: if it is latent, its support is neither R^d nor
        the unit sphere, its observations sit in a batch of energies of another shape; for the
        derivatives that automatic differentiation drops at the kinks of F1 and F2 energies: explicit
        and sliced, for a power of 1, and of 2 with learned features; denoising, for a power of 1 with
        learned features.

    Notes
    -----
    Explicit and sliced score matching are unbiased for the Fisher divergence, whose minimiser is the
    likelihood's only where the model is well specified. Denoising fits the data smoothed by the noise:
    its bias is of the order of ``noise_scale**2``. The kinks of other networks of ReLUs, and of energies
    wrapped in functions, are not detected: use smooth activations. Where modes are far apart, scores do not tell their weights. The objective is no
    likelihood: guides over an energy's own parameters do not get their posterior.

    Costs per observation: explicit, one gradient and d of its directional derivatives; sliced and
    denoising, `num_slices` of either.

    References
    ----------
    Hyvärinen (2005), Estimation of non-normalized statistical models by score matching.
    Vincent (2011), A connection between score matching and denoising autoencoders.
    Song et al. (2019), Sliced score matching.
    Mardia, Kent and Laha (2016), Score matching estimators for directional distributions.

    Examples
    --------
    >>> estimator = ScoreMatching("sliced", num_slices=4)
    """

    kind: str = "explicit"
    num_slices: int = 1
    noise_scale: float | None = None

    has_state: ClassVar[bool] = False

    def __post_init__(self):
        if self.kind not in ("explicit", "sliced", "denoising"):
            raise ValueError(f"kind must be 'explicit', 'sliced' or 'denoising', got {self.kind!r}")
        check_size("num_slices", self.num_slices)
        if (self.noise_scale is None) == (self.kind == "denoising"):
            raise ValueError(
                "denoising score matching needs a noise_scale"
                if self.noise_scale is None
                else f"noise_scale is for kind='denoising', got kind={self.kind!r}"
            )
        if self.noise_scale is not None:
            check_positive("noise_scale", self.noise_scale)

    def init(self, rng_key: jax.Array, distribution: EnergyBased, observations: Observations) -> tuple:
        """Return the state before the first update, which is empty.

        Raises
        ------
        ValueError
            If the site can't be fitted by score matching.
        """
        if observations.value is None:
            raise ValueError("ScoreMatching fits observations, but the site is latent: use ContrastiveDivergence")
        support = distribution.support
        while isinstance(support, constraints.independent):
            support = support.base_constraint
        if not (support is constraints.real or is_sphere(support)):
            raise ValueError(
                f"ScoreMatching needs R^d or the unit sphere, got the support {distribution.support}, at whose bounds the score "
                "has a term that it lacks: transform x, or use ContrastiveDivergence"
            )
        if is_sphere(support) and self.noise_scale is not None and self.noise_scale > _LARGEST_ANGLE:
            raise ValueError(
                f"noise_scale must be at most {_LARGEST_ANGLE} radians on a sphere, got {self.noise_scale}: noise that reaches the "
                "other pole has a score without variance"
            )
        self._check_kinks(distribution)
        return ()

    def _check_kinks(self, distribution):
        energy = distribution.energy
        energy = energy.energy if isinstance(energy, StandardizedEnergy) else energy
        if not isinstance(energy, F1Energy | F2Energy):
            return
        activation = getattr(energy, "activation", None)
        if activation not in (None, jax.nn.relu):
            return
        power = energy.power if activation is None else 1
        least, hint = (3, "use power=3 or a smooth activation") if self.kind != "denoising" else (2, "use power=2")
        if power >= least:
            return
        error = ValueError(
            f"{self.kind} score matching of learned features needs a power of at least {least}, got {power}: automatic "
            f"differentiation drops what the kinks of the ReLU add; {hint}"
        )
        if self.kind != "denoising" and power == 1:
            raise ValueError(
                f"{self.kind} score matching needs a power of at least 2, and of 3 with learned features, got 1: automatic "
                f"differentiation drops what the kinks of the ReLU add; {hint}"
            )
        guard([energy.features], error)

    def update(
        self, rng_key: jax.Array, state: tuple, distribution: EnergyBased, observations: Observations
    ) -> tuple[Callable, tuple]:
        """Return minus the score-matching loss as a function of observations, and the empty state."""
        self._check_kinks(distribution)
        event_shape, size = distribution.event_shape, math.prod(distribution.event_shape)

        def objective(value):
            batch_shape = jnp.broadcast_shapes(value.shape[: value.ndim - len(event_shape)], distribution.batch_shape)
            x = jnp.reshape(jnp.broadcast_to(value, (*batch_shape, *event_shape)), (*batch_shape, size))
            x = lax.stop_gradient(x)

            def density(x):
                return distribution.unnormalized_log_prob(jnp.reshape(x, (*batch_shape, *event_shape)))

            def gradient(x):
                return jax.grad(lambda x: jnp.sum(density(x)))(x)

            geometry = _SphereScore(gradient) if is_sphere(distribution.support) else _EuclideanScore(gradient)
            if self.kind == "explicit":
                return -_explicit(geometry, x)
            fn = _sliced if self.kind == "sliced" else _denoising
            keys = random.split(rng_key, self.num_slices)
            return -jnp.mean(jax.vmap(lambda key: fn(geometry, x, key, self.noise_scale))(keys), axis=0)

        return objective, state


@dataclass(frozen=True)
class _EuclideanScore:
    gradient: Callable

    def score(self, x):
        return self.gradient(x)

    def quadratic(self, x, v):
        """The score, and the part of its divergence along the vector `v`."""
        score, change = jax.jvp(self.gradient, (x,), (v,))
        return score, jnp.sum(v * change, -1)

    def correction(self, x, gradient):
        return 0.0

    def tangent(self, x, v):
        return v

    def noisy(self, x, noise, scale):
        """A noisy copy of x, and the score of its distribution given x."""
        return x + scale * noise, -noise / scale


@dataclass(frozen=True)
class _SphereScore:
    """With `gradient` in the ambient space: div s = tr(P H P) - (d - 1) <x, gradient>."""

    gradient: Callable

    def score(self, x):
        return SPHERE.project(x, self.gradient(x))

    def quadratic(self, x, v):
        gradient, change = jax.jvp(self.gradient, (x,), (v,))
        return gradient, jnp.sum(v * change, -1)

    def correction(self, x, gradient):
        return -(x.shape[-1] - 1) * jnp.sum(x * gradient, -1)

    def tangent(self, x, v):
        return SPHERE.project(x, v)

    def noisy(self, x, noise, scale):
        """Along a geodesic of Gaussian length: q has density exp(-a^2 / 2 scale^2) (a / sin a)^(d-2) at angle a."""
        velocity = scale * SPHERE.project(x, noise)
        moved, _, velocity_end = SPHERE.retract(x, x + velocity)
        angle = jnp.linalg.norm(velocity, axis=-1, keepdims=True)
        small = angle < 0.1
        safe = jnp.where(small, 1.0, angle)
        bend = jnp.where(small, 1 / 3 + angle**2 / 45, 1 / safe**2 - 1 / (safe * jnp.tan(safe)))
        return moved, velocity_end * ((x.shape[-1] - 2) * bend - 1 / scale**2)


def _loss(geometry, x, gradient, divergence):
    score = geometry.tangent(x, gradient)
    return jnp.sum(score**2, -1) / 2 + divergence + geometry.correction(x, gradient)


def _explicit(geometry, x):
    def along(basis):
        return geometry.quadratic(x, geometry.tangent(x, jnp.broadcast_to(basis, x.shape)))

    gradients, parts = jax.vmap(along, out_axes=(None, 0))(jnp.eye(x.shape[-1], dtype=x.dtype))
    return _loss(geometry, x, gradients, jnp.sum(parts, axis=0))


def _sliced(geometry, x, rng_key, noise_scale):
    v = geometry.tangent(x, random.normal(rng_key, x.shape, x.dtype))
    return _loss(geometry, x, *geometry.quadratic(x, v))


def _denoising(geometry, x, rng_key, noise_scale):
    moved, target = geometry.noisy(x, random.normal(rng_key, x.shape, x.dtype), noise_scale)
    return jnp.sum((geometry.score(moved) - target) ** 2, -1) / 2
