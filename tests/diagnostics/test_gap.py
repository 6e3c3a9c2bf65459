"""The duality gap against exact maximisation, and the score distance against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import random

import numpyro_ebm as ebm
from tests.infer.teacher import rejection, student
from tests.statistics import BOUND


def best_in_ball(x, radius, num_features=600, num_steps=400):
    """Largest mean log-likelihood over measures of total variation `radius` on S^2, by Frank and Wolfe, log Z by quadrature."""
    sphere = ebm.EnergyBased(lambda x: 0 * x[0], ebm.SphereUniform(3))
    nodes, log_weights = (np.asarray(part, np.float64) for part in ebm.Quadrature(60).nodes(sphere))
    features = np.random.default_rng(0).normal(size=(num_features, 3))
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    over_nodes, over_data = np.maximum(nodes @ features.T, 0), np.maximum(np.asarray(x) @ features.T, 0).mean(0)
    # the energy at the nodes and its mean over the data are linear in the measure
    at_nodes, at_data = np.zeros(len(nodes)), 0.0

    def log_likelihood(at_nodes, at_data):
        return -at_data - np.log(np.sum(np.exp(log_weights - at_nodes)))

    for _ in range(num_steps):
        density = np.exp(log_weights - at_nodes)
        slope = density @ over_nodes / density.sum() - over_data
        j = np.argmax(np.abs(slope))
        to_nodes, to_data = radius * np.sign(slope[j]) * np.array([over_nodes[:, j], np.full(len(nodes), over_data[j])])
        steps = [(1 - g, g) for g in (*np.geomspace(1e-4, 1, 25), 0.0)]
        keep, move = max(
            steps, key=lambda s: log_likelihood(s[0] * at_nodes + s[1] * to_nodes, s[0] * at_data + s[1] * to_data[0])
        )
        at_nodes, at_data = keep * at_nodes + move * to_nodes, keep * at_data + move * to_data[0]
    return log_likelihood(at_nodes, at_data)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["untrained", "half-way"])  # 10 s each
def test_the_gap_bounds_what_is_left_to_gain(state):
    """On S^2, where log Z is exact, against a long maximisation."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2_000, 3)) + np.array([1.5, 0, 0])
    x = jnp.asarray(x / np.linalg.norm(x, axis=1, keepdims=True), jnp.float32)
    size = {"untrained": -20.0, "half-way": 0.0}[state]
    features = jnp.array([[1.0, 0, 0], [0, 1.0, 0]])
    energy = ebm.F1Energy(features, jnp.full(2, size), jnp.array([-1.0, 1.0]), radius=3.0)
    d = ebm.EnergyBased(energy, ebm.SphereUniform(3))
    own = float(np.mean(ebm.log_likelihood(d, x, random.key(0), method="quadrature").value))
    left = best_in_ball(x, 3.0) - own
    gap = ebm.duality_gap(d, x, random.key(0), num_particles=16_000)
    assert gap.reliable
    assert left > 0.02
    assert gap.value > left - 3 * gap.stderr
    assert gap.value < 10 * left
    assert np.linalg.norm(gap.neuron) == pytest.approx(1, abs=1e-5)


def circle(num, share, seed):
    rng = np.random.default_rng(seed)
    angle = np.where(rng.random(num) < share, 0, np.pi) + 0.15 * rng.normal(size=num)
    return jnp.asarray(np.stack([np.cos(angle), np.sin(angle)], -1), jnp.float32)


@pytest.mark.slow  # 15 s
def test_wrong_weights_of_modes_are_seen_where_chains_started_at_the_data_hide_them():
    energy = ebm.F1Energy(jnp.array([[1.0, 0], [-1.0, 0]]), jnp.zeros(2), -jnp.ones(2), radius=20.0)
    d, x = ebm.EnergyBased(energy, ebm.SphereUniform(2)), circle(4_000, 0.9, 0)
    gap = ebm.duality_gap(d, x, random.key(0), num_particles=16_000)
    assert gap.value > 5
    at_data = ebm.duality_gap(d, x, random.key(0), particles=circle(16_000, 0.9, 1))
    assert at_data.value < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_perfect_fit_has_the_gap_of_noise(seed):  # 10 s each
    """Uniform data, and nothing learned."""
    energy = ebm.F1Energy(jnp.eye(3), jnp.full(3, -20.0), jnp.ones(3), radius=2.0)
    x = ebm.SphereUniform(3).sample(random.key(seed), (50_000,))
    gap = ebm.duality_gap(
        ebm.EnergyBased(energy, ebm.SphereUniform(3)), x, random.key(seed), num_particles=8_000, num_bootstrap=8
    )
    assert 0 <= gap.value < 2 * gap.floor + 2 * 2 * 3 / 50_000**0.5


