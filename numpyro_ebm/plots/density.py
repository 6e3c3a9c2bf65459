"""Densities over a line, a plane, a circle or a sphere."""

import math
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np
from numpyro.distributions import biject_to, constraints

from numpyro_ebm.distributions import EnergyBased, is_sphere
from numpyro_ebm.energies import check_size
from numpyro_ebm.plots.axes import angles_of, axes_of, check_single, draw_graticule, events_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_LARGEST_RATIO = 10.0  # of the sides of a plane drawn to scale


def plot_density(
    distribution: EnergyBased,
    ax: Any = None,
    *,
    x: Any = None,
    log_normalizer: Any = None,
    bounds: Any = None,
    num: int = 200,
) -> "Axes":
    """Draw a density: over a line, a plane, the circle or the sphere S^2.

    One dimension and the circle (over the angle) are lines; a plane is coloured, darker where denser, and drawn to
    scale unless its sides differ tenfold. S^2 is a Mollweide map, whose north is the last coordinate. A colour bar is
    ``ax.figure.colorbar(ax.collections[0], ax=ax)``.

    Parameters
    ----------
    distribution
        Without batch shape, with events of one or two dimensions, or of three on the sphere.
    ax
        Axes to draw on; for S^2 of projection ``"mollweide"``. By default those of a new figure.
    x
        Observations to draw over the density, shape ``(..., *event_shape)``.
    log_normalizer
        log Z to divide by; by default the distribution's own, or 0 (an unnormalised density) where it has none.
    bounds
        ``(low, high)``, numbers or one for each coordinate. By default the range of `x` and a quarter of it on each
        side, or else a bounded support, or else four standard deviations of the base around its mean.
    num
        Number of points in each dimension, at the centres of as many cells.

    Returns
    -------
    matplotlib.axes.Axes
        What was drawn on: `ax`, or that of the new figure.

    Raises
    ------
    ValueError
        If the distribution can't be drawn in two dimensions, where to draw it is not known, `x` does not fit it,
        the density is not finite, or `ax` has another projection.

    Examples
    --------
    >>> import numpyro.distributions as dist
    >>> from matplotlib.figure import Figure
    >>> d = EnergyBased(lambda x: 4 * x**2, dist.Normal(0, 1))
    >>> ax = plot_density(d, Figure().add_subplot(), log_normalizer=-1.0986)
    >>> round(float(ax.lines[0].get_ydata().max()), 1)     # of N(0, 1/9)
    1.2
    """
    check_single("distribution", distribution, EnergyBased)
    check_size("num", num)
    given = distribution.log_normalizer_value() if log_normalizer is None else log_normalizer
    name, log_z = ("unnormalised density", 0.0) if given is None else ("density", given)
    if np.ndim(log_z) or not np.isfinite(log_z):
        raise ValueError(f"log_normalizer must be a finite number, got {log_z!r}")
    size, on_sphere = math.prod(distribution.event_shape), is_sphere(_elementary(distribution.support))
    if size > 2 + on_sphere or size == 0:
        raise ValueError(
            f"plot_density draws one or two dimensions, and the spheres S^1 and S^2, got events of shape "
            f"{distribution.event_shape}: draw the energies of more dimensions by plot_energies"
        )
    points = None if x is None else events_of("x", x, distribution.event_shape)
    if points is not None:
        outside = points[~np.asarray(distribution.support(jnp.asarray(points)))]
        if len(outside):
            raise ValueError(
                f"x must lie in the support {distribution.support}, got {outside[0]} ({len(outside)} such)"
            )
        points = angles_of(points) if on_sphere else points.reshape(-1, size)
    if on_sphere and bounds is not None:
        raise ValueError("bounds are for R^d, but the support is a sphere: leave them out")
    if on_sphere:
        high = np.array([np.pi, np.pi / 2])[: size - 1]
        low = -high
    else:
        low, high = _bounds(distribution, bounds, points)
    edges = np.linspace(low, high, num + 1).T
    grid = np.stack(np.meshgrid(*(edges[:, 1:] + edges[:, :-1]) / 2), -1)
    nodes = _unit_vectors(grid) if on_sphere else grid
    density = _density(distribution, nodes.reshape(-1, *distribution.event_shape), log_z).reshape(grid.shape[:-1])

    ax = axes_of(ax, "mollweide" if on_sphere and size == 3 else "rectilinear")
    if len(edges) == 1:
        (line,) = ax.plot(grid[..., 0], density)
        # heights from 0 on, under limits that still grow with what is drawn later
        ax.update_datalim([(low[0], 0.0)])
        line.sticky_edges.y.append(0.0)
        ax.set(xlabel="angle" if on_sphere else "x", ylabel=name)
        if on_sphere:
            ax.set_xticks(np.pi * np.array([-1, -0.5, 0, 0.5, 1]), ["-π", "-π/2", "0", "π/2", "π"])
        if points is not None:
            # y is a share of the axes' height
            height, transform = np.full(len(points), 0.02), ax.get_xaxis_transform()
            ax.plot(points[:, 0], height, "|", transform=transform, markersize=10, color="black", alpha=0.4)
        return ax
    ax.pcolormesh(*edges, density, cmap="Blues", vmin=0, rasterized=True)
    if points is not None:
        ax.scatter(*points.T, s=6, color="tab:orange", alpha=0.7, linewidths=0)
    ax.set_title(name)
    if on_sphere:
        draw_graticule(ax)
        return ax
    sides = high - low
    ax.set_aspect("equal" if max(sides) <= _LARGEST_RATIO * min(sides) else "auto")
    ax.set(xlabel="$x_1$", ylabel="$x_2$", xlim=(low[0], high[0]), ylim=(low[1], high[1]))
    return ax


