"""The effect handler that makes energy-based sites trainable by `SVI`."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import ELBO, SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoGuide, AutoLaplaceApproximation
from numpyro.primitives import Messenger, mutable

from numpyro_ebm.distributions import (
    EnergyBased,
    IntractableNormalizerError,
    caller_variables,
    guard,
    unmasked,
    unwrap,
    validate_observations,
)
from numpyro_ebm.energies import as_float
from numpyro_ebm.handlers.history import empty_history, record
from numpyro_ebm.joint import Classifier, ConditionalEnergy, check_labels
from numpyro_ebm.pool import PER_CHAIN, Observations, PoolState


class Estimated(dist.Distribution):
    """An `EnergyBased` with an estimator's objective in the place of its log-density."""

    arg_constraints: dict = {}

    def __init__(self, distribution, objective):
        self.distribution = distribution
        self.objective = objective
        super().__init__(distribution.batch_shape, distribution.event_shape)

    @property
    def support(self):
        return self.distribution.support

    @property
    def has_rsample(self):
        return False

    def sample(self, key, sample_shape=()):
        return self.distribution.sample(key, sample_shape)

    def log_prob(self, value):
        return self.objective(as_float(value))


class Followed(NamedTuple):
    """Rows of chains that belong to observations, of which a subsampled plate takes some.

    Attributes
    ----------
    rows
        For each dimension of the energy's batch, which of its elements are present.
    shape
        The batch shape of all elements.
    """

    rows: tuple[jax.Array, ...]
    shape: tuple[int, ...]

    def spread(self, state: PoolState) -> dict:
        """Chains of all elements, none of which has been met yet."""
        dims = 1 + len(self.shape)
        rows = {name: getattr(state, name) for name in PER_CHAIN}
        rows = {name: jnp.zeros((r.shape[0], *self.shape, *r.shape[dims:]), r.dtype) for name, r in rows.items()}
        return {"state": state._replace(**rows), "is_started": jnp.zeros(self.shape, bool)}

    def take(self, holder: dict, fresh: PoolState) -> PoolState:
        """The present chains; those that are met for the first time start where `fresh` ones do."""
        started = holder["is_started"][self._mesh()]

        def present(name):
            rows, new = getattr(holder["state"], name)[(slice(None), *self._mesh())], getattr(fresh, name)
            return jnp.where(jnp.reshape(started, started.shape + (1,) * (rows.ndim - 1 - started.ndim)), rows, new)

        return holder["state"]._replace(**{name: present(name) for name in PER_CHAIN})

    def write(self, holder: dict, state: PoolState) -> dict:
        """All chains, the present ones as in `state`."""
        where = (slice(None), *self._mesh())
        rows = {name: getattr(holder["state"], name).at[where].set(getattr(state, name)) for name in PER_CHAIN}
        return {
            "state": state._replace(**rows),
            "is_started": holder["is_started"].at[self._mesh()].set(True),
        }

    def _mesh(self):
        return jnp.ix_(*self.rows)


class WholeData(Messenger):
    """Keeps the arrays that ``numpyro.subsample`` takes rows of, to look at them as a whole."""

    def __enter__(self):
        self._subsampled: list = []
        super().__enter__()
        return self

    def __exit__(self, *exc_info):
        super().__exit__(*exc_info)
        self._subsampled = []  # no tracer outlives the model's run

    def process_message(self, msg):
        if msg["type"] == "subsample":
            self._subsampled.append((msg, msg["value"]))

    def whole(self, value: Any) -> Any:
        """All that a subsample is of; any other array as it is."""
        return next((whole for subsample, whole in self._subsampled if subsample["value"] is value), value)

    def labels(self, msg: dict) -> tuple[Any, int] | None:
        """Labels at a site of a joint energy, all that a subsample is of, and the number of classes."""
        fn = msg["fn"]
        while isinstance(fn, dist.ExpandedDistribution | dist.MaskedDistribution | dist.Independent):
            fn = fn.base_dist
        if isinstance(fn, Classifier) and msg["is_observed"]:
            return self.whole(msg["value"]), fn.logits.shape[-1]
        energy = getattr(fn, "energy", None)
        if isinstance(energy, ConditionalEnergy):
            return self.whole(energy.labels), energy.num_classes
        return None

    def to_check(self, msg: dict, distribution: EnergyBased) -> Any:
        """Observations of a site as they are checked: all that a subsample is of, without what masks hide."""
        value = msg["value"]
        mask = unmasked(msg["fn"], site_batch_shape(msg))
        if mask is None:
            return self.whole(value)
        value = jnp.broadcast_to(value, mask.shape + distribution.event_shape)
        hidden = jnp.reshape(~mask, mask.shape + (1,) * distribution.event_dim)
        return jnp.where(hidden, distribution.support.feasible_like(value), value)


