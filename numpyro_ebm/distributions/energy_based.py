"""Unnormalised densities as NumPyro distributions, and the guard over their normalisers."""

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import jaxpr_as_fun
from jax.tree_util import Partial
from numpyro.distributions import constraints
from numpyro.distributions.util import validate_sample
from numpyro.util import not_jax_tracer

from numpyro_ebm.distributions.sphere import Ambient, is_sphere
from numpyro_ebm.energies import as_energy, as_float


class IntractableNormalizerError(RuntimeError):
    """The gradient of an unnormalised density was asked for in what its normaliser depends on.

    Examples
    --------
    >>> import jax, numpyro.distributions as dist
    >>> def loss(theta):
    ...     return -EnergyBased(lambda x: theta * x**2, dist.Normal(0, 1)).log_prob(1.0)
    >>> try:
    ...     jax.grad(loss)(2.0)     # lacks the derivative of log Z
    ... except IntractableNormalizerError as error:
    ...     print(str(error).split(" of this")[0])
    EnergyBased: the normaliser
    """


def _refuse(site: str) -> IntractableNormalizerError:
    return IntractableNormalizerError(
        f"{site}: the normaliser of this EnergyBased distribution depends on a parameter or latent variable that is being "
        "differentiated, and is unknown, so that this gradient would be silently wrong. Ways out: train with "
        "SVI(numpyro_ebm.estimate(model, numpyro_ebm.ContrastiveDivergence(pool)), ...) or numpyro_ebm.DualSGDA; sample the "
        "posterior with numpyro_ebm.Exchange; or, where log Z is known, give it as EnergyBased(..., log_normalizer=...), as a "
        "function of the same parameters."
    )


def guard(operands: Any, error: Exception, unless: Any = None) -> tuple[Any, Any]:
    """Identity of `operands` and `unless`; differentiated in `operands`, but not in `unless`, it raises `error`."""

    @jax.custom_jvp
    def identity(operands, unless):
        return operands, unless

    def rule(primals, tangents):
        moves = [any(not isinstance(t, SymbolicZero) for t in jax.tree.leaves(tangent)) for tangent in tangents]
        if moves[0] and not moves[1]:
            raise error
        return primals, tangents

    identity.defjvp(rule, symbolic_zeros=True)
    return identity(operands, unless)


