"""Plots, by what they draw."""

import importlib
import sys

import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb
from numpyro.distributions import constraints

import numpyro_ebm as ebm
from numpyro_ebm import plots

matplotlib.use("Agg")
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _closed_figures():
    plt.close("all")
    yield
    plt.close("all")


def units(*shape):
    vectors = RNG.normal(size=shape)
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def normal(dim=None):
    """N(1, 1/9) and its log Z over N(1, 1)."""
    base = dist.Normal(1.0, 1.0) if dim is None else dist.Normal(1.0, 1.0).expand([dim]).to_event(1)
    return ebm.EnergyBased(lambda x: 4 * jnp.sum((x - 1) ** 2), base), (dim or 1) * -np.log(3)


def f1(dim, num=12, **kwargs):
    weights = RNG.exponential(size=num)
    weights /= 1.01 * weights.mean()
    signs = jnp.array([1.0, -1.0] * (num // 2))
    return ebm.F1Energy(jnp.array(units(num, dim)), jnp.log(weights), signs, 3.0, **kwargs), weights


def diagnostics(sites=("x", "y"), loss=True, norm=1.0):
    values = RNG.uniform(size=(5, len(sites), 30))
    names = ["energy_gap", "acceptance_rate", "max_energy", "num_nonfinite"]
    variables = {name: (("site", "update"), value) for name, value in zip(names, values, strict=False)}
    variables["norm"] = (("site", "update"), norm * values[4])
    if loss:
        variables["loss"] = (("step",), RNG.uniform(size=30))
    return xarray.Dataset(variables, {"site": list(sites), "update": 10 * np.arange(30), "step": np.arange(30)})


def area_of_line(ax):
    angle, density = ax.lines[0].get_data()
    return np.sum(density) * (angle[1] - angle[0])


def cells(ax):
    mesh = ax.collections[0]
    corners = mesh.get_coordinates()
    return corners[0, :, 0], corners[:, 0, 1], np.asarray(mesh.get_array())


@pytest.mark.parametrize("dim", [None, 1])
def test_a_line_is_the_density(dim):
    d, log_z = normal(dim)
    ax = plots.plot_density(d, log_normalizer=log_z)
    x, density = ax.lines[0].get_data()
    np.testing.assert_allclose(density, np.exp(dist.Normal(1, 1 / 3).log_prob(x)), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(area_of_line(ax), 1, rtol=1e-4)
    assert x[0] == pytest.approx(-3 + 4 / 200)  # four deviations of the base from its mean, less half a cell
    assert ax.get_ylabel() == "density"


def test_densities_over_one_another_stay_in_view():
    d, log_z = normal()
    ax = plots.plot_density(d, log_normalizer=1.0)
    assert plots.plot_density(d, ax, x=np.array([0.0, 2.0]), log_normalizer=log_z) is ax
    bottom, top = ax.get_ylim()
    assert bottom == 0
    assert top > max(line.get_ydata().max() for line in ax.lines)


def test_the_normaliser_is_the_distributions_own_by_default():
    d, log_z = normal()
    assert plots.plot_density(d).get_ylabel() == "unnormalised density"
    np.testing.assert_allclose(area_of_line(plots.plot_density(d)), np.exp(log_z), rtol=1e-4)
    known = ebm.EnergyBased(d.energy, d.base, log_normalizer=log_z)
    np.testing.assert_allclose(area_of_line(plots.plot_density(known)), 1, rtol=1e-4)


def test_a_plane_is_the_density():
    # the axes differ, so that a transposed array shows
    base = dist.Normal(jnp.array([0.0, 5.0]), jnp.array([1.0, 0.5])).to_event(1)
    x = np.array([[0.5, 5.0], [-1.0, 4.5]])
    ax = plots.plot_density(ebm.EnergyBased(lambda x: 0.0, base), x=x, bounds=([-4, 2], [4, 8]), num=100)
    horizontal, vertical, density = cells(ax)
    assert (horizontal[0], horizontal[-1], vertical[0], vertical[-1]) == (-4, 4, 2, 8)
    np.testing.assert_allclose(density.sum() * 8 * 6 / 100**2, 1, rtol=1e-3)
    row, column = np.unravel_index(density.argmax(), density.shape)
    assert abs(horizontal[column]) < 0.1
    assert abs(vertical[row] - 5) < 0.1
    np.testing.assert_array_equal(ax.collections[1].get_offsets(), x)
    assert ax.get_aspect() == 1


def test_a_plane_of_unlike_units_is_not_drawn_to_scale():
    base = dist.Normal(jnp.zeros(2), jnp.array([1e-3, 1e4])).to_event(1)
    assert plots.plot_density(ebm.EnergyBased(lambda x: 0.0, base), num=20).get_aspect() == "auto"


def test_a_map_is_the_density():
    pole = np.array([0.0, 0.6, 0.8])
    d = ebm.EnergyBased(lambda x: -4 * x @ pole, ebm.SphereUniform(3))
    x = units(20, 3)
    ax = plots.plot_density(d, x=x, log_normalizer=np.log(np.sinh(4) / 4), num=100)
    assert ax.name == "mollweide"
    longitude, latitude, density = cells(ax)
    middle = (latitude[1:] + latitude[:-1]) / 2
    area = np.cos(middle)[:, None] * (np.pi / 100) * (2 * np.pi / 100) / (4 * np.pi)
    np.testing.assert_allclose(np.sum(density * area), 1, rtol=1e-3)
    row, column = np.unravel_index(density.argmax(), density.shape)
    np.testing.assert_allclose([longitude[column], latitude[row]], [np.pi / 2, np.arcsin(0.8)], atol=0.07)
    east, north = ax.collections[1].get_offsets().T
    back = np.stack([np.cos(north) * np.cos(east), np.cos(north) * np.sin(east), np.sin(north)], -1)
    np.testing.assert_allclose(back, x, atol=1e-7)


def test_a_circle_is_a_line_over_the_angle():
    d = ebm.EnergyBased(lambda x: -2 * x[1], ebm.SphereUniform(2))
    ax = plots.plot_density(d, x=np.array([[0.0, -1.0]]), log_normalizer=np.log(np.i0(2.0)))
    angle, density = ax.lines[0].get_data()
    np.testing.assert_allclose(np.mean(density), 1, rtol=1e-4)  # with respect to the uniform distribution
    assert abs(angle[density.argmax()] - np.pi / 2) < 0.02
    assert ax.lines[1].get_xdata() == pytest.approx(-np.pi / 2)


@pytest.mark.parametrize(
    ("base", "x", "expected"),
    [
        (dist.Normal(0.0, 1.0), np.array([0.0, 4.0]), (-1, 5)),  # the data's range and a quarter on each side
        (dist.Normal(0.0, 1.0), None, (-4, 4)),
        (dist.Uniform(-1.0, 2.0), None, (-1, 2)),
        (dist.Beta(0.5, 0.5), np.array([0.1, 0.9]), (0, 1)),  # infinite at the ends
        (dist.Exponential(1.0), None, (0, 5)),
        (dist.Exponential(1.0), np.array([0.1, 4.1]), (0, 5.1)),
    ],
)
def test_bounds_come_from_data_support_or_base(base, x, expected):
    ax = plots.plot_density(ebm.EnergyBased(lambda x: 0.0 * x, base), x=x, num=50)
    line = ax.lines[0].get_xdata()
    half = (line[1] - line[0]) / 2
    np.testing.assert_allclose((line[0] - half, line[-1] + half), expected, atol=1e-6)
    if x is not None:
        np.testing.assert_array_equal(ax.lines[1].get_xdata(), x)


FLAT = dist.ImproperUniform(constraints.real, (), ())


@pytest.mark.parametrize(
    ("base", "options", "message"),
    [
        (dist.Normal(0, 1).expand([3]).to_event(1), {}, "one or two dimensions"),
        (ebm.SphereUniform(4), {}, "one or two dimensions"),
        (dist.Normal(0, 1).expand([3]), {}, "no batch shape"),
        (FLAT, {}, "ImproperUniform nor from x: give bounds"),
        (FLAT, {"x": np.ones(3)}, "give bounds"),
        (dist.Cauchy(0, 1), {}, "Cauchy nor from x"),
        (dist.Dirichlet(jnp.ones(2)), {}, "needs a support with a density"),
        (dist.Normal(0, 1), {"bounds": (1, 0)}, "low < high"),
        (dist.Normal(0, 1), {"bounds": 3}, "numbers or one for each coordinate"),
        (dist.Normal(0, 1), {"num": 0}, "num must be a positive integer"),
        (dist.Normal(0, 1), {"log_normalizer": np.nan}, "must be a finite number"),
        (dist.Normal(0, 1), {"log_normalizer": -1e4}, "the density must be finite"),
        (dist.Normal(0, 1), {"x": np.array([0.0, np.inf])}, r"got inf at index \(1,\)"),
        (dist.Normal(0, 1), {"x": np.array([])}, "must not be empty"),
        (dist.Normal(0, 1).expand([2]).to_event(1), {"x": np.ones((5, 3))}, "must end in the event shape"),
        (dist.Exponential(1.0), {"x": np.array([1.0, -1.0])}, r"x must lie in the support .* got -1.0 \(1 such\)"),
        (ebm.SphereUniform(3), {"x": np.ones((5, 3))}, "x must lie in the support"),
        (ebm.SphereUniform(3), {"bounds": (0, 1)}, "but the support is a sphere"),
    ],
)
def test_what_can_not_be_drawn_is_named(base, options, message):
    d = ebm.EnergyBased(lambda x: 0.0, base)
    with pytest.raises(ValueError, match=message):
        plots.plot_density(d, **options)
    assert plt.get_fignums() == []


def test_densities_that_are_not_finite_are_named():
    d = ebm.EnergyBased(lambda x: jnp.where(x > 0, jnp.nan, 0.0), dist.Normal(0.0, 1.0))
    with pytest.raises(ValueError, match="its logarithm is nan at"):
        plots.plot_density(d)
    wall = ebm.EnergyBased(lambda x: jnp.where(x > 0, jnp.inf, 0.0), dist.Normal(0.0, 1.0))
    np.testing.assert_allclose(area_of_line(plots.plot_density(wall)), 0.5, rtol=1e-3)


def drawings():
    d, sphere = normal()[0], ebm.EnergyBased(lambda x: x[0], ebm.SphereUniform(3))
    yield "line", None, lambda ax: plots.plot_density(d, ax)
    yield "plane", None, lambda ax: plots.plot_density(normal(2)[0], ax, num=20)
    yield "map", "mollweide", lambda ax: plots.plot_density(sphere, ax, num=20)
    yield "circle neurons", None, lambda ax: plots.plot_neurons(f1(2)[0], ax)
    yield "map neurons", "mollweide", lambda ax: plots.plot_neurons(f1(3)[0], ax)
    yield "energies", None, lambda ax: plots.plot_energies(d, np.ones(5), np.zeros(5), ax)
    yield "chains", None, lambda ax: plots.plot_chains(np.ones((2, 5)), ax)


@pytest.mark.parametrize(("projection", "draw"), [pytest.param(*rest, id=name) for name, *rest in drawings()])
def test_the_given_axes_are_drawn_on(projection, draw):
    figure = plt.figure()
    ax, neighbour = (figure.add_subplot(1, 2, i, projection=projection) for i in (1, 2))
    plt.sca(neighbour)  # the current axes are not those to draw on
    assert draw(ax) is ax
    assert ax.has_data()
    assert not neighbour.has_data()
    assert (plt.get_fignums(), figure.axes) == ([figure.number], [ax, neighbour])
    figure.canvas.draw()
    assert draw(None) is not ax
    assert len(plt.get_fignums()) == 2
    wrong = figure.add_subplot(projection="polar")
    with pytest.raises(ValueError, match=f"projection {projection or 'rectilinear'!r}, got 'polar': make it by"):
        draw(wrong)
    with pytest.raises(TypeError, match="ax must be one matplotlib Axes, got ndarray"):
        draw(np.array([ax, ax]))


def drawn_neurons(ax):
    positive, negative = ax.collections
    assert to_rgb(positive.get_facecolor()[0, :3]) != to_rgb(negative.get_facecolor()[0, :3])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["positive weight", "negative weight"]
    return positive, negative


@pytest.mark.parametrize("dim", [2, 3, 6])
def test_markers_have_areas_of_weights(dim):
    energy, weights = f1(dim)
    positive, negative = drawn_neurons(plots.plot_neurons(energy))
    areas = np.stack([positive.get_sizes(), negative.get_sizes()], -1).ravel()  # signs alternate
    np.testing.assert_allclose(areas / areas.sum(), weights / weights.sum(), rtol=1e-5)


def test_neurons_lie_where_their_features_point():
    circle, bias, sphere, many = (f1(*args)[0] for args in [(2,), (2,), (3,), (6,)])
    for energy in (circle, bias):
        positive, _ = drawn_neurons(plots.plot_neurons(energy))
        np.testing.assert_allclose(positive.get_offsets(), energy.features[::2], rtol=1e-6)
    _, negative = drawn_neurons(plots.plot_neurons(sphere))
    np.testing.assert_allclose(np.sin(negative.get_offsets()[:, 1]), sphere.features[1::2, 2], atol=1e-6)
    # two of six directions hold all there is: the projection keeps lengths
    flat = ebm.F1Energy(jnp.pad(circle.features, ((0, 0), (3, 1))), circle.log_weights, circle.signs, 3.0)
    positive, negative = drawn_neurons(plots.plot_neurons(flat))
    offsets = np.concatenate([positive.get_offsets(), negative.get_offsets()])
    np.testing.assert_allclose(np.linalg.norm(offsets, axis=-1), 1, rtol=1e-5)
    squares = np.sum(np.concatenate([c.get_offsets() for c in drawn_neurons(plots.plot_neurons(many))]) ** 2, 0)
    assert squares[0] >= squares[1] > np.sum(np.asarray(many.features) ** 2) / 6 * 0.99


@pytest.mark.parametrize(
    ("dim", "bias", "text"),
    [
        (2, False, "12 neurons on the circle"),
        (3, False, "north: the last coordinate"),
        (3, True, "north: bias"),
        (6, False, "12 neurons in 6 dimensions"),
        (6, True, "in 6 dimensions, one of them the bias"),
    ],
)
def test_titles_say_what_is_drawn(dim, bias, text):
    assert text in plots.plot_neurons(f1(dim, bias=bias)[0]).get_title()


def test_the_bias_is_the_second_axis_of_a_circle():
    assert plots.plot_neurons(f1(2, bias=True)[0]).get_ylabel() == "bias"
    assert plots.plot_neurons(f1(2)[0]).get_ylabel() == "second coordinate"


def test_weights_of_f2_have_signs():
    energy = ebm.F2Energy(jnp.eye(4), jnp.array([1.0, -2.0, 0.5, -0.5]), radius=2.0)
    positive, negative = drawn_neurons(plots.plot_neurons(energy))
    np.testing.assert_allclose(positive.get_sizes() / negative.get_sizes(), [0.5, 1.0])
    untrained = ebm.F2Energy(jnp.eye(4), jnp.zeros(4), radius=2.0)
    assert sum(c.get_sizes().sum() for c in plots.plot_neurons(untrained).collections) == 0


def test_neurons_that_can_not_be_drawn_are_named():
    with pytest.raises(TypeError, match="energy must be an F1Energy or F2Energy"):
        plots.plot_neurons(normal()[0].energy)
    batch = ebm.F1Energy(units(2, 4, 3), jnp.zeros((2, 4)), jnp.ones(4), 1.0)
    with pytest.raises(ValueError, match=r"energy must have no batch shape, got \(2,\)"):
        plots.plot_neurons(batch)
    with pytest.raises(ValueError, match="two dimensions or more"):
        plots.plot_neurons(ebm.F1Energy(jnp.ones((4, 1)), jnp.zeros(4), jnp.ones(4), 1.0))


def test_a_training_has_a_panel_for_each_number():
    data = diagnostics()
    axes = plots.plot_training(data)
    assert [ax.get_ylabel() for ax in axes] == ["loss", "energy gap", "acceptance", "norm"]
    assert axes[0].get_shared_x_axes().joined(axes[0], axes[3])
    loss, gap, acceptance, norm = ([line.get_data() for line in ax.lines] for ax in axes)
    np.testing.assert_array_equal(loss, [[data["step"], data["loss"]]])
    np.testing.assert_array_equal(gap[0][1], [0, 0])
    for lines, name in [(gap[1:], "energy_gap"), (acceptance, "acceptance_rate"), (norm, "norm")]:
        np.testing.assert_array_equal(lines, [[data["update"], values] for values in data[name]])
    assert [text.get_text() for text in axes[0].get_legend().get_texts()] == ["x", "y"]
    figure = axes[0].figure
    figure.canvas.draw()
    assert plt.get_fignums() == [figure.number]


def test_panels_without_numbers_are_left_out():
    axes = plots.plot_training(diagnostics(sites=["x"], loss=False, norm=np.nan).transpose())
    assert [ax.get_ylabel() for ax in axes] == ["energy gap", "acceptance"]
    assert all(ax.get_legend() is None for ax in axes)
    given = plt.figure().subplots(3)
    data = diagnostics(loss=False)
    np.testing.assert_array_equal(plots.plot_training(data, given), given)
    assert len(plt.get_fignums()) == 2
    with pytest.raises(ValueError, match="axes must be 3, for energy_gap, acceptance_rate, norm, got 1"):
        plots.plot_training(data, given[0])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (diagnostics().drop_vars("norm"), "diagnostics must hold loss, energy_gap, acceptance_rate, norm, got"),
        (diagnostics().isel(site=0), "energy_gap must have dimensions"),
        (diagnostics().isel(update=slice(0)), "not empty"),
    ],
)
def test_faulty_diagnostics_are_named(data, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_training(data)
    assert plt.get_fignums() == []


def test_diagnostics_are_a_data_set():
    with pytest.raises(TypeError, match=r"must be an xarray.Dataset, got dict"):
        plots.plot_training({"energy_gap": np.ones(3)})


def test_energies_are_histograms_over_the_same_bins():
    d = ebm.EnergyBased(lambda x: jnp.sum(x), dist.Normal(0, 1).expand([2]).to_event(1), inverse_temperature=2.0)
    x, chains = RNG.normal(size=(200, 2)), 1 + RNG.normal(size=(4, 25, 2))
    ax = plots.plot_energies(d, chains, x, bins=15)
    data, model = ax.containers
    edges = np.array([bar.get_x() for bar in data])
    np.testing.assert_array_equal(edges, [bar.get_x() for bar in model])
    assert len(edges) == 15
    for bars, values in [(data, x), (model, chains)]:
        energies = 2 * values.sum(-1).ravel()
        np.testing.assert_allclose(sum(bar.get_width() * bar.get_height() for bar in bars), 1)
        # a bin's width away from the mean at most
        centre = sum(bar.get_width() * bar.get_height() * (bar.get_x() + bar.get_width() / 2) for bar in bars)
        assert abs(centre - energies.mean()) < bars[0].get_width()
    texts = [text.get_text() for text in ax.get_legend().get_texts()]
    assert texts == [f"data, mean {2 * x.sum(-1).mean():.3g}", f"chains, mean {2 * chains.sum(-1).mean():.3g}"]
    np.testing.assert_allclose(ax.lines[1].get_xdata(), 2 * chains.sum(-1).mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("chains", "x", "options", "message"),
    [
        (np.ones((4, 0, 2)), np.ones((5, 2)), {}, "chains must not be empty"),
        (np.ones((4, 5, 3)), np.ones((5, 2)), {}, r"chains must end in the event shape \(2,\)"),
        (np.ones((4, 5, 2)), np.full((5, 2), np.nan), {}, "x must be finite"),
        (np.full((4, 5, 2), 1e30), np.ones((5, 2)), {}, "energies of chains must be finite, got 20 of 20"),
        (np.ones((4, 5, 2)), np.ones((5, 2)), {"bins": 0}, "bins must be a positive integer"),
    ],
)
def test_faulty_chains_are_named(chains, x, options, message):
    d = ebm.EnergyBased(lambda x: jnp.sum(x**2), dist.Normal(0, 1).expand([2]).to_event(1))
    with pytest.raises(ValueError, match=message):
        plots.plot_energies(d, chains, x, **options)
    assert plt.get_fignums() == []


def test_traces_are_those_of_one_component():
    chains = RNG.normal(size=(10, 30, 2, 3))
    ax = plots.plot_chains(chains, num=4, component=5)
    np.testing.assert_array_equal([line.get_ydata() for line in ax.lines], chains[:4, :, 1, 2])
    assert (ax.get_title(), ax.get_ylabel()) == ("4 of 10 chains", "component 5")
    ax = plots.plot_chains(chains[:3, :, 0, 0])
    assert (ax.get_title(), ax.get_ylabel()) == ("3 of 3 chains", "x")


@pytest.mark.parametrize(
    ("chains", "options", "message"),
    [
        (np.ones(5), {}, r"must have shape \(chain, draw, \*event_shape\), not empty, got \(5,\)"),
        (np.ones((0, 5)), {}, "not empty"),
        (np.ones((4, 5, 3)), {"component": 3}, "component must be an integer from 0 to 2, got 3"),
        (np.ones((4, 5, 3)), {"component": -1}, "from 0 to 2"),
        (np.ones((4, 5)), {"num": 0}, "num must be a positive integer"),
    ],
)
def test_faulty_traces_are_named(chains, options, message):
    with pytest.raises(ValueError, match=message):
        plots.plot_chains(chains, **options)


def test_without_matplotlib_the_package_imports_and_says_what_to_install(monkeypatch):
    for name in ("matplotlib", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, name, None)
    for name in [name for name in sys.modules if name.startswith("numpyro_ebm.plots")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(ebm, "plots", plots)  # which the import replaces
    alone = importlib.import_module("numpyro_ebm.plots")
    assert alone is not plots
    with pytest.raises(ImportError, match=r"pip install 'numpyro_ebm\[plots\]'"):
        alone.plot_chains(np.ones((2, 5)))
