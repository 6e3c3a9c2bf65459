"""Results as ArviZ takes them, in both of its generations."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import arviz
import jax
import numpy as np
import numpyro
import xarray
from jax import random
from numpyro.distributions import biject_to
from numpyro.infer import MCMC
from numpyro.infer import log_likelihood as numpyro_log_likelihood
from numpyro.infer.gibbs import Gibbs, latent_sample_sites, prototype_trace
from numpyro.infer.svi import SVIRunResult, SVIState

from numpyro_ebm.diagnostics.posterior import posterior_log_likelihood
from numpyro_ebm.distributions import EnergyBased, ambient, is_sphere
from numpyro_ebm.energies import check_size
from numpyro_ebm.handlers import fitted_distribution, normalizer_dependencies, observed_sites
from numpyro_ebm.infer import MALA
from numpyro_ebm.monitor import chain_holders
from numpyro_ebm.normalizer import log_likelihood as normalized_log_likelihood
from numpyro_ebm.pool import PoolState

_IS_TREE = int(arviz.__version__.split(".")[0]) >= 1
_BLOCK_FIELDS = {
    "accept_prob": "acceptance_rate",
    "potential_energy": "lp",
    "adapt_state.step_size": "step_size",
    "num_steps": "n_steps",
    "diverging": "diverging",
    "auxiliary_accept_prob": "auxiliary_accept_prob",
}


def to_arviz(
    source: Any,
    model: Callable | EnergyBased | None = None,
    *args: Any,
    rng_key: jax.Array | None = None,
    log_likelihood: bool = True,
    options: dict | None = None,
    num_warmup: int = 500,
    num_samples: int = 500,
    num_chains: int = 8,
    coords: dict | None = None,
    dims: dict | None = None,
    **kwargs: Any,
) -> Any:
    """Return chains, their statistics, observed data and normalised log-likelihoods for ArviZ.

    Parameters
    ----------
    source
        One of: an `MCMC` that has run, of any kernel; the result of ``svi.run`` or ``DualSGDA.run``, with the bare `model` and its
        arguments; the state of a pool, with its fitted distribution in the place of the model.
        Results and pools are point estimates: their chains go on from the pool by :class:`~numpyro_ebm.MALA`, at the
        parameters that they have now, so that R-hat and effective sample size are those of a target that stands still.
    model, *args, **kwargs
        The model and its arguments, without ``estimate``; an `MCMC` knows them.
    rng_key
        Key of chains and log Z; needed for results and pools, and for the log-likelihood of an `MCMC` whose
        energy-based sites have an unknown normaliser that depends on latent variables (:class:`~numpyro_ebm.Exchange`).
    log_likelihood
        Add the normalised log-likelihood of each observation, whose log Z is estimated.
    options
        Of :func:`~numpyro_ebm.log_normalizer`, `method` among them.
    num_warmup, num_samples, num_chains
        Of the chains of results and pools.
    coords, dims
        As in ``arviz.from_numpyro``; `dims` of a site name the dimensions of one event (and those of a batch of energies).

    Returns
    -------
    arviz.InferenceData or xarray.DataTree
        With ArviZ 0.x and 1.x, in this order. Groups ``posterior`` (for point estimates: draws of the model), ``sample_stats``,
        ``observed_data`` and ``log_likelihood``; of `Exchange` also ``log_normalizer`` and its ``log_normalizer_stderr``
        for each site and draw, in ``sample_stats``. Statistics of the blocks of NumPyro's ``Gibbs`` too, where they were recorded:
        ``mcmc.run(key, ..., extra_fields=block_fields(kernel))``.

    Raises
    ------
    TypeError, ValueError
        If `source` is none of these, `model` or `rng_key` is missing, or there are fewer chains in the pool.

    Warns
    -----
    UserWarning
        If an estimate of log Z is not reliable, or statistics of a ``Gibbs`` were not recorded.

    Examples
    --------
    >>> import numpyro_ebm as ebm, numpyro.distributions as dist
    >>> from jax import random
    >>> d = ebm.EnergyBased(lambda x: x**2, dist.Normal(0, 1))
    >>> state = ebm.ChainPool(pool_size=8).start(random.key(0), d)
    >>> idata = to_arviz(state, d, rng_key=random.key(1), num_samples=50)
    >>> idata["posterior"]["x"].shape
    (8, 50)
    """
    if isinstance(source, MCMC):
        return _of_mcmc(source, rng_key, log_likelihood, options or {}, coords, dims)
    for name, value in (("num_warmup", num_warmup), ("num_samples", num_samples), ("num_chains", num_chains)):
        check_size(name, value)
    if isinstance(source, PoolState):
        if not isinstance(model, EnergyBased):
            raise TypeError(
                "the state of a pool needs its fitted distribution: to_arviz(state, distribution, rng_key=...)"
            )
        fits: dict[str, Any] = {"x": (model, source, None)}
    elif isinstance(source, SVIRunResult):
        fits = _fits(source, model, args, kwargs)
    else:
        hint = ": give the whole result of run, which has the parameters" if isinstance(source, SVIState) else ""
        raise TypeError(
            f"source must be an MCMC, the result of a run or the state of a pool, got {type(source).__name__}{hint}"
        )
    if rng_key is None:
        raise ValueError("rng_key is needed: chains go on from the pool, and log Z is estimated")

    posterior, stats, observed, likelihoods = {}, {}, {}, {}
    for key, (name, (distribution, pool, x)) in zip(random.split(rng_key, len(fits)), fits.items(), strict=True):
        key_chains, key_likelihood = random.split(key)
        start = _unconstrained(distribution, pool, num_chains)
        mcmc = MCMC(
            MALA(lambda d=distribution, name=name: numpyro.sample(name, d)),
            num_warmup=num_warmup,
            num_samples=num_samples,
            num_chains=num_chains,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(key_chains, init_params={name: start})
        posterior[name] = np.asarray(mcmc.get_samples(group_by_chain=True)[name])
        suffix = "" if len(fits) == 1 else f"_{name}"
        for field, values in mcmc.get_extra_fields(group_by_chain=True).items():
            stat = _BLOCK_FIELDS.get(field, field)
            stats[f"{stat}{suffix}"] = np.asarray(-values if stat == "lp" else values)
        if x is not None:
            observed[name] = np.asarray(x)
            if log_likelihood:
                likelihood = normalized_log_likelihood(distribution, x, key_likelihood, **(options or {}))
                if not np.all(likelihood.reliable):
                    _warn(name, np.ravel(likelihood.reason)[np.argmin(np.ravel(likelihood.reliable))])
                likelihoods[name] = likelihood.value[None, None]
    idata = _from_groups({"posterior": posterior, "sample_stats": stats}, coords, dims)
    for group, arrays, sample_dims in (
        ("observed_data", observed, ()),
        ("log_likelihood", likelihoods, ("chain", "draw")),
    ):
        if arrays:
            event_dims = dims if group == "observed_data" else None
            _attach(idata, group, _dataset(arrays, sample_dims, coords, event_dims))
    return idata


def block_fields(kernel: Gibbs) -> tuple[str, ...]:
    """Names of the statistics of a ``Gibbs`` kernel's blocks, for ``extra_fields`` of ``mcmc.run``.

    Parameters
    ----------
    kernel
        A ``Gibbs`` kernel, of any blocks.

    Returns
    -------
    tuple of str
        Such as ``'block_states.0.accept_prob'``.

    Examples
    --------
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import NUTS, Gibbs
    >>> def model():
    ...     numpyro.sample("a", dist.Normal(0, 1))
    ...     numpyro.sample("b", dist.Normal(0, 1))
    >>> block_fields(Gibbs([(NUTS(model), ["a"]), (MALA(model), ["b"])]))[:2]
    ('block_states.0.potential_energy', 'block_states.0.num_steps')
    """
    if not isinstance(kernel, Gibbs):
        raise TypeError(f"block_fields is of numpyro.infer.Gibbs, got {type(kernel).__name__}")
    common = ("potential_energy", "num_steps", "accept_prob", "diverging", "adapt_state.step_size")
    fields = []
    for i, (block, _) in enumerate(kernel.blocks):
        known = set(block.default_fields) | (set(common) if hasattr(block, "_trajectory_length") else set())
        fields += [f"block_states.{i}.{name}" for name in (*common, "auxiliary_accept_prob") if name in known]
    return tuple(fields)


def _of_mcmc(mcmc, rng_key, log_likelihood, options, coords, dims):
    model, args, kwargs = mcmc.sampler.model, mcmc._args, mcmc._kwargs
    samples, energies, hidden = mcmc.get_samples(group_by_chain=True), set(), set()
    if model is not None:
        trace = prototype_trace(ambient(model), random.key(0), args, kwargs)
        samples = {name: values for name, values in samples.items() if name in latent_sample_sites(trace)}
        energies = set(observed_sites(model, jax.tree.map(lambda v: v[0, 0], samples), args, kwargs))
        hidden = {
            name for name in normalizer_dependencies(model, args, kwargs) if trace[name]["is_observed"]
        } - energies
    # ArviZ would take densities without their normalisers for likelihoods
    of_numpyro = log_likelihood and model is not None and not energies and not hidden
    idata = arviz.from_numpyro(mcmc, coords=coords, dims=dims, log_likelihood=of_numpyro)
    stats = _block_statistics(mcmc) if isinstance(mcmc.sampler, Gibbs) else {}
    if log_likelihood and (energies or hidden):
        likelihoods = {}
        if energies:
            others = {name: value for name, value in options.items() if name != "method"}
            method = options.get("method", "smc")
            found = posterior_log_likelihood(
                model, samples, *args, rng_key=rng_key, method=method, options=others, **kwargs
            )
            for name, site in found.items():
                # ArviZ knows no masks: what they hide is left out, in one dimension
                shown = np.all(np.isfinite(site.value), axis=(0, 1))
                likelihoods[name] = site.value if np.all(shown) else site.value[:, :, shown]
                if not site.reliable:
                    _warn(name, site.reason)
                suffix = "" if len(found) == 1 else f"_{name}"
                stats |= {f"log_normalizer{suffix}": site.log_normalizer, f"log_normalizer_stderr{suffix}": site.stderr}
        for name in hidden:
            warnings.warn(
                f"site {name!r}: its energy stands below a transform or in a mixture, whose log-likelihood is left out",
                stacklevel=3,
            )
        ordinary = numpyro_log_likelihood(model, samples, *args, batch_ndims=2, **kwargs)
        likelihoods |= {n: np.asarray(values) for n, values in ordinary.items() if n not in energies | hidden}
        if likelihoods:
            leading = {n: (dims or {}).get(n, [])[: np.ndim(v) - 2] for n, v in likelihoods.items()}
            _attach(idata, "log_likelihood", _dataset(likelihoods, ("chain", "draw"), coords, leading))
    if stats:
        known = idata["sample_stats"]
        known = known.to_dataset() if hasattr(known, "to_dataset") else known
        known = known.drop_vars([name for name in known.data_vars if str(name).startswith("block_states")])
        _attach(idata, "sample_stats", xarray.merge([known, _dataset(stats, ("chain", "draw"), None, None)]))
    return idata


def _block_statistics(mcmc):
    """Statistics of Gibbs' blocks, each by the names of its sites; and of all of them by the names that ArviZ knows."""
    stats: dict = {}
    for field, values in mcmc.get_extra_fields(group_by_chain=True).items():
        prefix, _, rest = field.partition(".")
        if prefix != "block_states":
            continue
        i, _, name = rest.partition(".")
        stat = _BLOCK_FIELDS.get(name, name)
        values = np.asarray(-values if stat == "lp" else values)
        stats[f"{stat}_{'_'.join(mcmc.sampler._sites[int(i)])}"] = values
        if stat == "lp":
            stats["lp"] = values
        if stat == "diverging":
            stats["diverging"] = values | stats.get("diverging", False)
    if not stats:
        warnings.warn(
            "statistics of Gibbs' blocks were not recorded: mcmc.run(..., extra_fields=block_fields(kernel)) does",
            stacklevel=4,
        )
    return stats


