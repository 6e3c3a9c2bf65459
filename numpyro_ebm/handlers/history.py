"""What chains were like as training went on, in memory that does not grow."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_ebm.distributions import EnergyBased
from numpyro_ebm.pool import PoolState

RECORDED = ("energy_gap", "acceptance_rate", "step_size", "max_energy", "num_nonfinite", "norm")
_NUM_ROWS = 512


class History(NamedTuple):
    """Every ``stride``-th update; the stride doubles each time that the rows are full.

    Attributes
    ----------
    rows
        :data:`RECORDED` values, shape ``(512, 6)``, the first ``ceil(num_updates / stride)`` of them in use.
    num_updates
        Updates so far.
    stride
        Updates from a row to the next.
    """

    rows: jax.Array
    num_updates: jax.Array
    stride: jax.Array


def empty_history() -> History:
    """Before the first update."""
    rows = jnp.full((_NUM_ROWS, len(RECORDED)), jnp.nan)
    return History(rows, jnp.zeros((), jnp.int32), jnp.ones((), jnp.int32))


def record(history: History, state: PoolState, distribution: EnergyBased) -> History:
    """One update more."""
    norm: Any = getattr(distribution.energy, "norm", jnp.nan)
    values = [norm if name == "norm" else getattr(state, name) for name in RECORDED]
    row = jnp.stack([jnp.mean(jnp.asarray(value, history.rows.dtype)) for value in values])
    rows, num, stride = history
    is_full = num == _NUM_ROWS * stride
    half = jnp.concatenate([rows[::2], jnp.full_like(rows[::2], jnp.nan)])
    rows, stride = jnp.where(is_full, half, rows), jnp.where(is_full, 2 * stride, stride)
    rows = jnp.where(num % stride == 0, rows.at[num // stride].set(jax.lax.stop_gradient(row)), rows)
    return History(rows, num + 1, stride)
