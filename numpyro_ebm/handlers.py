"""Effect handlers that make energy-based sites trainable, and the check for the ones that are not."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from numpyro.infer import ELBO, SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoGuide
from numpyro.infer.gibbs import latent_sample_sites, prototype_trace
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger, mutable

from numpyro_ebm.distributions import EnergyBased, ambient, caller_variables, unwrap, validate_observations
from numpyro_ebm.pool import Observations


class _Estimated(dist.Distribution):
    """An `EnergyBased` whose log Z is replaced by a surrogate with the same gradient."""

    arg_constraints: dict = {}
    pytree_data_fields = ("distribution", "surrogate")

    def __init__(self, distribution, surrogate):
        self.distribution = distribution
        self.surrogate = surrogate
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
        return self.distribution.unnormalized_log_prob(value) - self.surrogate


class estimate(Messenger):
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
        if not (callable(config) or isinstance(config, Mapping) or _is_estimator(config)):
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
        return super().__enter__()

    def __exit__(self, *exc_info):
        super().__exit__(*exc_info)
        if exc_info[0] is None and isinstance(self.config, Mapping) and set(self.config) - self._seen:
            raise ValueError(
                f"estimate's config names {sorted(set(self.config) - self._seen)}, but the model's energy-based sites "
                f"are {sorted(self._seen)}"
            )

    def process_message(self, msg):
        if msg["type"] == "plate":
            self._plates[msg["name"]] = msg["args"]
        if msg["type"] != "sample":
            return
        distribution = unwrap(msg["fn"])
        if distribution is None:
            return
        self._seen.add(msg["name"])
        estimator = self._estimator(msg)
        if estimator is None or not _inside_svi():
            return
        self._check_batch(msg, distribution)
        observations = None
        if msg["is_observed"]:
            validate_observations(msg["name"], distribution, msg["value"])
            observations = _observations(msg, distribution)

        name = f"{msg['name']}$chains"
        holder = mutable(name)
        if holder is None:
            # SVI.init keeps the chains where they start, SVI.evaluate keeps none
            start = estimator.init(numpyro.prng_key(), distribution, observations)
            mutable(name, {"state": start})
            holder = {"state": start}
        surrogate, holder["state"] = estimator.update(numpyro.prng_key(), holder["state"], distribution, observations)
        msg["fn"] = _rewrap(msg["fn"], _Estimated(distribution, surrogate))

    def _estimator(self, msg):
        if _is_estimator(self.config):
            return self.config
        if isinstance(self.config, Mapping):
            return self.config.get(msg["name"])
        estimator = self.config(msg)
        if estimator is not None and not _is_estimator(estimator):
            raise TypeError(f"config returned {estimator!r} for site {msg['name']!r}, expected an estimator or None")
        return estimator

    def _check_batch(self, msg, distribution):
        """Chains of a batch of energies belong to observations, which a subsampled plate exchanges."""
        for frame in msg["cond_indep_stack"]:
            size, subsample_size = self._plates.get(frame.name, (frame.size, None))
            if -frame.dim <= len(distribution.batch_shape) and subsample_size not in (None, size):
                raise NotImplementedError(
                    f"site {msg['name']!r}: the energy has batch shape {distribution.batch_shape} inside the subsampled "
                    f"plate {frame.name!r}; chains that follow their observations under subsampling are not supported"
                )


def _is_estimator(config):
    return hasattr(config, "init") and hasattr(config, "update") and not isinstance(config, Mapping | type)


def _inside_svi():
    """Whether an inference that carries the chains is at work; raises if it would lose them."""
    for caller in caller_variables("self"):
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


def _observations(msg, distribution):
    """The site's observations as rows, whose masked ones have weight 0."""
    inner = distribution.batch_shape + distribution.event_shape
    value = jnp.asarray(msg["value"])
    if not jnp.issubdtype(value.dtype, jnp.inexact):
        value = value.astype(jnp.result_type(float))
    leading = msg["fn"].shape()
    leading = leading[: len(leading) - len(inner)]
    value = jnp.broadcast_to(value, leading + inner)
    weight: jax.Array | None = None
    fn = msg["fn"]
    while fn is not distribution:
        if isinstance(fn, dist.MaskedDistribution):
            mask = jnp.broadcast_to(fn._mask, fn.batch_shape)
            if mask.ndim > len(leading):
                raise NotImplementedError(
                    f"site {msg['name']!r}: the mask has shape {mask.shape}, and reaches into the energy's batch shape "
                    f"{distribution.batch_shape}: mask the plates outside of it"
                )
            mask = jnp.reshape(mask, mask.shape + (1,) * (len(leading) - mask.ndim))
            mask = jnp.ravel(jnp.broadcast_to(mask, leading)).astype(value.dtype)
            weight = mask if weight is None else mask * weight
        fn = fn.base_dist
    return Observations(jnp.reshape(value, (-1, *inner)), weight)


