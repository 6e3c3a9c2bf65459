"""Energies of a table, whose columns have units of their own."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.typing import ArrayLike
from numpyro.util import not_jax_tracer

from numpyro_ebm.distributions.energy_based import EnergyBased
from numpyro_ebm.energies import Energy, as_energy, as_float


@dataclass(frozen=True)
class StandardizedEnergy(Energy):
    """An energy of ``(x - mean) / deviation``."""

    energy: Energy
    mean: ArrayLike
    deviation: ArrayLike

    @property
    def batch_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.energy.batch_shape

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.energy((x - self.mean) / self.deviation)


jax.tree_util.register_dataclass(StandardizedEnergy, ["energy", "mean", "deviation"], [])


def standardized(energy: Any, x: ArrayLike, inverse_temperature: Any = 1.0) -> EnergyBased:
    """Return the distribution of an energy of standardised columns, over a normal base with the data's moments.

    The energy is called on columns of mean 0 and standard deviation 1, while the distribution, its
    log-densities, scores and chains are in the units of `x`. Pools without a step size move in units
    of the columns' standard deviations; for :class:`~numpyro_ebm.DualSGDA` give them:
    ``kernel=lambda step_size: kernels.mala(step_size, scale=x.std(0))``. In `MCMC` sample such a table by
    NUTS, which adapts to the columns' units; :class:`~numpyro_ebm.MALA` has one step size for all of them.

    Parameters
    ----------
    energy
        :class:`~numpyro_ebm.Energy`, or a callable of single standardised events.
    x
        The data, shape ``(n, d)`` or ``(n,)``: all of it, not a minibatch. A data frame of numbers does.
    inverse_temperature
        As in :class:`~numpyro_ebm.EnergyBased`.

    Returns
    -------
    EnergyBased
        In the units of `x`.

    Raises
    ------
    ValueError
        If `x` is not such a table, or a column is constant or holds values that are not finite
        (values are checked outside `jax.jit`).

    Examples
    --------
    >>> import numpy as np, jax.numpy as jnp
    >>> x = np.array([[1e4, -1e-3], [3e4, 1e-3], [2e4, 0.0]])
    >>> d = standardized(lambda z: jnp.sum(z**4), x)
    >>> d.base.mean.tolist()
    [20000.0, 0.0]
    """
    if not isinstance(x, jax.Array):
        try:
            x = np.asarray(x, float)
        except (TypeError, ValueError) as error:
            raise ValueError(f"x must be a table of numbers: encode or drop other columns ({error})") from error
    if np.ndim(x) not in (1, 2) or np.shape(x)[0] < 2 or 0 in np.shape(x):
        raise ValueError(f"x must have shape (n, d) or (n,) with two rows or more, got {np.shape(x)}")
    if not_jax_tracer(x):
        values = np.asarray(x, np.float64)
        faults = np.argwhere(~np.isfinite(values))
        if len(faults):
            place = ", ".join(f"{axis} {int(i)}" for axis, i in zip(("row", "column"), faults[0], strict=False))
            raise ValueError(f"x must be finite, got {values[tuple(faults[0])]} at {place} ({len(faults)} such)")
        # a constant's deviation is a matter of rounding
        constant = np.flatnonzero(values.std(0) <= 1e-6 * np.abs(values).max(0))
        if len(constant):
            raise ValueError(
                f"column {int(constant[0])} of x is constant, or varies by less than a millionth of its size, which is lost in "
                "single precision: leave it out, or subtract an offset from it"
            )
        dtype = as_float(x).dtype
        mean, deviation = jnp.asarray(values.mean(0), dtype), jnp.asarray(values.std(0), dtype)
    else:
        mean = jnp.mean(as_float(x), 0)
        deviation = jnp.sqrt(jnp.mean((x - mean) ** 2, 0))
    base = dist.Normal(mean, deviation)
    base = base.to_event(1) if np.ndim(x) == 2 else base
    inner = as_energy(energy, base.event_shape)
    return EnergyBased(StandardizedEnergy(inner, mean, deviation), base, inverse_temperature)