def _fits(result, model, args, kwargs):
    """Fitted distribution, pool and observations of each site."""
    if not callable(model):
        raise TypeError(
            "the result of a run needs its model and the model's arguments: to_arviz(result, model, *args, rng_key=...)"
        )
    pools = {name: holder["state"] for name, holder in chain_holders(result.state).items()}
    if not pools:
        raise ValueError("result has no chains: it is not of a model under estimate with a pool, nor of DualSGDA")
    sites = observed_sites(model, result.params, args, kwargs)
    fits = {}
    for name, pool in pools.items():
        distribution = fitted_distribution(model, result.params, *args, site=name, **kwargs)
        x = sites[name].value if name in sites and not distribution.batch_shape else None
        fits[name] = distribution, pool, x
    return fits


def _unconstrained(distribution, pool, num_chains):
    """Positions of the first chains, as MCMC starts them."""
    position = pool.position
    if position.shape[1:] != distribution.batch_shape + distribution.event_shape:
        raise ValueError(
            f"the pool has chains of shape {position.shape[1:]}, but the distribution {distribution.batch_shape + distribution.event_shape}"
        )
    if num_chains > len(position):
        raise ValueError(f"num_chains must be at most the pool's {len(position)}, got {num_chains}")
    position = position[np.linspace(0, len(position) - 1, num_chains).astype(int)]
    support = distribution.support
    return position if is_sphere(support) else biject_to(support).inv(position)


