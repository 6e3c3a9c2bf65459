"""Observations are looked at before training."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.multihost_utils import process_allgather
from numpyro.util import not_jax_tracer

from numpyro_ebm.distributions.energy_based import EnergyBased


def validate_observations(name: str, distribution: EnergyBased, value: Any) -> None:
    """Raise if there are no observations, or they are not finite, off the support or of the wrong shape.

    Parameters
    ----------
    name
        Name of the site, for the message.
    distribution
        The distribution of the site.
    value
        Observations, shape ``(..., *event_shape)``. Values under a `jax` transformation can't be
        looked at; only their shape is checked.

    Raises
    ------
    ValueError
        With the row, and for arrays of vectors the column, of the first fault.
    """
    shape, event_dim = jnp.shape(value), distribution.event_dim
    if len(shape) < event_dim or shape[len(shape) - event_dim :] != distribution.event_shape:
        raise ValueError(
            f"site {name!r}: observations have shape {shape}, which does not end in the event shape "
            f"{distribution.event_shape} of the base"
        )
    if 0 in shape:
        raise ValueError(f"site {name!r}: there are no observations, their shape is {shape}")
    inside = distribution.support(jnp.asarray(value))
    if not_jax_tracer(value) and not_jax_tracer(inside):
        refuse_faults(name, value, inside, distribution.support)


def refuse_faults(name: str, value: Any, inside: Any, support: Any) -> None:
    """Raise for the first entry of `value` that is not finite, then for the first False of `inside`.

    Parameters
    ----------
    name
        Name of the site.
    value, inside
        Observations, and whether each lies in the support.
    support
        The support, or its text, for the message.

    Raises
    ------
    ValueError
        With the row, and for arrays of vectors the column.
    """
    if bool(jnp.all(jnp.isfinite(value)) & jnp.all(inside)):  # where the values are, on whichever devices
        return
    value, inside = _on_host(value), _on_host(inside)
    if not np.issubdtype(value.dtype, np.floating):
        value = value.astype(np.float32)
    faults = np.argwhere(~np.isfinite(value))
    if len(faults):
        raise ValueError(
            f"site {name!r}: observations must be finite, got {value[tuple(faults[0])]} at {_place(faults[0])} "
            f"({len(faults)} such {'entry' if len(faults) == 1 else 'entries'}): remove or impute the rows"
        )
    faults = np.argwhere(~inside)
    if len(faults):
        event = value[tuple(faults[0])]
        norm = f", of norm {np.linalg.norm(event):.6g}" if "Sphere" in str(support) else ""
        raise ValueError(
            f"site {name!r}: observations must lie in the support {support}, but {_place(faults[0])} does not: "
            f"{np.array2string(event, precision=4, threshold=6)}{norm} ({len(faults)} such)"
        )


def _on_host(value):
    """The whole array, also where other processes hold parts of it."""
    if isinstance(value, jax.Array) and not value.is_fully_addressable:
        value = process_allgather(value, tiled=True)
    return np.asarray(value)


def _place(index):
    return ", ".join(
        f"{label} {int(i)}" for label, i in zip(("row", "column", *["dimension"] * 9), index, strict=False)
    )
