"""How a training and its chains went."""

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from numpyro_ebm.distributions import EnergyBased
from numpyro_ebm.energies import check_size
from numpyro_ebm.plots.axes import axes_of, check_single, events_of, new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_PANELS = {"energy_gap": "energy gap", "acceptance_rate": "acceptance", "norm": "norm"}


def plot_training(diagnostics: Any, axes: Any = None) -> np.ndarray:
    """Draw how a training went: loss, energy gap, acceptance and norm, one panel each.

    The gap is the mean energy of chains less that of observations: near 0 where chains keep up.

    Parameters
    ----------
    diagnostics
        `xarray.Dataset` with variables ``energy_gap``, ``acceptance_rate`` and ``norm`` of dimensions
        ``("site", "update")`` and, optionally, ``loss`` of dimension ``"step"``. There is no panel for a norm that is
        NaN everywhere; other values that are not finite leave gaps.
    axes
        As many axes as there are panels. By default new ones in a column that share their x.

    Returns
    -------
    numpy.ndarray
        Axes of the panels, shape ``(num_panels,)``.

    Raises
    ------
    ValueError
        If a variable or dimension is missing or empty, or the number of `axes` is not that of the panels.

    Examples
    --------
    >>> import numpy as np, xarray
    >>> from matplotlib.figure import Figure
    >>> values = {name: (("site", "update"), np.ones((1, 5))) for name in ("energy_gap", "acceptance_rate", "norm")}
    >>> axes = plot_training(xarray.Dataset(values, {"site": ["x"]}), Figure().subplots(3))
    >>> [ax.get_ylabel() for ax in axes]
    ['energy gap', 'acceptance', 'norm']
    """
    if not hasattr(diagnostics, "data_vars"):
        raise TypeError(f"diagnostics must be an xarray.Dataset, got {type(diagnostics).__name__}")
    expected: dict[str, tuple] = dict.fromkeys(_PANELS, ("site", "update"))
    if "loss" in diagnostics.data_vars:
        expected = {"loss": ("step",), **expected}
    for name, dims in expected.items():
        if name not in diagnostics.data_vars:
            raise ValueError(f"diagnostics must hold {', '.join(expected)}, got {', '.join(diagnostics) or 'none'}")
        if set(diagnostics[name].dims) != set(dims) or diagnostics[name].size == 0:
            raise ValueError(f"{name} must have dimensions {dims}, not empty, got {dict(diagnostics[name].sizes)}")
    if np.isnan(diagnostics["norm"].values).all():
        del expected["norm"]
    if axes is not None and np.size(axes) != len(expected):
        raise ValueError(f"axes must be {len(expected)}, for {', '.join(expected)}, got {np.size(axes)}")

    axes = new_axes(len(expected)) if axes is None else np.array([axes_of(ax) for ax in np.ravel(axes)])
    for ax, (name, dims) in zip(axes, expected.items(), strict=True):
        values = diagnostics[name].transpose(*dims)
        if name == "energy_gap":
            ax.axhline(0, color="0.6", linewidth=1, zorder=0)
        for site, line in [("", values)] if name == "loss" else zip(values["site"].values, values, strict=True):
            ax.plot(values[dims[-1]], line, linewidth=1, color="0.3" if name == "loss" else None, label=f"{site}")
        ax.set_ylabel(_PANELS.get(name, name))
        if name == "acceptance_rate":
            ax.set_ylim(-0.02, 1.02)
    if diagnostics.sizes["site"] > 1:
        gap = axes[list(expected).index("energy_gap")]
        # the first line is that at 0
        axes[0].legend(handles=gap.lines[1:], loc="lower center", bbox_to_anchor=(0.5, 1), ncols=6, frameon=False)
    axes[-1].set_xlabel("update")
    return axes


def plot_energies(distribution: EnergyBased, chains: Any, x: Any, ax: Any = None, *, bins: int = 40) -> "Axes":
    """Draw histograms of the energies of observations and of chains, which are alike in a fitted model.

    Parameters
    ----------
    distribution
        Without batch shape; energies are multiplied by its inverse temperature.
    chains, x
        Draws of the model and observations, shape ``(..., *event_shape)`` each.
    ax
        Axes to draw on; by default those of a new figure.
    bins
        Number of bins, the same for both.

    Returns
    -------
    matplotlib.axes.Axes
        What was drawn on: `ax`, or that of the new figure.

    Raises
    ------
    ValueError
        If shapes do not fit, or a value or energy is not finite.

    Examples
    --------
    >>> import numpy as np, numpyro.distributions as dist
    >>> from matplotlib.figure import Figure
    >>> d = EnergyBased(lambda x: x**2, dist.Normal(0, 1))
    >>> ax = plot_energies(d, np.ones((4, 10)), np.zeros(50), Figure().add_subplot())
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['data, mean 0', 'chains, mean 1']
    """
    check_single("distribution", distribution, EnergyBased)
    check_size("bins", bins)
    energies = {}
    for label, name, values in [("data", "x", x), ("chains", "chains", chains)]:
        events = jnp.asarray(events_of(name, values, distribution.event_shape))
        energies[label] = np.asarray(distribution.inverse_temperature * distribution.energy(events), float)
        faults = np.sum(~np.isfinite(energies[label]))
        if faults:
            raise ValueError(f"energies of {name} must be finite, got {faults} of {events.shape[0]} that are not")

    edges = np.histogram_bin_edges(np.concatenate(list(energies.values())), bins)
    ax = axes_of(ax)
    for (label, energy), color in zip(energies.items(), ["tab:orange", "tab:blue"], strict=True):
        mean = f"{label}, mean {energy.mean():.3g}"
        ax.hist(energy, edges, density=True, alpha=0.5, color=color, label=mean)
        ax.axvline(energy.mean(), color=color, linestyle="--", linewidth=1)
    ax.set(xlabel="inverse temperature × energy", ylabel="density")
    ax.legend()
    return ax


def plot_chains(chains: Any, ax: Any = None, *, num: int = 8, component: int = 0) -> "Axes":
    """Draw the traces of one component of chains; draws that are not finite leave gaps.

    Parameters
    ----------
    chains
        Shape ``(chain, draw, *event_shape)``.
    ax
        Axes to draw on; by default those of a new figure.
    num
        Largest number of chains to draw, the first ones.
    component
        Which one of the flattened event's components.

    Returns
    -------
    matplotlib.axes.Axes
        What was drawn on: `ax`, or that of the new figure.

    Raises
    ------
    ValueError
        If `chains` is empty or has another shape, or no such component.

    Examples
    --------
    >>> import numpy as np
    >>> from matplotlib.figure import Figure
    >>> ax = plot_chains(np.zeros((20, 100, 3)), Figure().add_subplot(), component=2)
    >>> len(ax.lines), ax.get_title()
    (8, '8 of 20 chains')
    """
    check_size("num", num)
    chains = np.asarray(chains, float)
    if chains.ndim < 2 or chains.size == 0:
        raise ValueError(f"chains must have shape (chain, draw, *event_shape), not empty, got {chains.shape}")
    traces = chains.reshape(*chains.shape[:2], -1)
    components = range(traces.shape[-1])
    if isinstance(component, bool) or component not in components:
        raise ValueError(f"component must be an integer from 0 to {components[-1]}, got {component!r}")

    ax = axes_of(ax)
    shown = traces[:num, :, int(component)]
    for trace in shown:
        ax.plot(trace, linewidth=0.8, alpha=0.8)
    title = f"{len(shown)} of {len(traces)} chains"
    ax.set(xlabel="draw", ylabel="x" if chains.ndim == 2 else f"component {component}", title=title)
    return ax