class estimate(WholeData):
    """Make the energy-based sites of a model trainable by `SVI`.

    In the place of every site with an :class:`~numpyro_ebm.EnergyBased` distribution it puts a
    density whose gradient is the one that the estimator gives; chains live in `SVI`'s mutable
    state, under ``f"{site}$chains"``. Plates, subsampling, masks and scales apply as usual.

    It acts inside `SVI` only, with ``Trace_ELBO`` or ``TraceMeanField_ELBO`` and one particle;
    autoguides of such models take the estimated model, ``AutoNormal(estimate(model, ...))``.
    Under any other inference the guard stays in force.

    Parameters
    ----------
    fn
        The model.
    config
        One estimator for every energy-based site; or a dict of estimators by site name; or a
        function of the site (NumPyro's message) that returns an estimator, or None to leave the
        site alone.

    Raises
    ------
    TypeError
        If `config` is not one of these.
    ValueError
        Before training: if the dict names a site that is not energy-based, observations are not
        finite or off the support, or the inference can't carry the chains.

    Notes
    -----
    The losses are contrasts, not likelihoods: their gradients are right, their values are not.
    ``SVI.evaluate`` starts fresh chains. Where the energy depends on a latent variable, the guide
    needs chains that forget its last draw: many moves per update.

    Examples
    --------
    >>> import numpyro, optax, numpyro_ebm as ebm, numpyro.distributions as dist
    >>> from numpyro.infer import SVI, Trace_ELBO
    >>> def model(x):
    ...     loc = numpyro.param("loc", 0.0)
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("x", ebm.EnergyBased(lambda x: -loc * x, dist.Normal(0, 1)), obs=x)
    >>> pool = ebm.ChainPool(ebm.kernels.mala(0.5), pool_size=100)
    >>> svi = SVI(estimate(model, ebm.ContrastiveDivergence(pool)), lambda x: None, optax.adam(1e-2), Trace_ELBO())
    """

    def __init__(self, fn: Callable | None = None, config: Any = None):
        if isinstance(config, type) or not (callable(config) or isinstance(config, Mapping) or _is_estimator(config)):
            raise TypeError(
                f"config must be an estimator, a dict of estimators by site name or a function of a site, got {config!r}"
            )
        if isinstance(config, Mapping):
            for name, estimator in config.items():
                if not _is_estimator(estimator):
                    raise TypeError(f"config[{name!r}] must be an estimator, got {estimator!r}")
        self.config = config
        super().__init__(fn)

    def __enter__(self):
        self._plates: dict = {}
        self._seen: set = set()
        self._put: dict = {}
        return super().__enter__()

    def __exit__(self, *exc_info):
        super().__exit__(*exc_info)
        self._plates, self._put = {}, {}
        if exc_info[0] is not None:
            return
        if not self._seen and _inside_svi():
            raise ValueError("estimate: the model has no site with an EnergyBased distribution")
        if isinstance(self.config, Mapping) and set(self.config) - self._seen:
            raise ValueError(
                f"estimate's config names {sorted(set(self.config) - self._seen)}, but the model's energy-based sites "
                f"are {sorted(self._seen)}"
            )

    def process_message(self, msg):
        super().process_message(msg)
        if msg["type"] != "sample":
            return
        distribution = unwrap(msg["fn"])
        labels = self.labels(msg)
        if labels is not None:
            check_labels(f"site {msg['name']!r}", *labels)
        if distribution is None:
            return
        self._seen.add(msg["name"])
        estimator = self._estimator(msg)
        if estimator is None or not _inside_svi():
            return
        if msg.get("_control_flow_done"):
            raise NotImplementedError(f"site {msg['name']!r}: estimate does not serve sites inside of scan or cond")
        bounds = [b for b in jax.tree.leaves(distribution.support) if jnp.issubdtype(jnp.result_type(b), jnp.inexact)]
        error = (
            f"site {msg['name']!r}: the bounds of its support depend on a parameter or latent variable. The gradient of log Z "
            "has a term at the boundary then, which chains do not see: fix the bounds"
        )
        guard(bounds, IntractableNormalizerError(error))
        if msg["is_observed"]:
            validate_observations(msg["name"], distribution, self.to_check(msg, distribution))
            _check_pairs(msg, distribution)
        observations = _observations(msg, distribution)

        if getattr(estimator, "has_state", True):
            objective = self._update_chains(msg, estimator, distribution, observations)
        else:
            # SVI carries no empty state
            state = estimator.init(numpyro.prng_key(), distribution, observations)
            objective, _ = estimator.update(numpyro.prng_key(), state, distribution, observations)
        msg["fn"] = self._put[msg["name"]] = _rewrap(msg["fn"], Estimated(distribution, objective))

    def postprocess_message(self, msg):
        if msg["type"] == "plate":
            self._plates[msg["name"]] = msg["args"][0], msg["value"]
        put = self._put.get(msg.get("name"))
        if put is not None and isinstance(msg["fn"], dist.MaskedDistribution) and msg["fn"] is not put:
            raise ValueError(
                f"site {msg['name']!r}: a mask stands outside of estimate, which its chains do not see: mask the model, "
                "estimate(handlers.mask(model, ...), ...)"
            )

    def _update_chains(self, msg, estimator, distribution, observations):
        """Advance the chains in SVI's mutable state. Returns the objective."""
        name = f"{msg['name']}$chains"
        followed = self._followed(msg, distribution)
        holder = mutable(name)
        if holder is None:
            # SVI.init keeps the chains where they start, SVI.evaluate keeps none
            start = estimator.init(numpyro.prng_key(), distribution, observations)
            holder = followed.spread(start) if followed else {"state": start}
            if isinstance(start, PoolState):
                holder["history"] = empty_history()
            mutable(name, dict(holder))
        if followed:
            state = followed.take(holder, estimator.init(numpyro.prng_key(), distribution, observations))
        else:
            state = holder["state"]
            chains, own = jnp.shape(state.position)[1:], distribution.batch_shape + distribution.event_shape
            if not isinstance(distribution.energy, ConditionalEnergy) and chains != own:
                raise ValueError(
                    f"site {msg['name']!r}: each element of a batch of energies has chains of its own, of shape {chains} so far, "
                    f"but now the distribution has shape {own}: keep the size of batches, or draw them by a plate's "
                    "subsample_size, whose chains follow their observations"
                )
        objective, state = estimator.update(numpyro.prng_key(), state, distribution, observations)
        holder.update(followed.write(holder, state) if followed else {"state": state})
        if "history" in holder:
            holder["history"] = record(holder["history"], state, distribution)
        return objective

    def _estimator(self, msg):
        if _is_estimator(self.config):
            return self.config
        if isinstance(self.config, Mapping):
            return self.config.get(msg["name"])
        estimator = self.config(msg)
        if estimator is not None and not _is_estimator(estimator):
            raise TypeError(f"config returned {estimator!r} for site {msg['name']!r}, expected an estimator or None")
        return estimator

    def _followed(self, msg, distribution):
        """Which of all chains the present batch has, where chains belong to observations of a subsampled plate."""
        own = distribution.batch_shape
        if isinstance(distribution.energy, ConditionalEnergy):
            return None  # chains of p(x) or of classes
        reinterpreted = msg["fn"].event_dim - distribution.event_dim
        index, shape = [jnp.arange(size) for size in own], list(own)
        for frame in msg["cond_indep_stack"]:
            dim = frame.dim - reinterpreted
            size, rows = self._plates.get(frame.name, (frame.size, None))
            if -dim <= len(own) and own[dim] == frame.size and frame.size != size:
                index[dim], shape[dim] = rows, size
        return Followed(tuple(index), tuple(shape)) if tuple(shape) != own else None