def _from_groups(groups, coords, dims):
    groups = {name: arrays for name, arrays in groups.items() if arrays}
    if _IS_TREE:
        return arviz.from_dict(groups, coords=coords, dims=dims)
    return arviz.from_dict(**groups, coords=coords, dims=dims)


def _dataset(arrays: Mapping[str, np.ndarray], sample_dims, coords, dims):
    """Arrays of observations: the dimensions of an event by the user's names, those before by the variable's."""
    variables = {}
    for name, array in arrays.items():
        event = list((dims or {}).get(name, []))[-max(np.ndim(array) - len(sample_dims), 0) :] if dims else []
        num = np.ndim(array) - len(sample_dims) - len(event)
        variables[name] = ((*sample_dims, *[f"{name}_dim_{i}" for i in range(num)], *event), np.asarray(array))
    used = {dim for names, _ in variables.values() for dim in names}
    return xarray.Dataset(variables, {dim: values for dim, values in (coords or {}).items() if dim in used})


def _attach(idata, name, dataset):
    if _IS_TREE:
        idata[name] = xarray.DataTree(dataset)
        return
    if name in idata.groups():
        del idata[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names of groups
        idata.add_groups({name: dataset})


def _warn(name, reason):
    warnings.warn(f"site {name!r}: its log Z is not reliable ({reason})", stacklevel=4)
