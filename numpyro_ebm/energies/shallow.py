"""Shallow networks as energies: balls of the Barron space F1."""

import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import lax, random
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
        arrays = {name: getattr(self, name) for name in ("features", "log_weights", "signs", "radius")}
        can_look = _check_network(self, arrays)
        if self.activation is not None and not callable(self.activation):
            raise ValueError(f"activation must be a function, got {self.activation!r}")
        if not can_look:
            return
        if not np.all(np.abs(np.asarray(self.signs)) == 1):
            raise ValueError(f"signs must be +1 or -1, got {self.signs}")
        with np.errstate(over="ignore"):
            mean = np.max(np.mean(np.exp(np.asarray(self.log_weights, np.float64)), -1))
        if not mean <= 1 + 1e-3:
            raise ValueError(f"mean(exp(log_weights)) must be at most 1, got {mean:.4g}: increase the radius")

    @property
    def batch_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return jnp.broadcast_shapes(jnp.shape(self.log_weights)[:-1], jnp.shape(self.radius))

    @property
    def norm(self) -> Any:
        """F1 (total variation) norm of this representation, ``radius * mean(exp(log_weights))``."""
        return self.radius * jnp.mean(jnp.exp(jnp.asarray(self.log_weights)), -1)

    def activations(self, x: jax.Array, features: ArrayLike) -> jax.Array:
        """What neurons at `features`, shape ``(m, d)``, make of x: shape ``(..., m)``."""
        return _activated(x, features, self.power, self.bias, self.activation)

    def __call__(self, x: jax.Array) -> Any:
        weights = jnp.asarray(self.signs) * jnp.exp(jnp.asarray(self.log_weights))
        return self.radius * _mean_neuron(x, self.features, weights, self.power, self.bias, self.activation)


jax.tree_util.register_dataclass(
    F1Energy, ["features", "log_weights", "signs", "radius"], ["power", "bias", "activation"]
)


@dataclass(frozen=True)
class F2Energy(Energy):
    r"""Energy in a ball of the space F2: a network of `m` neurons of fixed, random features.

    .. math:: f(x) = \frac{1}{m} \sum_{j=1}^m w_j \max(\langle x, \theta_j \rangle, 0)^k, \quad
        \Big(\frac{1}{m} \sum_j w_j^2\Big)^{1/2} \leq R

    The kernel (or "lazy") regime: as m grows, a ball of the reproducing-kernel Hilbert space of these
    features, in which only the weights are learned.

    Parameters
    ----------
    features
        Unit vectors :math:`\theta_j`, shape ``(*batch, m, d)``; ``(*batch, m, d + 1)`` with `bias`.
    weights
        :math:`w_j`, shape ``(*batch, m)``.
    radius
        :math:`R > 0`, scalar or of shape `batch`.
    power, bias
        As in :class:`F1Energy`.

    Raises
    ------
    ValueError
        If shapes do not fit, the radius is not positive, a feature is off the unit sphere, or
        the weights are outside of the ball (values are checked outside `jax.jit`).

    References
    ----------
    Bach (2017), Breaking the curse of dimensionality with convex neural networks.
    Domingo-Enrich et al. (2022), Dual training of energy-based models with overparametrized
    shallow neural networks, appendix C.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> energy = F2Energy(jnp.eye(3), jnp.array([1.0, 2.0, -1.0]), radius=2.0)
    >>> round(float(energy(jnp.array([1.0, 2.0, 3.0]))), 4)
    0.6667
    >>> round(float(energy.norm), 4)
    1.4142
    """

    features: ArrayLike
    weights: ArrayLike
    radius: ArrayLike
    power: int = 1
    bias: bool = False

    def __post_init__(self):
        if not _check_network(self, {"features": self.features, "weights": self.weights, "radius": self.radius}):
            return
        if np.ndim(self.radius) > np.ndim(self.weights) - 1:
            raise ValueError(
                f"radius of shape {np.shape(self.radius)} needs weights with such a batch, got weights of shape {np.shape(self.weights)}"
            )
        weights = np.asarray(self.weights, np.float64)
        norm = np.max(np.sqrt(np.mean(weights**2, -1)) / np.asarray(self.radius))
        if not norm <= 1 + 1e-3:
            raise ValueError(f"the L2 norm of weights must be at most the radius, got {norm:.4g} times the radius")

    @property
    def batch_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return jnp.broadcast_shapes(jnp.shape(self.weights)[:-1], jnp.shape(self.radius))

    @property
    def norm(self) -> Any:
        """F2 norm of this representation, ``sqrt(mean(weights ** 2))``."""
        # in units of the radius, whose square may be out of the range of floats
        units = jnp.asarray(self.weights) / jnp.expand_dims(jnp.asarray(self.radius), -1)
        return self.radius * jnp.sqrt(jnp.mean(units**2, -1))

    def __call__(self, x: jax.Array) -> Any:
        return _mean_neuron(x, self.features, jnp.asarray(self.weights), self.power, self.bias, None)


jax.tree_util.register_dataclass(F2Energy, ["features", "weights", "radius"], ["power", "bias"])


