"""What the densities of a model are computed from, and the distribution that a fit has found."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from numpyro import handlers
from numpyro.infer.gibbs import latent_sample_sites, prototype_trace
from numpyro.ops.provenance import eval_provenance
from numpyro.primitives import Messenger

from numpyro_ebm.distributions import EnergyBased, ambient, components, unwrap


def check_model(model: Callable, *args: Any, **kwargs: Any) -> dict[str, frozenset[str]]:
    """Name the sites whose unknown normaliser depends on a parameter or latent variable.

    The guard sees differentiation only. Kernels that use no gradient (``SA``, ``AIES``, ``ESS``)
    and discrete latent variables pass it by, and are silently wrong on such sites. This looks at
    what the densities are computed from instead.

    Parameters
    ----------
    model
        A NumPyro model.
    *args, **kwargs
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
                parts = components(msg["fn"]) if msg["type"] == "sample" else []
                if not parts:
                    return
                values = [jnp.zeros(part.batch_shape + part.event_shape) for part in parts]
                if parts == [unwrap(msg["fn"])]:
                    values = [sites[msg["name"]]["value"]]
                if any(0 in jnp.shape(value) for value in values):
                    shapes = [jnp.shape(value) for value in values]
                    raise ValueError(f"site {msg['name']!r}: there are no observations, their shape is {shapes[0]}")
                densities = [d.unnormalized_log_prob(value) for d, value in zip(parts, values, strict=True)]
                if isinstance(msg["fn"], dist.MixtureGeneral | dist.MixtureSameFamily):
                    # components' normalisers come between the weights, even where they are fixed
                    densities += jax.tree.leaves(msg["fn"].mixing_distribution)
                found[msg["name"]] = densities, [d.log_normalizer_value() for d in parts]

        with handlers.block(), Look(), handlers.seed(rng_seed=0), handlers.substitute(data=values):
            model(*args, **kwargs)
        return found

    def union(names):
        return frozenset().union(*jax.tree.leaves(names, is_leaf=lambda n: isinstance(n, frozenset)))

    provenance = eval_provenance(densities, **values)
    return {
        name: Dependencies(union(names), union(names) & latents, union(known))
        for name, (names, known) in provenance.items()
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
    *args, **kwargs
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

    Examples
    --------
    >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
    >>> def model(x):
    ...     theta = numpyro.param("theta", 1.0)
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("x", EnergyBased(lambda x: theta * x**2, dist.Normal(0, 1)), obs=x)
    >>> fitted = fitted_distribution(model, {"theta": 2.0}, jnp.zeros(5))
    >>> float(fitted.score(jnp.array(1.0)))     # -1 of the base, -4 of the energy
    -5.0
    """
    if not isinstance(params, Mapping):
        raise TypeError(f"params must be a dict of values by name, got {type(params).__name__}")
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