@pytest.mark.slow
def test_a_standardised_table():  # 8 s
    """Columns of other units have the gap of their standardised ones."""
    x = np.random.default_rng(0).normal(size=(500, 2)) * [100, 0.01] + [5, 3]
    energy = ebm.F1Energy(jnp.eye(3)[:, :3], jnp.zeros(3), jnp.array([1.0, -1.0, 1.0]), radius=1.0, bias=True)
    table = ebm.standardized(energy, x)
    unit = ebm.EnergyBased(energy, dist.Normal(0, 1).expand([2]).to_event(1))
    z = (x - x.mean(0)) / x.std(0)
    particles = np.random.default_rng(1).normal(size=(4_000, 2))
    gaps = [
        ebm.duality_gap(d, data, random.key(0), particles=draws)
        for d, data, draws in ((table, x, particles * x.std(0) + x.mean(0)), (unit, z, particles))
    ]
    assert gaps[0].value == pytest.approx(gaps[1].value, rel=1e-2)


@pytest.mark.slow
def test_the_published_setting():
    """Budget: 4 minutes. Four moves of a quarter step are within twice the floor; one coarse move is far above."""
    x = rejection(random.key(0), 10_000)
    gaps = {}
    for name, options in (
        ("four", {"num_substeps": 4}),
        ("coarse", {"kernel": ebm.kernels.sphere.projected}),
    ):
        dual = ebm.DualSGDA(student, step_size=2e-2, timescale=10.0, num_chains=20_000, **options)
        result = dual.run(random.key(100), 3_000, x, progress_bar=False)
        fitted = ebm.fitted_distribution(student, result.params, x)
        gaps[name] = ebm.duality_gap(fitted, x, random.key(1))
    assert gaps["four"].reliable
    assert gaps["four"].value < 2 * gaps["four"].floor
    assert gaps["coarse"].value > 3 * gaps["coarse"].floor


def test_what_has_no_gap_is_refused():
    x = jnp.zeros((3, 2))
    with pytest.raises(TypeError, match="with an F1Energy"):
        ebm.duality_gap(
            ebm.EnergyBased(lambda x: jnp.sum(x), dist.Normal(0, 1).expand([2]).to_event(1)), x, random.key(0)
        )
    energy = ebm.F1Energy(jnp.stack([jnp.eye(2)] * 3), jnp.zeros((3, 2)), jnp.ones(2), radius=1.0)
    with pytest.raises(ValueError, match="one distribution"):
        ebm.duality_gap(ebm.EnergyBased(energy, dist.Normal(0, 1).expand([2]).to_event(1)), x, random.key(0))
    one = ebm.EnergyBased(
        ebm.F1Energy(jnp.eye(2), jnp.zeros(2), jnp.ones(2), radius=1.0), dist.Normal(0, 1).expand([2]).to_event(1)
    )
    with pytest.raises(ValueError, match="must be finite"):
        ebm.duality_gap(one, x.at[0, 0].set(jnp.nan), random.key(0))


NORMAL = dist.Normal(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("p", "q", "truth"),
    [
        (NORMAL, ebm.EnergyBased(lambda x: x**2 / 2, NORMAL), 1.0),
        (ebm.EnergyBased(lambda x: -x, NORMAL), NORMAL, 1.0),
        (dist.Normal(1.0, 2.0), NORMAL, 1 + 9 / 16 * 4),
        (
            ebm.EnergyBased(lambda x: -2 * x[2], ebm.SphereUniform(3)),
            ebm.SphereUniform(3),
            4 * (1 / np.tanh(2) - 1 / 2),
        ),
    ],
    ids=["known p", "fitted p", "two known", "sphere"],
)
def test_score_distance(p, q, truth):  # 20 s
    """Of N(1, 4) and N(0, 1): E (x - (x - 1) / 4)^2; of von Mises-Fisher: kappa^2 E (1 - t^2)."""
    found = ebm.score_distance(p, q, random.key(0))
    assert found.reliable
    assert abs(found.value - truth) < BOUND * found.stderr + 1e-6
    assert found.stderr < 0.1 * truth


def test_score_distance_with_draws_given():
    x = random.normal(random.key(0), (5_000,))
    q = ebm.EnergyBased(lambda x: x**2 / 2, NORMAL)
    found = ebm.score_distance(NORMAL, q, random.key(1), x=x)
    assert found.value == pytest.approx(float(jnp.mean(x**2)), rel=1e-5)
    with pytest.raises(ValueError, match="same events"):
        ebm.score_distance(NORMAL, NORMAL.expand([2]).to_event(1), random.key(0))
    for other in (dist.HalfNormal(1), dist.Uniform(-1, 1), dist.Poisson(1.0)):
        with pytest.raises(ValueError, match="q must have density wherever p has"):
            ebm.score_distance(NORMAL, other, random.key(0))
    with pytest.raises(ValueError, match="at least 160 draws"):
        ebm.score_distance(NORMAL, q, random.key(1), x=x[:10])
    with pytest.raises(TypeError, match="must be a distribution"):
        ebm.score_distance(NORMAL, jax.nn.relu, random.key(0))