def _check_network(energy, arrays):
    """Check what F1 and F2 energies have in common; whether the arrays' values can be looked at too."""
    radius, power = energy.radius, energy.power
    if radius is None or isinstance(radius, str):
        check_positive("radius", radius)
    names = [name for name in arrays if name != "radius"]
    if not all(hasattr(arrays[name], "shape") for name in names):
        return False  # a placeholder of a tree transformation
    if not (hasattr(radius, "shape") or isinstance(radius, float | int)):
        return False
    check_size("power", power)
    if np.ndim(radius) == 0:
        check_positive("radius", radius)
    elif not isinstance(radius, jax.core.Tracer) and not np.all(np.asarray(radius) > 0):
        raise ValueError(f"radius must be positive, got {radius}")
    shapes = [jnp.shape(arrays[name]) for name in names]
    fits = len(shapes[0]) >= 2 and shapes[0][:-1] == shapes[1] and all(s[-1:] == shapes[1][-1:] for s in shapes[2:])
    if not fits:
        expected = ["(..., m, d)", "(..., m)", "(m,)"][: len(names)]
        raise ValueError(
            f"{_listed(names)} must have shapes {_listed(expected)}, got {_listed([str(shape) for shape in shapes])}"
        )
    if any(0 in shape for shape in shapes):
        raise ValueError(f"{_listed(names)} must hold a neuron or more, got shapes {_listed([str(s) for s in shapes])}")
    if any(isinstance(array, jax.core.Tracer) for array in arrays.values()):
        return False
    norms = np.linalg.norm(np.asarray(energy.features, np.float64), axis=-1)
    if not np.all(np.abs(norms - 1) < 1e-3):
        raise ValueError(
            "features must be unit vectors (divide them by their norms), got norms between "
            f"{norms.min():.4g} and {norms.max():.4g}"
        )
    return True


def _listed(words):
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _mean_neuron(x, features, weights, power, bias, activation):
    """The weighted mean over neurons, shape ``(..., *batch)``."""
    if power == 1 and activation is None:
        # The ReLUs' slopes are constant almost everywhere, and give value and gradients by two products.
        x = _with_bias(x, features, bias)
        active = lax.stop_gradient((_inner(x, features) > 0).astype(weights.dtype))
        total = jnp.sum(x * _inner(active, jnp.swapaxes(weights[..., None] * features, -1, -2)), -1)
    else:
        activated = _activated(x, features, power, bias, activation)
        total = activated @ weights if weights.ndim == 1 else jnp.sum(activated * weights, -1)
    return total / weights.shape[-1]


def _activated(x, features, power, bias, activation):
    """What each neuron makes of x, shape ``(..., *batch, num_neurons)``."""
    inner = _inner(_with_bias(x, features, bias), features)
    if activation is not None:
        return activation(inner)
    return jax.nn.relu(inner) ** power if power > 1 else jax.nn.relu(inner)


def _with_bias(x, features, bias):
    """x as features see it, shape ``(..., dim)``."""
    if bias:
        x = jnp.concatenate([x, jnp.ones_like(x[..., :1])], -1)
    if jnp.shape(x)[-1:] != jnp.shape(features)[-1:]:
        raise ValueError(
            f"x has shape {jnp.shape(x)}{' with the appended 1' if bias else ''}, "
            f"but the features have dimension {jnp.shape(features)[-1]}"
        )
    return x


def _inner(x, vectors):
    """Inner products of x, shape ``(..., *batch, dim)``, with vectors ``(*batch, num, dim)``: ``(..., *batch, num)``."""
    vectors = jnp.asarray(vectors)
    return x @ vectors.T if vectors.ndim == 2 else jnp.squeeze(vectors @ x[..., None], -1)


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

    Returns
    -------
    F1Energy
        With the values that the parameters have in this call of the model.

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


def f2_energy(
    name: str,
    dim: int,
    num_neurons: int,
    radius: ArrayLike = 1.0,
    power: int = 1,
    bias: bool = False,
    seed: int = 0,
) -> F2Energy:
    """Declare the weights of an :class:`F2Energy` inside a NumPyro model, and return it.

    The parameter site ``f"{name}$params"`` holds a dictionary of ``weights`` of shape
    ``(num_neurons,)``, zero at first. They are brought back into the ball of the given radius as they
    are read. Features are uniform on the sphere, and the same wherever `seed` is.

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
    power, bias
        As in :class:`F1Energy`.
    seed
        Of the features.

    Returns
    -------
    F2Energy
        With the values that the parameters have in this call of the model.

    Raises
    ------
    ValueError
        If a size or the radius is not positive, or `seed` not an integer.

    Examples
    --------
    >>> from numpyro import handlers
    >>> energy = handlers.seed(f2_energy, 0)("energy", dim=3, num_neurons=8, radius=10.0)
    >>> energy.weights.shape
    (8,)
    """
    check_size("dim", dim)
    check_size("num_neurons", num_neurons)
    check_positive("radius", radius)
    if isinstance(seed, bool) or not isinstance(seed, numbers.Integral):
        raise ValueError(f"seed must be an integer, got {seed!r}")
    features = _unit(random.normal(random.key(seed), (num_neurons, dim + bias)))
    weights = numpyro.param(f"{name}$params", lambda _: {"weights": jnp.zeros(num_neurons)})["weights"]
    square = jnp.mean((weights / (radius * MAX_MEAN_WEIGHT)) ** 2)
    weights = jnp.where(square > 1, weights * lax.rsqrt(jnp.where(square > 1, square, 1)), weights)
    return F2Energy(features, weights, radius, power, bias)


def _unit(vectors):
    return vectors / jnp.linalg.norm(vectors, axis=-1, keepdims=True)
