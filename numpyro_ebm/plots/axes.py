"""What all plots share: axes to draw on, checks of what is drawn, coordinates of spheres."""

from typing import Any

import numpy as np

from numpyro_ebm.distributions import EnergyBased


def check_single(name: str, value: Any, kinds: Any) -> None:
    """Raise unless `value` is of `kinds` and has no batch shape."""
    if not isinstance(value, kinds):
        kind = "an EnergyBased" if kinds is EnergyBased else "an F1Energy or F2Energy (a distribution's is its .energy)"
        raise TypeError(f"{name} must be {kind}, got {type(value).__name__}")
    if value.batch_shape:
        raise ValueError(f"{name} must have no batch shape, got {value.batch_shape}: draw its elements one by one")


def events_of(name: str, values: Any, event_shape: tuple[int, ...]) -> np.ndarray:
    """Return `values` as finite floats of shape ``(n, *event_shape)``; raise where they are not."""
    values = np.asarray(values, float)
    if values.ndim < len(event_shape) or values.shape[values.ndim - len(event_shape) :] != event_shape:
        raise ValueError(f"{name} must end in the event shape {event_shape}, got shape {values.shape}")
    if values.size == 0:
        raise ValueError(f"{name} must not be empty, got shape {values.shape}")
    faults = np.argwhere(~np.isfinite(values))
    if len(faults):
        place = tuple(map(int, faults[0]))
        raise ValueError(f"{name} must be finite, got {values[place]} at index {place} ({len(faults)} such)")
    return values.reshape(-1, *event_shape)


def angles_of(x: np.ndarray) -> np.ndarray:
    """Return the longitudes, and on S^2 latitudes, of vectors, shape ``(n, d - 1)``."""
    longitude = np.arctan2(x[:, 1], x[:, 0])
    if x.shape[1] == 2:
        return longitude[:, None]
    return np.stack([longitude, np.arctan2(x[:, 2], np.hypot(x[:, 0], x[:, 1]))], -1)


def draw_graticule(ax: Any) -> None:
    """Draw meridians and parallels on a Mollweide map."""
    ax.set_longitude_grid(60)
    ax.set_latitude_grid(30)
    ax.grid(color="0.5", alpha=0.3, linewidth=0.5)
    ax.tick_params(labelsize="x-small", colors="0.4")


def axes_of(ax: Any, projection: str = "rectilinear") -> Any:
    """Return `ax` where its projection fits, or axes of a new figure where it is None."""
    if ax is None:
        return new_axes(projection=projection)[0]
    if not hasattr(ax, "pcolormesh"):
        raise TypeError(f"ax must be one matplotlib Axes, got {type(ax).__name__}")
    if ax.name != projection:
        raise ValueError(
            f"ax must be of projection {projection!r}, got {ax.name!r}: make it by plt.subplot(projection={projection!r})"
        )
    return ax


def new_axes(num: int = 1, projection: str = "rectilinear") -> np.ndarray:
    """Return `num` axes of a new figure, one below the other."""
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'numpyro_ebm[plots]'") from error
    figure = plt.figure(figsize=(6.4, 4.8 if num == 1 else 1.2 + 1.5 * num), layout="constrained")
    return figure.subplots(num, sharex=num > 1, squeeze=False, subplot_kw={"projection": projection})[:, 0]
