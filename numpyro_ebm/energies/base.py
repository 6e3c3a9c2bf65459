"""What an energy is, and how any callable becomes one."""

import abc
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.tree_util import Partial


class Energy(abc.ABC):
    """A pytree of parameters with a function ``energy(x) -> value``.

    ``x`` has shape ``(..., *batch_shape, *event_shape)`` and the value ``(..., *batch_shape)``.
    Subclass it as a frozen dataclass registered with :func:`jax.tree_util.register_dataclass`;
    anything else callable goes through :func:`as_energy`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True)
    ... class Quartic(Energy):
    ...     scale: jax.Array
    ...
    ...     def __call__(self, x):
    ...         return self.scale * x**4
    >>> _ = jax.tree_util.register_dataclass(Quartic, data_fields=["scale"], meta_fields=[])
    >>> float(Quartic(jnp.array(0.5))(2.0))
    8.0
    """

    batch_shape: tuple[int, ...] = ()

    @abc.abstractmethod
    def __call__(self, x: jax.Array) -> jax.Array: ...


class _Identity:
    """A part of a callable that is not an array: compared by identity, always hashable."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Identity) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class _Traced:
    """A callable turned into a jaxpr, so that what its closure holds becomes an argument."""

    def __init__(self, jaxpr):
        self.jaxpr = jaxpr

    def __call__(self, consts, x):
        (value,) = jaxpr_as_fun(self.jaxpr.replace(consts=consts))(x)
        return value


@jax.tree_util.register_pytree_node_class
class CallableEnergy(Energy):
    """An energy, or a vector of them, given by a callable of single events; made by :func:`as_energy`.

    With an `output_shape` it maps ``(..., *event_shape)`` to ``(..., *output_shape)``.
    """

    def __init__(self, function, event_shape, batch_shape, output_shape=()):
        self.function = function
        self.event_shape = event_shape
        self.batch_shape = batch_shape
        self.output_shape = output_shape
        self.is_stacked = False

    def __call__(self, x):
        if self.is_stacked:
            raise NotImplementedError(
                "the arrays of this energy were stacked by jax.vmap or scan: call it under jax.vmap over them. In a scan, "
                "give what changes along it through the base, the inverse temperature or an F1Energy"
            )
        event_dim = len(self.event_shape)
        leading = jnp.shape(x)[: jnp.ndim(x) - event_dim]
        if self.batch_shape:
            value = self.function(x)
            expected = jnp.broadcast_shapes(leading, self.batch_shape)
            if jnp.shape(value) != expected:
                raise ValueError(
                    f"the energy has batch shape {self.batch_shape}, but maps x of shape {jnp.shape(x)} to shape "
                    f"{jnp.shape(value)}, not {expected}: let it broadcast over the leading dimensions of x"
                )
            return value
        flat = jnp.reshape(x, (math.prod(leading), *self.event_shape))
        return jnp.reshape(jax.vmap(self._single)(flat), (*leading, *self.output_shape))

    def _single(self, x):
        return jnp.reshape(self.function(x), self.output_shape)

    def tree_flatten(self):
        function = self.function
        if not self.batch_shape:
            # a closure hides its arrays from JAX: where it holds tracers, they become leaves
            event = jax.ShapeDtypeStruct(self.event_shape, jnp.result_type(float))
            closed = jax.make_jaxpr(self._single)(event)
            leaves = [id(leaf) for leaf in jax.tree.leaves(function)]
            if any(isinstance(c, jax.core.Tracer) and id(c) not in leaves for c in closed.consts):
                function = Partial(_Traced(closed), closed.consts)
        leaves, treedef = jax.tree.flatten(function)
        arrays = [leaf if _is_array(leaf) else None for leaf in leaves]
        static = tuple(jnp.ndim(leaf) if _is_array(leaf) else _Identity(leaf) for leaf in leaves)
        return arrays, (treedef, static, self.event_shape, self.batch_shape, self.output_shape)

    @classmethod
    def tree_unflatten(cls, aux, arrays):
        treedef, static, *shapes = aux
        leaves = [s.value if isinstance(s, _Identity) else a for a, s in zip(arrays, static, strict=True)]
        energy = cls(jax.tree.unflatten(treedef, leaves), *shapes)
        ndims = [(jnp.ndim(a), s) for a, s in zip(arrays, static, strict=True) if _is_array(a)]
        energy.is_stacked = any(ndim > s for ndim, s in ndims)
        return energy


def _misfit(event_shape, batch_shape):
    return (
        f"the energy does not fit events of shape {tuple(event_shape)} in a batch of shape {tuple(batch_shape)}: give it the "
        "dimension of the base's events, and make dimensions of the base into event dimensions by .to_event()"
    )


def _is_array(leaf):
    # tree transformations also put placeholders in the place of arrays: only callables and
    # text are known not to be numbers
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | float | int | complex)


def visible(function: Any) -> Any:
    """`function`, its arrays visible to JAX where it is a ``functools.partial``, as NumPyro's modules are."""
    if isinstance(function, functools.partial) and not isinstance(function, Partial):
        return Partial(function.func, *function.args, **function.keywords)
    return function