class EnergyBased(dist.Distribution):
    r"""Distribution with density proportional to ``base(x) * exp(-inverse_temperature * energy(x))``.

    The log-density lacks the logarithm of the normaliser

    .. math:: Z = \int e^{-\beta f(x)} \, d\tau(x)

    unless `log_normalizer` is given. Derivatives in x are exact all the same. A derivative in
    anything that Z depends on raises :class:`IntractableNormalizerError` (the guard).

    Parameters
    ----------
    energy
        :class:`~numpyro_ebm.Energy`, or a callable of single events (:func:`~numpyro_ebm.as_energy`).
    base
        Base distribution :math:`\tau`; its event shape is that of x, its support is the support.
        ``ImproperUniform`` is a flat base.
    inverse_temperature
        :math:`\beta \geq 0`, scalar or of the batch shape.
    log_normalizer
        log Z where it is known: a number or array of the batch shape, a callable without
        arguments, or a callable of this distribution. It lifts the guard where it moves with what
        is differentiated; that it moves with all that Z depends on, :func:`~numpyro_ebm.check_model`
        tells.
    sampler
        ``sampler(rng_key, distribution, sample_shape)``, which returns draws of shape
        ``sample_shape + batch_shape + event_shape``.
    validate_args
        As in every NumPyro distribution: whether values are held to the support.

    Raises
    ------
    TypeError, ValueError
        If the base is not a distribution or is over complex numbers, the energy does not fit its events, or the inverse
        temperature is negative or not finite.

    Notes
    -----
    Integer x is taken as floating point. The result has the promoted type of x, base and energy.
    Where the support is bounded, the density outside is 0 whether or not validation is on. Points
    off the sphere are not detected by `log_prob` unless validation is on.

    Examples
    --------
    >>> import jax.numpy as jnp, numpyro.distributions as dist
    >>> d = EnergyBased(lambda x: 4 * x**2, dist.Normal(0, 1))    # N(0, 1/9), unnormalised
    >>> float(d.score(jnp.array(1.0)))
    -9.0
    """

    arg_constraints: dict = {}
    pytree_data_fields = ("energy", "base", "inverse_temperature", "log_normalizer")
    pytree_aux_fields = ("sampler",)
    reparametrized_params: list = []

    def __init__(
        self,
        energy: Any,
        base: dist.Distribution,
        inverse_temperature: Any = 1.0,
        log_normalizer: Any = None,
        sampler: Callable | None = None,
        *,
        validate_args: bool | None = None,
    ):
        if not isinstance(base, dist.Distribution):
            raise TypeError(f"base must be a NumPyro distribution, got {type(base).__name__}")
        if _elementwise(base.support) is constraints.complex:
            raise ValueError(f"base must be over real numbers, got {type(base).__name__} of complex ones")
        if not_jax_tracer(inverse_temperature):
            values = np.asarray(inverse_temperature)
            numeric = np.issubdtype(values.dtype, np.number)
            if not (numeric and np.isfinite(values).all() and (values >= 0).all()):
                raise ValueError(f"inverse_temperature must be nonnegative and finite, got {inverse_temperature!r}")
        if log_normalizer is not None and not callable(log_normalizer) and not_jax_tracer(log_normalizer):
            values = np.asarray(log_normalizer)
            if not (np.issubdtype(values.dtype, np.number) and np.isfinite(values).all()):
                raise ValueError(f"log_normalizer must be finite numbers or a function, got {log_normalizer!r}")
        if sampler is not None and not callable(sampler):
            raise TypeError(f"sampler must be callable, got {type(sampler).__name__}")
        self.base = base
        self.energy = as_energy(energy, base.event_shape, base.batch_shape)
        self.inverse_temperature = inverse_temperature
        callable_normalizer = callable(log_normalizer) and not isinstance(log_normalizer, Partial)
        self.log_normalizer = Partial(log_normalizer) if callable_normalizer else log_normalizer
        self.sampler = sampler
        shapes = base.batch_shape, self.energy.batch_shape, jnp.shape(inverse_temperature)
        try:
            batch_shape = jnp.broadcast_shapes(*shapes)
        except ValueError as error:
            raise ValueError(
                "the batch shapes of base, energy and inverse_temperature do not broadcast: "
                f"{shapes[0]}, {shapes[1]} and {shapes[2]}"
            ) from error
        if log_normalizer is not None and not callable(log_normalizer):
            if jnp.broadcast_shapes(batch_shape, jnp.shape(log_normalizer)) != batch_shape:
                raise ValueError(
                    f"log_normalizer has shape {jnp.shape(log_normalizer)}, which does not broadcast to the batch shape {batch_shape}"
                )
        super().__init__(batch_shape, base.event_shape, validate_args=validate_args)

    @property
    def support(self):
        return self.base.support

    @property
    def has_rsample(self) -> bool:
        return False

    def unnormalized_log_prob(self, value: jax.Array) -> jax.Array:
        """``base.log_prob(x) - inverse_temperature * energy(x)``, without the guard and log Z.

        Parameters
        ----------
        value
            Shape ``(..., *batch_shape, *event_shape)``.

        Returns
        -------
        jax.Array
            Shape ``(..., *batch_shape)``; ``-inf`` outside a bounded support.

        Raises
        ------
        ValueError
            If the trailing dimensions of `value` are not the event shape.
        """
        value = as_float(value)
        if value.shape[value.ndim - self.event_dim :] != self.event_shape or value.ndim < self.event_dim:
            raise ValueError(f"x has shape {value.shape}, which does not end in the event shape {self.event_shape}")
        if _is_unbounded(self.support):
            return self._density(value)
        inside = self.support(value)
        feasible = jnp.reshape(inside, inside.shape + (1,) * self.event_dim)
        value = jnp.where(feasible, value, self.support.feasible_like(value))
        return jnp.where(inside, self._density(value), -jnp.inf)

    def _density(self, value):
        # discrete distributions look integers up
        own = value.astype(int) if self.support.is_discrete else value
        return self.base.log_prob(own) - self.inverse_temperature * self.energy(value)

    def log_normalizer_value(self) -> Any:
        """The given log Z, or None."""
        if not callable(self.log_normalizer):
            return self.log_normalizer
        parameters = inspect.signature(self.log_normalizer.func).parameters.values()
        takes_distribution = any(
            p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters
        )
        return self.log_normalizer(self) if takes_distribution else self.log_normalizer()

    @validate_sample
    def log_prob(self, value: jax.Array) -> jax.Array:
        """Log-density, less log Z where that is not known; guarded.

        Raises
        ------
        IntractableNormalizerError
            When it is differentiated in a parameter of energy, base or inverse temperature.
        """
        value = jnp.asarray(value)
        closed = jax.make_jaxpr(self.unnormalized_log_prob)(value)
        guarded = [jnp.issubdtype(jnp.result_type(c), jnp.inexact) for c in closed.consts]
        operands = [c for c, g in zip(closed.consts, guarded, strict=True) if g]
        site = site_name(self)
        for caller in caller_variables("self"):
            if isinstance(caller, dist.MixtureGeneral | dist.MixtureSameFamily) and self.log_normalizer is None:
                raise _refuse(f"{site}, a component of a mixture")
        operands, log_normalizer = guard(operands, _refuse(site), self.log_normalizer_value())
        rest = iter(operands)
        consts = [next(rest) if g else c for c, g in zip(closed.consts, guarded, strict=True)]
        (density,) = jaxpr_as_fun(closed.replace(consts=consts))(value)
        return density if log_normalizer is None else density - log_normalizer

    def score(self, value: jax.Array) -> jax.Array:
        """Gradient of the log-density in x, exact without log Z.

        Parameters
        ----------
        value
            Shape ``(..., *batch_shape, *event_shape)``.

        Returns
        -------
        jax.Array
            The shape of `value`; on a sphere the gradient in the ambient space.

        Raises
        ------
        ValueError
            If the support is discrete.
        """
        if self.support.is_discrete:
            raise ValueError(f"a score needs a continuous support, got {self.support}")
        value = as_float(value)
        density, pullback = jax.vjp(self.unnormalized_log_prob, value)
        return pullback(jnp.ones_like(density))[0]

    def with_sampler(self, sampler: Callable) -> "EnergyBased":
        """Return this distribution with ``sampler(rng_key, distribution, sample_shape)``."""
        if not callable(sampler):
            raise TypeError(f"sampler must be callable, got {type(sampler).__name__}")
        other = copy.copy(self)
        other.sampler = sampler
        return other

    def sample(self, key: jax.Array | None, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        """Draw with the sampler.

        Raises
        ------
        NotImplementedError
            Where no sampler was given.
        """
        if self.sampler is None:
            raise NotImplementedError(
                f"{site_name(self)}: an EnergyBased distribution has no sampler of its own. Give it one by "
                ".with_sampler(sampler), where sampler(rng_key, distribution, sample_shape) returns draws; or sample the "
                "site by MCMC with numpyro_ebm.MALA or NUTS."
            )
        draws = self.sampler(key, self, sample_shape)
        if jnp.shape(draws) != self.shape(sample_shape):
            raise ValueError(
                f"{site_name(self)}: the sampler returned shape {jnp.shape(draws)}, expected {self.shape(sample_shape)}"
            )
        return draws


def detached(distribution: EnergyBased, value: jax.Array) -> Callable:
    """Return the unguarded log-density at the shape of `value`, constant in its parameters.

    Parameters and latent variables hide in closures, where `jax.lax.stop_gradient` can't reach
    them; they are made arguments first. Chains move on this function.
    """
    closed = jax.make_jaxpr(distribution.unnormalized_log_prob)(value)
    frozen = jaxpr_as_fun(closed.replace(consts=jax.lax.stop_gradient(closed.consts)))
    return lambda x: frozen(x)[0]


def _elementwise(support):
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _is_unbounded(support):
    support = _elementwise(support)
    return support is constraints.real or is_sphere(support)


def unwrap(fn: dist.Distribution) -> EnergyBased | None:
    """The `EnergyBased` under plates' expansion, masks and ``to_event``; None if there is none."""
    while isinstance(fn, dist.ExpandedDistribution | dist.MaskedDistribution | dist.Independent | Ambient):
        fn = fn.base_dist
    return fn if isinstance(fn, EnergyBased) else None


def components(fn: dist.Distribution) -> list[EnergyBased]:
    """All `EnergyBased` that a distribution is made of: below transforms and in mixtures as well."""
    if isinstance(fn, EnergyBased):
        return [fn]
    if isinstance(fn, dist.MixtureGeneral):
        return [found for component in fn.component_distributions for found in components(component)]
    if isinstance(fn, dist.MixtureSameFamily):
        return components(fn.component_distribution)
    return components(fn.base_dist) if isinstance(getattr(fn, "base_dist", None), dist.Distribution) else []


def unmasked(fn: dist.Distribution, batch_shape: tuple[int, ...]) -> jax.Array | None:
    """Which events a site's masks leave, of shape `batch_shape`; None where nothing is masked.

    `batch_shape` are all dimensions of independent events, those that ``to_event`` hides included.
    """
    inner = unwrap(fn)
    event_dim = 0 if inner is None else inner.event_dim
    found = None
    while isinstance(fn, dist.ExpandedDistribution | dist.MaskedDistribution | dist.Independent | Ambient):
        if isinstance(fn, dist.MaskedDistribution):
            mask = jnp.broadcast_to(fn._mask, fn.batch_shape)
            mask = jnp.reshape(mask, mask.shape + (1,) * (fn.event_dim - event_dim))
            mask = jnp.broadcast_to(mask, batch_shape)
            found = mask if found is None else found & mask
        fn = fn.base_dist
    return found


def caller_variables(*names: str) -> Iterator[Any]:
    """Values of local variables of these names in the calling frames, innermost first.

    NumPyro passes neither a site's name to its distribution, nor the inference object to a
    handler. Both are on the stack, and are needed for messages that say where.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # a look at a frame's variables keeps them all alive while it runs: JAX's own hold tracers then
        if frame.f_globals.get("__name__", "").split(".")[0] != "jax":
            code = frame.f_code
            known = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
            if any(name in known for name in names):
                yield from (frame.f_locals[name] for name in names if name in frame.f_locals)
        frame = frame.f_back


def site_name(distribution: EnergyBased) -> str:
    """``"site 'x'"`` where NumPyro is at work on one, else ``"EnergyBased"``."""
    for site in caller_variables("site", "msg"):
        if isinstance(site, dict) and site.get("type") == "sample" and unwrap(site.get("fn")) is not None:
            if unwrap(site["fn"]) is distribution:
                return f"site {site['name']!r}"
    return "EnergyBased"
