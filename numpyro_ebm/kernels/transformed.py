"""Kernels that move in other coordinates."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from numpyro.distributions.transforms import Transform

from numpyro_ebm.energies import as_float
from numpyro_ebm.kernels.langevin import LangevinInfo, LangevinState


class TransformedState(NamedTuple):
    """State of a chain that moves in other coordinates.

    Attributes
    ----------
    position
        Position, shape ``(*batch, *event)``.
    unconstrained
        State of the chain in the coordinates that it moves in.
    """

    position: jax.Array
    unconstrained: LangevinState

    @property
    def logdensity(self):
        """Log-density in the coordinates that it moves in: with the log-determinant of the transform."""
        return self.unconstrained.logdensity

    @property
    def logdensity_grad(self):
        """Gradient in the coordinates that it moves in."""
        return self.unconstrained.logdensity_grad

    @property
    def num_moves(self):
        return self.unconstrained.num_moves


@dataclass(frozen=True)
class Transformed:
    """A kernel that moves where `transform` maps from: R^d in other units, or unconstrained.

    Made by :func:`~numpyro_ebm.kernels.on_support`, or by a kernel's `scale`.

    Parameters
    ----------
    kernel
        A kernel on R^d.
    transform
        From where it moves to where the density is.

    Examples
    --------
    >>> import jax.numpy as jnp, numpyro.distributions as dist
    >>> from numpyro_ebm import kernels
    >>> kernel = Transformed(kernels.mala(0.1), dist.transforms.ExpTransform())
    >>> float(kernel.init(jnp.array(2.0), dist.Exponential(1).log_prob).position)
    2.0
    """

    kernel: Any
    transform: Transform

    @property
    def step_size(self):
        return self.kernel.step_size

    def with_step_size(self, step_size: ArrayLike) -> "Transformed":
        """This kernel with another step size."""
        return replace(self, kernel=self.kernel.with_step_size(step_size))

    def init(self, position: jax.Array, logdensity_fn: Callable, num_moves: ArrayLike = 0) -> TransformedState:
        """State of chains at `position`, which is in the support (points on its edge are moved in).

        Raises
        ------
        ValueError
            If the transform, a kernel's `scale` among them, does not fit the positions' shape.
        """
        position = as_float(position)
        try:
            unconstrained = self.transform.inv(position)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"the kernel's scale or transform does not fit positions of shape {position.shape} ({error}): give a scale of the "
                "shape of one event"
            ) from error
        # a point on the edge is infinitely far out: take one about a rounding error inside
        edge = 1 - jnp.log(jnp.finfo(unconstrained.dtype).eps)
        unconstrained = jnp.nan_to_num(unconstrained, nan=jnp.nan, posinf=edge, neginf=-edge)
        return self._outer(self.kernel.init(unconstrained, self._pull_back(logdensity_fn), num_moves))

    def step(
        self, rng_key: jax.Array, state: TransformedState, logdensity_fn: Callable
    ) -> tuple[TransformedState, LangevinInfo]:
        """Move once; the density carries the log-determinant of the transform."""
        inner, info = self.kernel.step(rng_key, state.unconstrained, self._pull_back(logdensity_fn))
        return self._outer(inner), info

    def _outer(self, inner):
        return TransformedState(self.transform(inner.position), inner)

    def _pull_back(self, logdensity_fn):
        transform = self.transform

        def unconstrained_logdensity(unconstrained):
            position = transform(unconstrained)
            value = logdensity_fn(position)
            log_det = transform.log_abs_det_jacobian(unconstrained, position)
            return value + jnp.sum(log_det, axis=tuple(range(value.ndim, jnp.ndim(log_det))))

        return unconstrained_logdensity