def _rewrap(fn, distribution):
    if isinstance(fn, dist.ExpandedDistribution):
        return _rewrap(fn.base_dist, distribution).expand(fn.batch_shape)
    if isinstance(fn, dist.MaskedDistribution):
        return _rewrap(fn.base_dist, distribution).mask(fn._mask)
    if isinstance(fn, dist.Independent):
        return _rewrap(fn.base_dist, distribution).to_event(fn.reinterpreted_batch_ndims)
    return distribution


def check_model(model: Callable, *args: Any, **kwargs: Any) -> dict[str, frozenset[str]]:
    """Name the sites whose unknown normaliser depends on a parameter or latent variable.

    The guard sees differentiation only. Kernels that use no gradient (``SA``, ``AIES``, ``ESS``)
    and discrete latent variables pass it by, and are silently wrong on such sites. This looks at
    what the densities are computed from instead.

    Parameters
    ----------
    model
        A NumPyro model.
    args, kwargs
        Its arguments.

    Returns
    -------
    dict
        For each faulty site the names of parameters and latent variables that its normaliser
        depends on; empty where all is well.

    Examples
    --------
    >>> import numpyro, numpyro.distributions as dist, numpyro_ebm as ebm
    >>> def model(x):
    ...     theta = numpyro.sample("theta", dist.Gamma(1, 1))
    ...     numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2, dist.Normal(0, 1)), obs=x)
    >>> check_model(model, 0.5)
    {'x': frozenset({'theta'})}
    """
    found = normalizer_dependencies(model, args, kwargs)
    return {name: site.names - site.known for name, site in found.items() if site.names - site.known}


class Dependencies(NamedTuple):
    """What the density of a site is computed from.

    Attributes
    ----------
    names
        Names of parameters and of latent variables, other than the site itself.
    latents
        Those of latent variables.
    known
        Names that a given log Z is computed from.
    """

    names: frozenset[str]
    latents: frozenset[str]
    known: frozenset[str]


def normalizer_dependencies(model: Callable, args: tuple, kwargs: dict) -> dict[str, Dependencies]:
    """For each energy-based site of a model: what its density is computed from."""
    model = ambient(model)
    with handlers.block():
        sites = prototype_trace(model, random.key(0), args, kwargs)
    latents = frozenset(latent_sample_sites(sites))
    values = {name: site["value"] for name, site in sites.items() if site["type"] == "param" or name in latents}

    def densities(**values):
        found = {}

        class Look(Messenger):
            def process_message(self, msg):
                distribution = unwrap(msg["fn"]) if msg["type"] == "sample" else None
                if distribution is not None:
                    density = distribution.unnormalized_log_prob(sites[msg["name"]]["value"])
                    found[msg["name"]] = density, distribution.log_normalizer_value()

        with handlers.block(), Look(), handlers.seed(rng_seed=0), handlers.substitute(data=values):
            model(*args, **kwargs)
        return found

    return {
        name: Dependencies(names, names & latents, known or frozenset())
        for name, (names, known) in eval_provenance(densities, **values).items()
    }


def fitted_distribution(
    model: Callable, params: Mapping[str, Any], *args: Any, site: str | None = None, **kwargs: Any
) -> EnergyBased:
    """Return a model's `EnergyBased` distribution at given parameters.

    Parameters
    ----------
    model
        A NumPyro model.
    params
        Values of its parameters, as `SVIRunResult.params` holds them, and of the latent variables
        that the energy depends on, if there are any.
    args, kwargs
        The model's arguments.
    site
        Name of the site; not needed where there is only one that is energy-based.

    Returns
    -------
    EnergyBased
        The distribution of one event, before plates expand it.

    Raises
    ------
    ValueError
        If there is no such site, several and none named, a parameter without a value, or an
        energy that depends on a latent variable without a value.
    """
    found: dict[str, EnergyBased] = {}

    class Find(Messenger):
        def process_message(self, msg):
            distribution = unwrap(msg["fn"]) if msg["type"] == "sample" else None
            if distribution is not None:
                found[msg["name"]] = distribution

    with handlers.block(), Find():
        prototype_trace(ambient(handlers.substitute(model, data=dict(params))), random.key(0), args, kwargs)
    if site is None and len(found) == 1:
        (site,) = found
    if site is None or site not in found:
        raise ValueError(f"site must be one of the model's energy-based sites {sorted(found)}, got {site!r}")
    depends = normalizer_dependencies(model, args, kwargs)[site]
    missing = sorted(depends.names - set(params))
    if missing:
        kinds = ", ".join(f"{name!r} ({'latent' if name in depends.latents else 'parameter'})" for name in missing)
        raise ValueError(f"site {site!r} depends on {kinds}: give values in params")
    return found[site]
