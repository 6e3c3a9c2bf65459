"""Shallow networks as energies: balls of the Barron space F1."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import random
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike

from numpyro_ebm.energies.arguments import check_positive, check_size
from numpyro_ebm.energies.base import Energy

# Weights read from parameter sites have a mean of at most this. Strictly below one, so that
# rounding does not turn the derivative of the normalisation on and off.
MAX_MEAN_WEIGHT = 1.0 - 1e-5


@dataclass(frozen=True)
class F1Energy(Energy):
    r"""Energy in a ball of the Barron space F1, as a network of `m` neurons.

    .. math:: f(x) = \frac{R}{m} \sum_{j=1}^m \epsilon_j e^{\omega_j} \max(\langle x, \theta_j \rangle, 0)^k

    The measure over neurons has total variation at most the radius `R` when the features are on
    the unit sphere and ``mean(exp(log_weights)) <= 1``.

    Parameters
    ----------
    features
        Unit vectors :math:`\theta_j`, shape ``(*batch, m, d)``; ``(*batch, m, d + 1)`` with `bias`.
    log_weights
        :math:`\omega_j`, shape ``(*batch, m)``.
    signs
        :math:`\epsilon_j`, +1 or -1, shape ``(m,)``.
    radius
        :math:`R > 0`, scalar or of shape `batch`.
    power
        :math:`k \geq 1`.
    bias
        Append 1 to x.
    activation
        Elementwise function in place of the power of a ReLU.

    Raises
    ------
    ValueError
        If shapes do not fit, the radius is not positive, a feature is off the unit sphere, or
        the weights' mean exceeds one (values are checked outside `jax.jit`).

    References
    ----------
    Bach (2017), Breaking the curse of dimensionality with convex neural networks.
    Domingo-Enrich et al. (2022), Dual training of energy-based models with overparametrized
    shallow neural networks, section 3.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> energy = F1Energy(jnp.eye(3), jnp.zeros(3), jnp.array([1.0, 1.0, -1.0]), radius=6.0)
    >>> float(energy(jnp.array([1.0, 2.0, 3.0])))
    0.0
    >>> float(energy.norm)
    6.0
    """

    features: ArrayLike
    log_weights: ArrayLike
    signs: ArrayLike
    radius: ArrayLike
    power: int = 1
    bias: bool = False
    activation: Callable | None = None

    def __post_init__(self):
        fields = self.features, self.log_weights, self.signs, self.radius
        if self.radius is None or isinstance(self.radius, str):
            check_positive("radius", self.radius)
        if not all(hasattr(field, "shape") or isinstance(field, float | int) for field in fields):
            return  # a placeholder of a tree transformation
        if not isinstance(self.power, int) or self.power < 1:
            raise ValueError(f"power must be a positive integer, got {self.power!r}")
        if np.ndim(self.radius) == 0:
            check_positive("radius", self.radius)
        elif not isinstance(self.radius, jax.core.Tracer) and not np.all(np.asarray(self.radius) > 0):
            raise ValueError(f"radius must be positive, got {self.radius}")
        features, weights = jnp.shape(self.features), jnp.shape(self.log_weights)
        if len(features) < 2 or features[:-1] != weights or jnp.shape(self.signs)[-1:] != weights[-1:]:
            raise ValueError(
                "features, log_weights and signs must have shapes (..., m, d), (..., m) and (m,), got "
                f"{features}, {weights} and {jnp.shape(self.signs)}"
            )
        if self.activation is not None and not callable(self.activation):
            raise ValueError(f"activation must be a function, got {self.activation!r}")
        if any(isinstance(field, jax.core.Tracer) for field in fields):
            return
        if not np.all(np.abs(np.asarray(self.signs)) == 1):
            raise ValueError(f"signs must be +1 or -1, got {self.signs}")
        norms = np.linalg.norm(np.asarray(self.features), axis=-1)
        mean = np.max(np.mean(np.exp(np.asarray(self.log_weights)), -1))
        if not np.all(np.abs(norms - 1) < 1e-3):
            raise ValueError(
                "features must be unit vectors (divide them by their norms), got norms between "
                f"{norms.min():.4g} and {norms.max():.4g}"
            )
        if not mean <= 1 + 1e-3:
            raise ValueError(f"mean(exp(log_weights)) must be at most 1, got {mean:.4g}: increase the radius")

    @property
    def batch_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return jnp.broadcast_shapes(jnp.shape(self.log_weights)[:-1], jnp.shape(self.radius))

    @property
    def norm(self) -> Any:
        """F1 (total variation) norm of this representation, ``radius * mean(exp(log_weights))``."""
        return self.radius * jnp.mean(jnp.exp(jnp.asarray(self.log_weights)), -1)

    def __call__(self, x: jax.Array) -> Any:
        features, log_weights = jnp.asarray(self.features), jnp.asarray(self.log_weights)
        if self.bias:
            x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], -1)
        if jnp.shape(x)[-1:] != features.shape[-1:]:
            raise ValueError(
                f"x has shape {jnp.shape(x)}{' with the appended 1' if self.bias else ''}, "
                f"but the features have dimension {features.shape[-1]}"
            )
        if features.ndim == 2:
            inner = x @ features.T
        else:
            inner = jnp.squeeze(features @ x[..., None], -1)
        if self.activation is None:
            activated = jax.nn.relu(inner) ** self.power if self.power > 1 else jax.nn.relu(inner)
        else:
            activated = self.activation(inner)
        weights = jnp.asarray(self.signs) * jnp.exp(log_weights)
        if weights.ndim == 1:
            total = activated @ weights
        else:
            total = jnp.sum(activated * weights, -1)
        return self.radius * (total / weights.shape[-1])


jax.tree_util.register_dataclass(
    F1Energy, ["features", "log_weights", "signs", "radius"], ["power", "bias", "activation"]
)


def f1_energy(
    name: str,
    dim: int,
    num_neurons: int,
    radius: ArrayLike = 1.0,
    power: int = 1,
    bias: bool = False,
    activation: Callable | None = None,
) -> F1Energy:
    """Declare the parameters of an :class:`F1Energy` inside a NumPyro model, and return it.

    The parameter site ``f"{name}$params"`` holds a dictionary of ``features`` of shape
    ``(num_neurons, dim)`` (``dim + 1`` with `bias`) and ``log_weights`` of shape
    ``(num_neurons,)``. Both are normalised as they are read, so that the energy stays in the F1
    ball of the given radius under any optimiser. Half of the neurons have sign +1, half -1.
    Initial features are uniform on the sphere and initial weights ``1 / radius`` (at most 1), so
    that the initial energy is zero in expectation.

    Parameters
    ----------
    name
        Name of the parameter site, less ``$params``.
    dim
        Dimension of x.
    num_neurons
        Number of neurons `m`.
    radius
        Radius of the ball, positive.
    power, bias, activation
        As in :class:`F1Energy`.

    Raises
    ------
    ValueError
        If a size or the radius is not positive.

    Examples
    --------
    >>> from numpyro import handlers
    >>> energy = handlers.seed(f1_energy, 0)("energy", dim=3, num_neurons=8, radius=10.0)
    >>> energy.features.shape
    (8, 3)
    """
    check_size("dim", dim)
    check_size("num_neurons", num_neurons)
    check_positive("radius", radius)

    def init(rng_key):
        features = random.normal(rng_key, (num_neurons, dim + bias))
        log_weight = -jnp.log(jnp.maximum(jnp.asarray(radius, features.dtype), 1 / MAX_MEAN_WEIGHT))
        return {"features": _unit(features), "log_weights": jnp.full(num_neurons, log_weight)}

    params = numpyro.param(f"{name}$params", init, f1_radius=radius)
    log_mean = logsumexp(params["log_weights"]) - jnp.log(num_neurons * MAX_MEAN_WEIGHT)
    features = _unit(params["features"])
    signs = jnp.where(jnp.arange(num_neurons) % 2 == 0, 1.0, -1.0).astype(features.dtype)
    log_weights = params["log_weights"] - jnp.where(log_mean > 0, log_mean, 0)
    return F1Energy(features, log_weights, signs, radius, power, bias, activation)


def _unit(vectors):
    return vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)
