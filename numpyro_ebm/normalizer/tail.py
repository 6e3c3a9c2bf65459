"""How heavy the tail of importance weights is."""

import numpy as np
from jax.typing import ArrayLike

_LEAST_SCATTER = 0.02  # of weights, relative to their mean


def pareto_k(log_weights: ArrayLike) -> np.ndarray:
    """Tail index of weights, over the first axis; over 0.5 they have no variance (Vehtari et al. 2024).

    Minus infinity where weights are even at the top, infinity where they are not finite or too few.
    """
    log_weights = np.moveaxis(np.asarray(log_weights, np.float64), 0, -1)
    num = log_weights.shape[-1]
    tail = np.sort(log_weights, axis=-1)[..., -max(int(min(num / 5, 3 * num**0.5)), 1) :]
    with np.errstate(all="ignore"):
        weights = np.exp(log_weights - tail[..., -1:])
        # weights that are all but equal have rounding for a tail
        is_even = np.std(weights, axis=-1) < _LEAST_SCATTER * np.mean(weights, axis=-1)
        is_even |= (tail[..., 0] == tail[..., -1]) & np.isfinite(tail[..., -1])
        has_tail = np.isfinite(tail[..., -1]) & ~is_even & (tail.shape[-1] >= 5)
        k = np.where(is_even, -np.inf, np.inf)
        if has_tail.any():
            k[has_tail] = _psis_k(log_weights[has_tail])
    return k


def _psis_k(log_weights):
    """ArviZ's tail index, over the last axis."""
    try:
        from arviz import psislw
    except ImportError:  # ArviZ 1, which takes the negative of the logarithms
        from arviz_stats.base import array_stats

        return array_stats.psislw(-log_weights)[1]
    return psislw(log_weights)[1]
