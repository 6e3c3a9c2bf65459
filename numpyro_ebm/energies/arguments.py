"""Numbers among arguments: checked and converted once, in the same words everywhere."""

import math
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike


def check_positive(name: str, value: Any) -> None:
    """Raise `ValueError` unless `value` is a positive finite number, or is traced by JAX."""
    if isinstance(value, jax.core.Tracer):
        return
    if np.ndim(value) or not isinstance(value, numbers.Real | np.ndarray | jax.Array) or isinstance(value, bool):
        raise ValueError(f"{name} must be a positive number, got {value!r}")
    if not (math.isfinite(float(value)) and float(value) > 0):
        raise ValueError(f"{name} must be positive and finite, got {value!r}")


def check_nonnegative(name: str, value: Any) -> None:
    """Raise `ValueError` unless `value` is a finite number of at least 0, or is traced by JAX."""
    if not (isinstance(value, numbers.Real) and not isinstance(value, bool) and value == 0):
        check_positive(name, value)


def check_size(name: str, value: Any) -> None:
    """Raise `ValueError` unless `value` is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")


def check_probability(name: str, value: Any) -> None:
    """Raise `ValueError` unless `value` is a number from 0 to 1."""
    if isinstance(value, bool) or not (isinstance(value, numbers.Real) and 0 <= float(value) <= 1):
        raise ValueError(f"{name} must be a probability, from 0 to 1, got {value!r}")


def as_float(x: ArrayLike) -> jax.Array:
    """`x` as it is where it is of a floating type, else of JAX's default one."""
    x = jnp.asarray(x)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.result_type(float))
