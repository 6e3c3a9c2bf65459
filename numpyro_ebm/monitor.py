"""What is watched while a model is trained, and what happens when it goes wrong."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from numpyro_ebm.energies import check_positive, check_size
from numpyro_ebm.pool import PoolState

POLICIES = ("raise", "stop", "heal")


class DivergenceError(RuntimeError):
    """Training went wrong.

    Parameters
    ----------
    message
        What went wrong, and the next step.
    step, result, site, report
        As the attributes.

    Attributes
    ----------
    step
        The update, from 1, at which it did.
    result
        `SVIRunResult` of the last good state: params, state and the losses before `step`.
    site
        Name of the site whose chains show it; None where a loss or parameter is not finite.
    report
        :func:`chain_report` of the update that went wrong.

    Examples
    --------
    >>> error = DivergenceError("update 7 went wrong", 7, None, site="x")
    >>> try:
    ...     raise error     # as DualSGDA.run and MonitoredSVI.run do
    ... except DivergenceError as caught:
    ...     print(caught.step, caught.site)     # and go on from caught.result
    7 x
    """

    def __init__(self, message: str, step: int, result: Any, site: str | None = None, report: dict | None = None):
        super().__init__(message)
        self.step = step
        self.result = result
        self.site = site
        self.report = report or {}

    def __reduce__(self):
        return DivergenceError, (*self.args, self.step, self.result, self.site, self.report)


class Fault(NamedTuple):
    """What is wrong with an update, in words, and the site whose chains show it."""

    reason: str
    site: str | None


@dataclass(frozen=True)
class Monitor:
    """Limits within which a training is healthy, and what happens outside of them.

    Parameters
    ----------
    max_energy
        Largest absolute energy (times the inverse temperature) of chains and observations, in nats; infinite: none.
    max_gap
        Largest absolute difference of the mean energies of chains and observations, in nats.
    policy
        ``"raise"`` a :class:`DivergenceError` that holds the last good state; ``"stop"`` with a warning and return that
        state; or ``"heal"``: go on from that state with chains that start anew, with a warning.
    max_heals
        How often chains start anew before an error is raised.

    Raises
    ------
    ValueError
        If an argument is out of its range.

    Notes
    -----
    Losses and parameters that are not finite are a fault whatever the limits; under ``stable_update`` an update with such a
    loss is skipped, and a fault only where a hundred in a row are. Single chains that turn non-finite restart by
    themselves, and are counted.

    Examples
    --------
    >>> Monitor(policy="heal").max_energy
    10000.0
    """

    max_energy: float = 1e4
    max_gap: float = 1e3
    policy: str = "raise"
    max_heals: int = 10

    def __post_init__(self):
        for name in ("max_energy", "max_gap"):
            if getattr(self, name) != math.inf:
                check_positive(name, getattr(self, name))
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {POLICIES}, got {self.policy!r}")
        check_size("max_heals", self.max_heals)

    def fault(self, state: Any) -> Fault | None:
        """What is wrong with the chains of an `SVIState`; None where all is well."""
        for name, holder in chain_holders(state).items():
            pool = holder["state"]
            num_chains, energy, gap = pool.age.size, float(pool.max_energy), float(pool.energy_gap)
            chains = f"{num_chains} chains, of which {int(pool.num_nonfinite)} were restarted as non-finite so far"
            # NaN is over any limit
            if not energy <= self.max_energy:
                return Fault(
                    f"site {name!r}: an energy of size {energy:.3g} (limit {self.max_energy:g}); {chains}", name
                )
            if not abs(gap) <= self.max_gap:
                return Fault(
                    f"site {name!r}: chains' energies are {gap:.3g} over the data's (limit {self.max_gap:g}); {chains}",
                    name,
                )
        return None


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

    Returns
    -------
    dict of ChainReport
        By the name of the site.

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
