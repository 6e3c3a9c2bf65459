"""Joint energies of x and a class: one network gives p(x), p(x|y) and p(y|x)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.typing import ArrayLike

from numpyro_ebm.distributions import EnergyBased
from numpyro_ebm.energies import CallableEnergy, Energy, as_float, check_size, visible


@dataclass(frozen=True)
class MarginalEnergy(Energy):
    """Energy of x whatever its class: ``-logsumexp(logits(x))``."""

    logits: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return -jax.nn.logsumexp(self.logits(x), -1)


@dataclass(frozen=True)
class ConditionalEnergy(Energy):
    """Energy of x in given classes: ``-logits(x)[labels]``; its batch shape is that of `labels`."""

    logits: Any
    labels: ArrayLike

    @property
    def batch_shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return jnp.shape(self.labels)

    @property
    def num_classes(self) -> int:
        return self.logits.output_shape[0]

    def __call__(self, x: jax.Array) -> jax.Array:
        # where x has one element for all labels, logits are computed once for all of them
        labels = jnp.asarray(self.labels)
        chosen = labels[..., None] == jnp.arange(self.num_classes)
        energy = -jnp.sum(jnp.where(chosen, self.logits(x), 0), -1)
        return jnp.where(_is_class(labels, self.num_classes), energy, jnp.nan)

    def marginal(self) -> MarginalEnergy:
        return MarginalEnergy(self.logits)

    def each_class(self) -> "ConditionalEnergy":
        """The energies of all classes, batch shape ``(num_classes,)``."""
        return ConditionalEnergy(self.logits, jnp.arange(self.num_classes))


for _energy, _data in ((MarginalEnergy, ["logits"]), (ConditionalEnergy, ["logits", "labels"])):
    jax.tree_util.register_dataclass(_energy, _data, [])


class Classifier(dist.CategoricalLogits):
    """``Categorical(logits)`` that refuses labels out of its classes, where NumPyro would take the nearest."""

    def log_prob(self, value: jax.Array) -> jax.Array:
        num_classes = self.logits.shape[-1]
        check_labels("the classifier", value, num_classes)
        value = jnp.asarray(value)
        return jnp.where(_is_class(value, num_classes), super().log_prob(value), jnp.nan)


@dataclass(frozen=True)
class JointEnergy:
    r"""Joint energy-based model of x and a class y, with density proportional to ``base(x) * exp(logits(x)[y])``.

    .. math::
        p(x) \propto \tau(x) \sum_y e^{f(x)_y}, \quad
        p(x | y) \propto \tau(x) e^{f(x)_y}, \quad
        p(y | x) = \mathrm{softmax}(f(x))_y

    p(x, y) and p(x) lack the same log Z, so that their difference, log p(y|x), is exact.

    Parameters
    ----------
    logits
        Callable of single events that returns shape ``(num_classes,)``, a network of flax, nnx or
        equinox among them; or, with `num_classes`, ``f(x, y)`` that returns a number.
    base
        Base distribution of x, with an empty batch shape.
    num_classes
        Number of classes, where `logits` is ``f(x, y)``; y then runs over ``0, ..., num_classes - 1``.

    Raises
    ------
    TypeError, ValueError
        If the base is not a distribution or has a batch shape, or `logits` does not return one
        number for each class.

    References
    ----------
    Grathwohl et al. (2020), Your classifier is secretly an energy based model and you should treat it like one.
    Sustek et al. (2023), Stabilized training of joint energy-based models and their practical applications, arXiv:2303.04187.

    Examples
    --------
    >>> import jax.numpy as jnp, numpyro.distributions as dist
    >>> joint = JointEnergy(lambda x: jnp.stack([x[0], -x[0]]), dist.Normal(0, 1).expand([2]).to_event(1))
    >>> joint.conditional(jnp.array([0, 1, 1])).batch_shape
    (3,)
    >>> joint.classifier(jnp.zeros(2)).probs.tolist()
    [0.5, 0.5]
    """

    logits: Any
    base: dist.Distribution
    num_classes: int | None = None

    def __post_init__(self):
        if isinstance(self.logits, CallableEnergy) and len(self.logits.output_shape) == 1:
            object.__setattr__(self, "num_classes", self.logits.output_shape[0])
            return
        if not callable(self.logits):
            if isinstance(self.base, dist.Distribution):
                raise TypeError(f"logits must be callable, got {type(self.logits).__name__}")
            return  # a placeholder of a tree transformation
        if not isinstance(self.base, dist.Distribution):
            raise TypeError(f"base must be a NumPyro distribution, got {type(self.base).__name__}")
        if self.base.batch_shape:
            raise ValueError(
                f"base must have an empty batch shape, got {self.base.batch_shape}: make its dimensions into event dimensions "
                "by .to_event()"
            )
        logits = visible(self.logits)
        if self.num_classes is not None:
            check_size("num_classes", self.num_classes)
            logits = _of_pairs(logits, self.num_classes)
        event_shape = self.base.event_shape
        try:
            output = jax.eval_shape(logits, jax.ShapeDtypeStruct(event_shape, jnp.result_type(float)))
        except (TypeError, ValueError, IndexError) as error:
            raise ValueError(
                f"logits can't be called {'as f(x, y), since num_classes is given, ' if self.num_classes is not None else ''}"
                f"on a single event of shape {event_shape}, the base's event shape ({error})"
            ) from error
        shape = getattr(output, "shape", None)
        if shape is None or len(shape) != 1 or shape[0] < 1:
            raise ValueError(
                f"logits must return one number for each class, of shape (num_classes,), for a single event of shape {event_shape}, "
                f"got {'no array' if shape is None else f'shape {shape}'}"
                + (": give num_classes if it is a function f(x, y)" if self.num_classes is None else "")
            )
        object.__setattr__(self, "num_classes", int(shape[0]))
        object.__setattr__(self, "logits", CallableEnergy(logits, event_shape, (), shape))

    def marginal(self) -> EnergyBased:
        """p(x), less its log Z."""
        return EnergyBased(MarginalEnergy(self.logits), self.base)

    def conditional(self, y: ArrayLike) -> EnergyBased:
        """p(x|y), less its log Z(y).

        Parameters
        ----------
        y
            Integer labels from 0, of any shape, which becomes the batch shape.

        Raises
        ------
        ValueError
            If labels are not integers, or out of the classes (values are checked outside `jax.jit`).
        """
        check_labels("conditional", y, self.num_classes)
        return EnergyBased(ConditionalEnergy(self.logits, jnp.asarray(y)), self.base)

    def classifier(self, x: ArrayLike) -> dist.CategoricalLogits:
        """p(y|x): exact, a `Categorical` over the classes.

        Parameters
        ----------
        x
            Shape ``(..., *event_shape)``.
        """
        return Classifier(self.logits(as_float(x)))


jax.tree_util.register_dataclass(JointEnergy, ["logits", "base"], ["num_classes"])


def _of_pairs(function, num_classes):
    """Logits from a function of x and a label."""

    def logits(x):
        values = jax.vmap(lambda y: function(x, y))(jnp.arange(num_classes))
        if jnp.shape(values) not in ((num_classes,), (num_classes, 1)):
            raise ValueError(
                f"f(x, y) must return a number for one event and one label, got shape {jnp.shape(values)[1:]}"
            )
        return jnp.reshape(values, (num_classes,))

    return logits


def _is_class(labels, num_classes):
    return (labels >= 0) & (labels < num_classes)


def check_labels(name: str, labels: Any, num_classes: int | None) -> None:
    """Raise `ValueError` unless `labels` are integers from 0 to `num_classes` - 1.

    Values under a `jax` transformation can't be looked at; only their type is checked, and log-densities
    of labels that are out of range are NaN.
    """
    is_traced = any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(labels))
    try:
        values = jnp.asarray(labels) if is_traced else np.asarray(labels)
    except ValueError as error:
        raise ValueError(f"{name}: labels must be an array of integers ({error})") from error
    if not jnp.issubdtype(values.dtype, jnp.integer):
        raise ValueError(f"{name}: labels must be integers, got {values.dtype}")
    if num_classes is None or is_traced:
        return
    faults = np.argwhere((values < 0) | (values >= num_classes))
    if len(faults):
        place = ", ".join(str(int(i)) for i in faults[0])
        raise ValueError(
            f"{name}: labels must be from 0 to {num_classes - 1}, got {values[tuple(faults[0])]}"
            f"{f' at row {place}' if place else ''} ({len(faults)} such): masked rows need a label too, which is any class"
        )


def mutual_information(joint: JointEnergy, x: ArrayLike) -> jax.Array:
    r"""Estimate the mutual information of x and its class, in nats.

    .. math:: I(X; Y) = E_x\Big[\sum_y p(y|x) \log \frac{p(y|x)}{p(y)}\Big], \quad p(y) = E_x[p(y|x)]

    Parameters
    ----------
    joint
        The joint energy.
    x
        Draws of p(x), such as a pool's chains, shape ``(n, *event_shape)``; of the data for what
        the classifier finds there.

    Returns
    -------
    jax.Array
        From 0 to ``log(num_classes)``; of `n` draws, biased upwards by about
        ``(num_classes - 1) / (2 n)``.

    Raises
    ------
    ValueError
        If `x` holds no draws, or not of the base's event shape.

    References
    ----------
    Sustek et al. (2023), Stabilized training of joint energy-based models and their practical applications, eq. 14.

    Examples
    --------
    >>> import jax.numpy as jnp, numpyro.distributions as dist
    >>> joint = JointEnergy(lambda x: jnp.stack([9 * x, -9 * x]), dist.Normal(0, 1))
    >>> round(float(mutual_information(joint, jnp.array([-3.0, 3.0]))), 3)     # log 2
    0.693
    """
    x, event_shape = as_float(x), joint.base.event_shape
    if x.size == 0 or x.shape[x.ndim - len(event_shape) :] != event_shape:
        raise ValueError(f"x must have shape (n, *{event_shape}) with one draw or more, got {x.shape}")
    x = jnp.reshape(x, (-1, *event_shape))
    return jnp.mean(divergence_from_mean(joint.logits(x)))


def divergence_from_mean(logits: jax.Array) -> jax.Array:
    """KL of each row's class probabilities from their mean over rows: ``(n, classes) -> (n,)``, in nats."""
    log_rows = jax.nn.log_softmax(logits)
    log_mean = jax.nn.logsumexp(log_rows, axis=0) - jnp.log(logits.shape[0])
    return jnp.sum(jnp.exp(log_rows) * (log_rows - log_mean), -1)
