"""What the chains of a training say about it."""

from typing import Any, NamedTuple

import numpy as np

from numpyro_ebm.pool import PoolState


class ChainReport(NamedTuple):
    """How the chains of a site are, as numbers.

    Attributes
    ----------
    num_moves
        Moves of each chain so far.
    acceptance_rate, step_size
        Of the last update.
    energy_gap
        Mean energy of chains less that of observations, at the last update; near 0 where chains keep
        up. Grown to tens and more, it says that chains are left behind.
    max_energy
        Largest absolute energy of chains and observations so far; infinite once one was not finite.
    num_nonfinite
        Chains restarted so far because they turned non-finite.
    diverged
        Whether `max_energy` is over the limit.
    """

    num_moves: Any
    acceptance_rate: Any
    step_size: Any
    energy_gap: Any
    max_energy: Any
    num_nonfinite: Any
    diverged: Any


def chain_report(state: Any, max_energy: float = 1e4) -> dict[str, ChainReport]:
    """Report on the chains of each site that has some.

    Parameters
    ----------
    state
        `SVIState` of an estimated model, such as ``svi.run(...).state``; of several runs at once
        under `jax.vmap`, the report's numbers are arrays.
    max_energy
        Limit on absolute energies, over which a run counts as diverged.

    Raises
    ------
    ValueError
        If the state holds no chains.

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
    >>> report = chain_report(dual.run(random.key(1), 10, x, progress_bar=False).state)
    >>> report["x"].num_moves, report["x"].diverged
    (10, False)
    """
    pools = {name: holder["state"] for name, holder in chain_holders(state).items()}
    if not pools:
        raise ValueError(
            "state holds no chains: give the SVIState of a model under estimate with ContrastiveDivergence or "
            "SoftmaxContrastive, or of DualSGDA"
        )
    return {name: _report(pool, max_energy) for name, pool in pools.items()}


def chain_holders(state: Any) -> dict[str, Any]:
    """What `estimate` keeps of each site that has a pool, by name: its ``"state"`` and its ``"history"``."""
    return {
        name.removesuffix("$chains"): holder
        for name, holder in (getattr(state, "mutable_state", None) or {}).items()
        if name.endswith("$chains") and isinstance(holder["state"], PoolState)
    }


def _report(pool, limit):
    values = {name: np.asarray(getattr(pool, name)) for name in ChainReport._fields[:-1]}
    # NaN is over any limit
    values["diverged"] = ~(values["max_energy"] <= limit)
    return ChainReport(**{name: value.item() if value.ndim == 0 else value for name, value in values.items()})
