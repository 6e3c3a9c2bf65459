"""How a training and its chains went, as data."""

from typing import Any

import numpy as np
import xarray

from numpyro_ebm.handlers import RECORDED
from numpyro_ebm.monitor import chain_holders
from numpyro_ebm.pool import ORIGINS


def training_diagnostics(result: Any) -> xarray.Dataset:
    """Return what was recorded while an estimated model was trained.

    Parameters
    ----------
    result
        What ``svi.run`` or ``DualSGDA.run`` returned, or an `SVIState`.

    Returns
    -------
    xarray.Dataset
        Of dimensions ``(site, update)``: ``energy_gap``, ``acceptance_rate``, ``step_size``, ``max_energy`` and
        ``num_nonfinite`` (both so far), and ``norm`` of shallow energies. At most 512 updates are kept, evenly: where there
        were more, every second, fourth, ... one. Of dimensions ``(site, chain)``, at the end: ``age``, the moves since a
        chain last restarted, ``num_restarts``, and ``origin``, where it last started: 0 at the beginning, 1 at an
        observation, 2 at a draw of `init`, 3 in the place of a non-finite one (chains of all elements of a batch, one after
        the other; NaN where a site has fewer). ``loss`` of dimension ``step``, where a result was given.

    Raises
    ------
    ValueError
        If there are no chains, or those of several runs at once.

    Notes
    -----
    R-hat of chains whose target still moves means little: it is small for chains that are all left behind alike, and large
    for healthy ones while the energy changes. Look at the energy gap while training, and at R-hat of
    :func:`~numpyro_ebm.to_arviz`, whose chains have a target that stands still.

    Examples
    --------
    >>> import numpyro, numpyro_ebm as ebm
    >>> from jax import random
    >>> def model(x):
    ...     energy = ebm.f1_energy("energy", dim=3, num_neurons=16, radius=5.0)
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=x)
    >>> x = ebm.SphereUniform(3).sample(random.key(0), (100,))
    >>> dual = ebm.DualSGDA(model, step_size=1e-2, num_chains=200)
    >>> diagnostics = training_diagnostics(dual.run(random.key(1), 10, x, progress_bar=False))
    >>> diagnostics["energy_gap"].sizes["update"], int(diagnostics["age"].min())
    (10, 10)
    """
    holders = chain_holders(getattr(result, "state", result))
    if not holders:
        raise ValueError("result has no chains: give what svi.run returned for a model under estimate, or DualSGDA.run")
    histories = {name: holder["history"] for name, holder in holders.items()}
    if any(np.ndim(history.num_updates) for history in histories.values()):
        raise ValueError(
            "result is of several runs at once: give one of them, jax.tree.map(lambda leaf: leaf[0], result)"
        )
    stride, num = (max(int(getattr(h, part)) for h in histories.values()) for part in ("stride", "num_updates"))
    updates = np.arange(0, num, stride)
    rows = np.stack([np.asarray(history.rows)[: len(updates)] for history in histories.values()])
    variables: dict[str, Any] = {name: (("site", "update"), rows[..., i]) for i, name in enumerate(RECORDED)}

    num_chains = max(np.size(holder["state"].age) for holder in holders.values())
    for name in ("age", "num_restarts", "origin"):
        values = np.full((len(holders), num_chains), np.nan)
        for row, holder in zip(values, holders.values(), strict=True):
            each = np.ravel(getattr(holder["state"], name))
            row[: each.size] = each
        variables[name] = ("site", "chain"), values
    variables["origin"] = (*variables["origin"], {"flag_values": [0, 1, 2, 3], "flag_meanings": " ".join(ORIGINS)})
    if hasattr(result, "losses"):
        variables["loss"] = "step", np.asarray(result.losses)
    return xarray.Dataset(variables, {"site": list(holders), "update": updates})
