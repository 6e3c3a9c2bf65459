"""Langevin moves on R^d."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from numpyro.distributions.transforms import AffineTransform

from numpyro_ebm.energies import check_positive
from numpyro_ebm.kernels.langevin import AdjustedLangevin, Langevin
from numpyro_ebm.kernels.transformed import Transformed


def ula(
    step_size: ArrayLike | Callable, temperature: float = 1.0, scale: ArrayLike | None = None
) -> Langevin | Transformed:
    """Unadjusted Langevin kernel: ``x + step_size * grad log p + sqrt(2 * temperature * step_size) * noise``.

    Its stationary law is off the target by O(step_size), and it can run away where gradients grow
    faster than linearly. A move to a non-finite log-density is made, and flagged in the info.

    Parameters
    ----------
    step_size
        Positive number, or an optax schedule: a function of the number of moves made.
    temperature
        Positive; below 1 the noise is reduced.
    scale
        Units of length of the coordinates, such as their standard deviations; a positive number or
        array that broadcasts against positions on R^d. Moves are then those of ``x / scale``.

    Returns
    -------
    Langevin
        ``init(position, logdensity_fn)`` and ``step(rng_key, state, logdensity_fn)``. Positions
        may be batches of independent chains: `logdensity_fn` maps ``(*batch, *event)`` to
        ``batch``. One gradient per move.

    Raises
    ------
    ValueError
        If `step_size`, `temperature` or `scale` is not positive.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import random
    >>> kernel = ula(1e-2)
    >>> state = kernel.init(jnp.zeros(2), lambda x: -jnp.sum(x**2) / 2)
    >>> state, info = kernel.step(random.key(0), state, lambda x: -jnp.sum(x**2) / 2)
    """
    check_step_size(step_size)
    return _scaled(Langevin(step_size, temperature), scale)


def mala(
    step_size: ArrayLike | Callable | None = None, scale: ArrayLike | None = None
) -> AdjustedLangevin | Transformed:
    """Metropolis-adjusted Langevin kernel: the move of :func:`ula`, accepted so that it is exact.

    A proposal with a non-finite log-density or gradient is rejected and flagged in the info. Each
    chain of a batch is accepted on its own. One gradient per move.

    Parameters
    ----------
    step_size
        Positive number, or an optax schedule: a function of the number of moves made. None: a
        :class:`~numpyro_ebm.ChainPool` adapts it to an acceptance of 0.574 while parameters are trained.
    scale
        As in :func:`ula`. Where `step_size` is None, a pool takes the standard deviations of the
        base where it has them.

    Returns
    -------
    AdjustedLangevin or Transformed
        A kernel with ``init(position, logdensity_fn)`` and ``step(rng_key, state, logdensity_fn)``.

    Raises
    ------
    ValueError
        If `step_size` or `scale` is not positive.

    References
    ----------
    Roberts and Tweedie (1996), Exponential convergence of Langevin distributions and their discrete approximations.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from jax import random
    >>> kernel = mala(0.1)
    >>> state = kernel.init(jnp.zeros((5, 2)), lambda x: -jnp.sum(x**2, -1) / 2)     # five chains
    >>> state, info = kernel.step(random.key(0), state, lambda x: -jnp.sum(x**2, -1) / 2)
    >>> info.acceptance_rate.shape
    (5,)
    """
    return _scaled(AdjustedLangevin(step_size), scale)


def _scaled(kernel, scale):
    if scale is None:
        return kernel
    if not isinstance(scale, jax.core.Tracer):
        values = np.asarray(scale)
        if not (np.issubdtype(values.dtype, np.number) and np.all(np.isfinite(values)) and np.all(values > 0)):
            raise ValueError(f"scale must be positive and finite, got {scale!r}")
    return Transformed(kernel, AffineTransform(0.0, jnp.asarray(scale, jnp.result_type(float))))


def check_step_size(step_size: Any) -> None:
    """Raise `ValueError` unless `step_size` is a positive number or a schedule."""
    if not callable(step_size):
        check_positive("step_size", step_size)