def _is_estimator(config):
    return hasattr(config, "init") and hasattr(config, "update") and not isinstance(config, Mapping | type)


def _inside_svi():
    """Whether an inference that carries the chains is at work; raises if it would lose or misuse them."""
    for caller in caller_variables("self"):
        if isinstance(caller, AutoLaplaceApproximation):
            raise ValueError(
                "estimate does not serve AutoLaplaceApproximation, which needs second derivatives: the surrogate has the "
                "gradient of log Z only. Use AutoNormal or another guide"
            )
        if isinstance(caller, AutoGuide):
            return True
        if isinstance(caller, SVI | ELBO):
            elbo = caller.loss if isinstance(caller, SVI) else caller
            if not isinstance(elbo, Trace_ELBO | TraceMeanField_ELBO) or getattr(elbo, "multi_sample_guide", False):
                raise ValueError(
                    f"estimate needs Trace_ELBO or TraceMeanField_ELBO, without multi_sample_guide, got "
                    f"{type(elbo).__name__}: other losses drop the chains"
                )
            if elbo.num_particles != 1:
                raise ValueError(
                    f"estimate needs an ELBO with num_particles=1, got {elbo.num_particles}: NumPyro drops the chains "
                    "otherwise. Use more chains for less noise"
                )
            return True
    return False