def as_energy(energy: Any, event_shape: tuple[int, ...] | None = None, batch_shape: tuple[int, ...] = ()) -> Energy:
    """Turn a callable into an :class:`Energy`.

    A :class:`Energy` is returned as it is. A callable (function, ``functools.partial`` as
    NumPyro's ``flax_module`` and ``nnx_module`` return it, dataclass, nnx or equinox module) is
    called on single events and mapped over all leading dimensions. Where it returns more than
    one value for a single event it has a batch shape, and is called on whole batches.

    Parameters
    ----------
    energy
        Callable that maps an event of shape `event_shape` to shape ``()`` or ``(1,)``, or,
        broadcasting, an array ``(..., *batch, *event_shape)`` to ``(..., *batch)``.
    event_shape
        Shape of one event; an `Energy` is checked against it, a callable is mapped over ``()`` by default.
    batch_shape
        Batch shape that is known beforehand, from the base, say.

    Returns
    -------
    Energy
        `energy` itself where it is one.

    Raises
    ------
    TypeError
        If `energy` is not callable.
    ValueError
        If `energy` can't be called on a single event, or returns the shape of the event.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> energy = as_energy(lambda x: jnp.sum(x**2) / 2, event_shape=(3,))
    >>> energy(jnp.ones((5, 3))).shape
    (5,)
    """
    if isinstance(energy, Energy):
        if event_shape is None:
            return energy
        event = jax.ShapeDtypeStruct((*batch_shape, *event_shape), jnp.result_type(float))
        try:
            fits = jax.eval_shape(energy, event).shape == jnp.broadcast_shapes(batch_shape, energy.batch_shape)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{_misfit(event_shape, batch_shape)} ({error})") from error
        if not fits:
            raise ValueError(_misfit(event_shape, batch_shape))
        return energy
    event_shape = () if event_shape is None else event_shape
    if not callable(energy):
        raise TypeError(f"energy must be callable, got {type(energy).__name__}")
    energy = visible(energy)
    event = jax.ShapeDtypeStruct(tuple(event_shape), jnp.result_type(float))
    try:
        output = jax.eval_shape(energy, event)
    except (TypeError, ValueError, IndexError) as error:
        raise ValueError(
            f"the energy can't be called on a single event of shape {tuple(event_shape)} ({error}). "
            "Events have the event shape of the base: make dimensions of the base into event dimensions by .to_event()"
        ) from error
    if not hasattr(output, "shape"):
        raise ValueError(f"the energy must return one array, got {type(output).__name__}")
    if jnp.issubdtype(output.dtype, jnp.complexfloating):
        raise ValueError(f"the energy must be real, got values of type {output.dtype}")
    if output.shape in ((), (1,)):
        return CallableEnergy(energy, tuple(event_shape), ())
    if output.shape == tuple(event_shape) and output.shape != tuple(batch_shape):
        raise ValueError(
            f"the energy maps a single event of shape {tuple(event_shape)} to shape {output.shape}, expected () or (1,): "
            "sum over the event (or, if this is a batch of energies, .expand the base to that batch shape)"
        )
    return CallableEnergy(energy, tuple(event_shape), output.shape)
