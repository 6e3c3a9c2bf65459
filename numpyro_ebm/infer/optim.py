"""The Wasserstein-Fisher-Rao optimiser of neurons and weights."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from numpyro_ebm.energies import MAX_MEAN_WEIGHT


def wasserstein_fisher_rao(learning_rate: ArrayLike | Callable) -> optax.GradientTransformationExtraArgs:
    r"""Wasserstein-Fisher-Rao descent on the neurons of an F1 energy, as an optax transformation.

    .. math::
        \theta_j &\leftarrow \mathrm{retract}(\theta_j - s \, g_{\theta_j}), \quad
        \omega_j \leftarrow \omega_j - s \, g_{\omega_j}, \quad
        e^{\omega} \leftarrow e^{\omega} / \max(1, \mathrm{mean}_j \, e^{\omega_j})

    with the mean-field gradient :math:`g_j = m / (\beta R e^{\omega_j}) \cdot \partial L` of the
    loss per observation. Features move on the unit sphere, weights by their logarithms.

    Parameters
    ----------
    learning_rate
        Positive number, or an optax schedule.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        For parameters ``{"features": (m, d), "log_weights": (m,)}``, as the site of
        :func:`~numpyro_ebm.f1_energy` holds them. ``update(gradients, state, params, *, scale)``
        takes gradients of a loss and its `scale`, the number of observations that it sums over
        times :math:`\beta R`.

    References
    ----------
    Domingo-Enrich et al. (2022), Dual training of energy-based models with overparametrized
    shallow neural networks, Algorithm 1.
    Chizat et al. (2018), An interpolating distance between optimal transport and Fisher-Rao metrics.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> params = {"features": jnp.eye(2), "log_weights": jnp.full(2, -1.0)}
    >>> optimiser = wasserstein_fisher_rao(0.1)
    >>> state = optimiser.init(params)
    >>> updates, state = optimiser.update(params, state, params, scale=100.0)
    """

    def init(params):
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, *, scale, **extra_args):
        if params is None:
            raise ValueError("wasserstein_fisher_rao needs params")
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        features, log_weights = params["features"], params["log_weights"]
        mean_field = rate * log_weights.shape[-1] / (scale * jnp.exp(log_weights))
        # the gradient is tangent already: features are normalised as they are read
        moved = features - mean_field[..., None] * updates["features"]
        moved = moved / jnp.linalg.norm(moved, axis=-1, keepdims=True)
        weighed = log_weights - mean_field * updates["log_weights"]
        log_mean = logsumexp(weighed, axis=-1) - jnp.log(log_weights.shape[-1] * MAX_MEAN_WEIGHT)
        weighed = weighed - jnp.maximum(log_mean, 0)
        updates = {"features": moved - features, "log_weights": weighed - log_weights}
        updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)
        return updates, optax.ScaleByScheduleState(count=state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)
