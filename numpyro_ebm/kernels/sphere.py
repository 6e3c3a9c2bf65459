"""Langevin moves on the unit sphere: geodesic and exact, or as paper A published them."""

from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from jax.typing import ArrayLike

from numpyro_ebm.kernels.euclidean import check_step_size
from numpyro_ebm.kernels.langevin import AdjustedLangevin, Langevin


def _dot(a, b):
    return jnp.sum(a * b, axis=-1, keepdims=True)


@dataclass(frozen=True)
class Sphere:
    """The unit sphere with its geodesics. Moves are reversible and volume-preserving."""

    def project(self, position, vector):
        return vector - _dot(position, vector) * position

    def retract(self, position, ambient):
        velocity = self.project(position, ambient - position)
        angle = jnp.sqrt(_dot(velocity, velocity))
        sine, cosine = jnp.sinc(angle / jnp.pi), jnp.cos(angle)
        moved = cosine * position + sine * velocity
        moved = moved / jnp.sqrt(_dot(moved, moved))
        velocity_end = cosine * velocity - angle**2 * sine * position
        return moved, velocity, velocity_end


@dataclass(frozen=True)
class ProjectedSphere:
    """The unit sphere, with a Euclidean step divided by its norm."""

    def project(self, position, vector):
        return vector

    def retract(self, position, ambient):
        moved = ambient / jnp.sqrt(_dot(ambient, ambient))
        return moved, ambient - position, ambient - position


SPHERE = Sphere()
PROJECTED_SPHERE = ProjectedSphere()


def ula(step_size: ArrayLike | Callable, temperature: float = 1.0) -> Langevin:
    """Unadjusted geodesic Langevin kernel on the unit sphere.

    A tangent Gaussian, then one geodesic leapfrog step of length ``sqrt(2 * step_size)``, always
    accepted; the bias is O(step_size * (d - 1)).

    Parameters
    ----------
    step_size, temperature
        As in :func:`numpyro_ebm.kernels.ula`.

    Returns
    -------
    Langevin
        A kernel with ``init(position, logdensity_fn)`` and ``step(rng_key, state, logdensity_fn)``.

    Raises
    ------
    ValueError
        If `step_size` or `temperature` is not positive.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import random
    >>> state = ula(0.1).init(jnp.array([1.0, 0.0, 0.0]), lambda x: 2 * x[2])
    >>> state, info = ula(0.1).step(random.key(0), state, lambda x: 2 * x[2])
    >>> round(float(jnp.linalg.norm(state.position)), 5)
    1.0
    """
    check_step_size(step_size)
    return Langevin(step_size, temperature, geometry=SPHERE)


def mala(step_size: ArrayLike | Callable | None = None) -> AdjustedLangevin:
    """Metropolis-adjusted geodesic Langevin kernel on the unit sphere; exact.

    The move of :func:`ula`, accepted with the Hamiltonian difference.

    Parameters
    ----------
    step_size
        As in :func:`numpyro_ebm.kernels.mala`.

    Returns
    -------
    AdjustedLangevin
        A kernel with ``init(position, logdensity_fn)`` and ``step(rng_key, state, logdensity_fn)``.

    Raises
    ------
    ValueError
        If `step_size` is not positive.

    References
    ----------
    Byrne and Girolami (2013), Geodesic Monte Carlo on embedded manifolds.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import random
    >>> state = mala(0.1).init(jnp.array([1.0, 0.0, 0.0]), lambda x: 2 * x[2])
    >>> state, info = mala(0.1).step(random.key(0), state, lambda x: 2 * x[2])
    >>> round(float(jnp.linalg.norm(state.position)), 5)
    1.0
    """
    return AdjustedLangevin(step_size, geometry=SPHERE)


def projected(step_size: ArrayLike | Callable, temperature: float = 1.0) -> Langevin:
    """Euclidean Langevin step divided by its norm: the published move of paper A, Algorithm 1.

    Biased more than :func:`ula`, and can't be corrected by the Euclidean proposal density.

    Parameters
    ----------
    step_size, temperature
        As in :func:`numpyro_ebm.kernels.ula`.

    Returns
    -------
    Langevin
        A kernel with ``init(position, logdensity_fn)`` and ``step(rng_key, state, logdensity_fn)``.

    References
    ----------
    Domingo-Enrich et al. (2022), Dual training of energy-based models with overparametrized shallow neural networks.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import random
    >>> state = projected(0.1).init(jnp.array([1.0, 0.0, 0.0]), lambda x: 2 * x[2])
    >>> state, info = projected(0.1).step(random.key(0), state, lambda x: 2 * x[2])
    >>> round(float(jnp.linalg.norm(state.position)), 5)
    1.0
    """
    check_step_size(step_size)
    return Langevin(step_size, temperature, geometry=PROJECTED_SPHERE)