def _check_pairs(msg, distribution):
    """Raise where broadcasting would pair each observation with each energy of a batch."""
    shape, own = site_batch_shape(msg), distribution.batch_shape
    observed = jnp.shape(msg["value"])[: jnp.ndim(msg["value"]) - distribution.event_dim]
    most = max(math.prod(own), math.prod(observed))
    if min(math.prod(own), math.prod(observed)) > 1 and math.prod(shape) > most:
        raise ValueError(
            f"site {msg['name']!r}: energies of batch shape {own} and observations of batch shape {observed} would pair each "
            f"with each, {math.prod(shape)} terms in plates {[frame.name for frame in msg['cond_indep_stack']]}: give both the "
            "shape of the plates"
        )


def _observations(msg, distribution):
    """The site's observations as rows, whose masked ones have weight 0."""
    batch_shape = site_batch_shape(msg)
    mask = unmasked(msg["fn"], batch_shape)
    if not msg["is_observed"]:
        return Observations(mask=mask)
    value = as_float(msg["value"])
    value = jnp.broadcast_to(value, batch_shape + distribution.event_shape)
    # dimensions left of the energy's own, and those in which it has one element for many observations
    own = distribution.batch_shape
    offset = len(batch_shape) - len(own)
    rows = [*range(offset), *(offset + i for i, size in enumerate(own) if size != batch_shape[offset + i])]
    size = math.prod(batch_shape[i] for i in rows)
    value = jnp.moveaxis(value, rows, range(len(rows)))
    weight = None
    if mask is not None:
        weight = jnp.reshape(jnp.moveaxis(mask, rows, range(len(rows))), (size, *own)).astype(value.dtype)
    return Observations(jnp.reshape(value, (size, *own, *distribution.event_shape)), weight, mask)


def site_batch_shape(msg: dict) -> tuple[int, ...]:
    """All dimensions of independent events at a site: plates, ``to_event`` and broadcast observations."""
    fn = msg["fn"]
    event_dim = _inner_event_dim(fn)
    shape = fn.shape()
    observed = () if msg["value"] is None else jnp.shape(msg["value"])
    try:
        return jnp.broadcast_shapes(shape[: len(shape) - event_dim], observed[: len(observed) - event_dim])
    except ValueError as error:
        raise ValueError(
            f"site {msg['name']!r}: observations of shape {observed} do not fit the distribution's shape {shape} in its plates "
            f"{[frame.name for frame in msg['cond_indep_stack']]}"
        ) from error


def _inner_event_dim(fn):
    inner = unwrap(fn)
    return len(fn.event_shape) if inner is None else inner.event_dim


def _rewrap(fn, distribution):
    if isinstance(fn, dist.ExpandedDistribution):
        return _rewrap(fn.base_dist, distribution).expand(fn.batch_shape)
    if isinstance(fn, dist.MaskedDistribution):
        return _rewrap(fn.base_dist, distribution).mask(fn._mask)
    if isinstance(fn, dist.Independent):
        return _rewrap(fn.base_dist, distribution).to_event(fn.reinterpreted_batch_ndims)
    return distribution
