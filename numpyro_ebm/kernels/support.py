"""Kernels on the support of a distribution."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from numpyro.distributions import biject_to, constraints

from numpyro_ebm.distributions import is_sphere
from numpyro_ebm.energies import as_float
from numpyro_ebm.kernels.langevin import EUCLIDEAN, Langevin, LangevinInfo, LangevinState
from numpyro_ebm.kernels.sphere import SPHERE


class ConstrainedState(NamedTuple):
    """State of a chain on a bounded support.

    Attributes
    ----------
    position
        Position in the support, shape ``(*batch, *event)``.
    unconstrained
        State of the chain that moves in the unconstrained space.
    """

    position: jax.Array
    unconstrained: LangevinState

    @property
    def logdensity(self):
        """Log-density in the unconstrained space: with the log-determinant of the transform."""
        return self.unconstrained.logdensity

    @property
    def logdensity_grad(self):
        """Gradient in the unconstrained space."""
        return self.unconstrained.logdensity_grad

    @property
    def num_moves(self):
        return self.unconstrained.num_moves


@dataclass(frozen=True)
class Constrained:
    """A kernel that moves in the unconstrained space of `support`; made by :func:`on_support`."""

    kernel: Langevin
    support: constraints.Constraint

    def init(self, position: jax.Array, logdensity_fn: Callable, num_moves: ArrayLike = 0) -> ConstrainedState:
        """State of chains at `position`, which is in the support (points on its edge are moved in)."""
        unconstrained = biject_to(self.support).inv(as_float(position))
        # a point on the edge is infinitely far out: take one about a rounding error inside
        edge = 1 - jnp.log(jnp.finfo(unconstrained.dtype).eps)
        unconstrained = jnp.nan_to_num(unconstrained, nan=jnp.nan, posinf=edge, neginf=-edge)
        return self._outer(self.kernel.init(unconstrained, self._pull_back(logdensity_fn), num_moves))

    def step(
        self, rng_key: jax.Array, state: ConstrainedState, logdensity_fn: Callable
    ) -> tuple[ConstrainedState, LangevinInfo]:
        """Move once; the density carries the log-determinant of the transform."""
        inner, info = self.kernel.step(rng_key, state.unconstrained, self._pull_back(logdensity_fn))
        return self._outer(inner), info

    def _outer(self, inner):
        return ConstrainedState(biject_to(self.support)(inner.position), inner)

    def _pull_back(self, logdensity_fn):
        transform = biject_to(self.support)

        def unconstrained_logdensity(unconstrained):
            position = transform(unconstrained)
            value = logdensity_fn(position)
            log_det = transform.log_abs_det_jacobian(unconstrained, position)
            return value + jnp.sum(log_det, axis=tuple(range(value.ndim, jnp.ndim(log_det))))

        return unconstrained_logdensity


def on_support(kernel: Langevin, support: constraints.Constraint) -> Langevin | Constrained:
    """Return the kernel that moves as `kernel` does, on `support`.

    On R^d that is `kernel`; on the unit sphere, `kernel` with geodesics (unless it has a geometry
    of its own); anywhere else, `kernel` in the unconstrained space of NumPyro's ``biject_to``.

    Parameters
    ----------
    kernel
        From :func:`~numpyro_ebm.kernels.ula` or :func:`~numpyro_ebm.kernels.mala`.
    support
        Constraint of NumPyro, or of :class:`~numpyro_ebm.SphereUniform`.

    Raises
    ------
    ValueError
        If the support is discrete.

    Examples
    --------
    >>> import jax.numpy as jnp, numpyro.distributions as dist
    >>> from numpyro_ebm import kernels
    >>> kernel = kernels.on_support(kernels.mala(0.1), dist.constraints.unit_interval)
    >>> float(kernel.init(jnp.array(0.25), dist.Beta(2, 3).log_prob).position)
    0.25
    """
    inner = support
    while isinstance(inner, constraints.independent):
        inner = inner.base_constraint
    if inner.is_discrete:
        raise ValueError(f"Langevin moves need a continuous support, got {support}")
    if inner is constraints.real or isinstance(kernel, Constrained):
        return kernel
    if is_sphere(inner):
        return replace(kernel, geometry=SPHERE) if kernel.geometry == EUCLIDEAN else kernel
    return Constrained(kernel, support)