def _elementary(support):
    while isinstance(support, constraints.independent):
        support = support.base_constraint
    return support


def _bounds(distribution, bounds, x):
    """Low and high, shape ``(size,)`` each; where not given, those between which there is something to see."""
    shape, support = distribution.event_shape, _elementary(distribution.support)
    if support.is_discrete or biject_to(support).forward_shape(shape or (1,)) != (shape or (1,)):
        raise ValueError(f"plot_density needs a support with a density on R^d or a sphere, got {support}")
    ends = [getattr(support, "lower_bound", -np.inf), getattr(support, "upper_bound", np.inf)]
    least, most = (np.broadcast_to(np.asarray(end, float), shape).ravel() for end in ends)
    if bounds is not None:
        try:
            low, high = (np.broadcast_to(np.asarray(bound, float), least.shape) for bound in bounds)
        except (TypeError, ValueError) as error:
            message = f"bounds must be (low, high), numbers or one for each coordinate, got {bounds!r}"
            raise ValueError(message) from error
    elif x is not None:
        low, high = x.min(0) - np.ptp(x, 0) / 4, x.max(0) + np.ptp(x, 0) / 4
    elif np.isfinite([least, most]).all():
        low, high = least, most
    else:
        try:
            mean, reach = distribution.base.mean, 4 * np.sqrt(np.asarray(distribution.base.variance))
        except NotImplementedError:
            mean, reach = np.full(shape, np.nan), 0.0
        low, high = np.ravel(mean - reach), np.ravel(mean + reach)
    if bounds is None:
        low, high = np.maximum(low, least), np.minimum(high, most)
    if np.isfinite([low, high]).all() and np.all(low < high):
        return low, high
    if bounds is not None:
        raise ValueError(f"bounds must be finite, with low < high, got {bounds!r}")
    base = type(distribution.base).__name__
    raise ValueError(f"where to draw is known neither from the base {base} nor from x: give bounds=(low, high)")


def _density(distribution, nodes, log_normalizer):
    logarithms = np.asarray(distribution.unnormalized_log_prob(jnp.asarray(nodes, jnp.result_type(float))), float)
    with np.errstate(over="ignore"):
        density = np.exp(logarithms - log_normalizer)
    faults = np.flatnonzero(~np.isfinite(density))
    if len(faults):
        first = faults[0]
        raise ValueError(
            f"the density must be finite, but its logarithm is {logarithms[first] - log_normalizer:.4g} at {nodes[first]} "
            f"({len(faults)} such): give a log_normalizer where it overflows, bounds where it is not defined"
        )
    return density


def _unit_vectors(angles):
    longitude = angles[..., 0]
    circle, latitude = np.stack([np.cos(longitude), np.sin(longitude)], -1), angles[..., 1:]
    return np.concatenate([np.cos(latitude) * circle, np.sin(latitude)], -1) if latitude.size else circle
