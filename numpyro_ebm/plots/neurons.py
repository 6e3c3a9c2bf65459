"""Neurons of shallow energies."""

from typing import TYPE_CHECKING, Any

import numpy as np

from numpyro_ebm.energies import F1Energy, F2Energy
from numpyro_ebm.plots.axes import angles_of, axes_of, check_single, draw_graticule

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_LARGEST_MARKER = 120.0  # points squared, of the neuron of largest weight


def plot_neurons(energy: F1Energy | F2Energy, ax: Any = None) -> "Axes":
    """Draw where a shallow energy has its neurons, and what they weigh.

    A marker's area is proportional to the absolute weight, its colour is the weight's sign. Features of two dimensions
    lie on the circle, of three on a Mollweide map whose north is the last coordinate; of more, they are projected on
    the two directions that hold the most of their squared norms. A bias is the last coordinate.

    Parameters
    ----------
    energy
        Without batch shape, with features of shape ``(m, d)``, ``d >= 2`` (``(m, d + 1)`` with a bias).
    ax
        Axes to draw on; of projection ``"mollweide"`` for three dimensions. By default those of a new figure.

    Returns
    -------
    matplotlib.axes.Axes
        What was drawn on: `ax`, or that of the new figure.

    Raises
    ------
    ValueError
        If the energy has a batch shape, features of one dimension or values that are not finite, or `ax` has another
        projection.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> from matplotlib.figure import Figure
    >>> energy = F1Energy(jnp.eye(2), jnp.log(jnp.array([1.0, 0.5])), jnp.array([1.0, -1.0]), radius=6.0)
    >>> ax = plot_neurons(energy, Figure().add_subplot())
    >>> [collection.get_sizes().round().tolist() for collection in ax.collections]
    [[120.0], [60.0]]
    """
    check_single("energy", energy, F1Energy | F2Energy)
    features = np.asarray(energy.features, float)
    if isinstance(energy, F1Energy):
        weights = np.asarray(energy.signs, float) * np.exp(np.asarray(energy.log_weights, float))
    else:
        weights = np.asarray(energy.weights, float)
    if features.shape[-1] < 2:
        raise ValueError(f"the features must have two dimensions or more, got shape {features.shape}")
    if not (np.isfinite(features).all() and np.isfinite(weights).all()):
        raise ValueError("the energy's features and weights must be finite: its training has diverged")
    (num, dim), last = features.shape, "bias" if energy.bias else None
    areas = _LARGEST_MARKER * np.abs(weights) / max(np.abs(weights).max(), np.finfo(float).tiny)

    ax = axes_of(ax, "mollweide" if dim == 3 else "rectilinear")
    if dim == 3:
        positions = angles_of(features)
        draw_graticule(ax)
        ax.set_title(f"{num} neurons on the sphere; north: {last or 'the last coordinate'}")
    else:
        positions, labels = features, ["first coordinate", last or "second coordinate"]
        title = f"{num} neurons on the circle"
        if dim > 3:
            shares, directions = np.linalg.eigh(features.T @ features / num)
            directions = directions[:, :-3:-1]
            # eigenvectors have no sign of their own: their largest entry is positive
            directions = directions * np.sign(np.take_along_axis(directions, np.abs(directions).argmax(0)[None], 0))
            positions = features @ directions
            labels = [f"direction {i} ({share:.0%} of squared norms)" for i, share in enumerate(shares[:-3:-1], 1)]
            title = f"{num} neurons in {dim} dimensions{', one of them the bias' if energy.bias else ''}"
        angle = np.linspace(0, 2 * np.pi, 200)
        ax.plot(np.cos(angle), np.sin(angle), color="0.8", linewidth=1, zorder=0)
        ax.set(xlabel=labels[0], ylabel=labels[1], title=title, aspect="equal", xlim=(-1.15, 1.15), ylim=(-1.15, 1.15))
    for is_positive, color, label in [(True, "tab:red", "positive weight"), (False, "tab:blue", "negative weight")]:
        chosen = (weights > 0) == is_positive
        ax.scatter(*positions[chosen].T, s=areas[chosen], color=color, label=label, alpha=0.6, linewidths=0, zorder=2)
    legend = ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2, frameon=False)
    for handle in legend.legend_handles:
        handle.set_sizes([40])
    return ax
