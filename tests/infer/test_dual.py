"""Dual SGDA: Algorithm 1 step by step, and what a user relies on."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers

import numpyro_ebm as ebm
from numpyro_ebm.energies import MAX_MEAN_WEIGHT
from tests.infer.teacher import divergence, fresh_points, rejection, student, teacher
from tests.statistics import BOUND

RADIUS = 5.0
X = ebm.SphereUniform(3).sample(random.key(7), (60,)) + jnp.array([0.0, 0.0, 1.0])
X = X / jnp.linalg.norm(X, axis=-1, keepdims=True)


def model(x, beta=1.0):
    energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=RADIUS)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3), beta), obs=x)


def make(model=model, **kwargs):
    return ebm.DualSGDA(model, **({"step_size": 1e-2, "num_chains": 50} | kwargs))


def pool(state, site="x"):
    return state.mutable_state[f"{site}$chains"]["state"]


def params(dual, state):
    return jax.tree.map(np.asarray, dual.get_params(state)["energy$params"])


def algorithm_1(params, particles, x, step, ball=RADIUS):
    """The update of neurons and weights as paper A writes it, in float64 NumPy."""
    theta, log_weights = (np.asarray(params[name], np.float64) for name in ("features", "log_weights"))
    particles, x = np.asarray(particles, np.float64), np.asarray(x, np.float64)
    signs = np.where(np.arange(len(theta)) % 2 == 0, 1.0, -1.0)

    def mean_feature(points):
        inner = points @ theta.T
        return np.maximum(inner, 0).mean(0), (points[:, :, None] * (inner > 0)[:, None, :]).mean(0).T

    value = mean_feature(particles)[0] - mean_feature(x)[0]
    gradient = mean_feature(particles)[1] - mean_feature(x)[1]
    gradient -= np.sum(gradient * theta, -1, keepdims=True) * theta
    theta = theta + step * signs[:, None] * gradient
    theta /= np.linalg.norm(theta, axis=-1, keepdims=True)
    log_weights = log_weights + step * signs * value
    log_weights -= max(np.log(np.exp(log_weights).mean() / MAX_MEAN_WEIGHT), 0)
    return theta, log_weights


@pytest.mark.parametrize("beta", [1.0, 0.3])
def test_one_update_is_algorithm_1(beta):
    dual = make(timescale=30.0)
    state = dual.init(random.key(0), X, beta)
    for _ in range(3):
        theta, log_weights = algorithm_1(params(dual, state), pool(state).position, X, 0.3)
        state, _ = dual.update(state, X, beta)
        np.testing.assert_allclose(params(dual, state)["features"], theta, atol=2e-6)
        np.testing.assert_allclose(params(dual, state)["log_weights"], log_weights, atol=2e-6)


@pytest.mark.slow
def test_weights_stay_in_the_ball():  # 5 s
    dual = make(timescale=5000.0, step_size=1e-2)
    state = dual.init(random.key(0), X)
    for _ in range(5):
        _theta, log_weights = algorithm_1(params(dual, state), pool(state).position, X, 50.0)
        state, _ = dual.update(state, X)
    np.testing.assert_allclose(params(dual, state)["log_weights"], log_weights, atol=1e-3)
    np.testing.assert_allclose(np.exp(log_weights).mean(), MAX_MEAN_WEIGHT, rtol=1e-5)
    assert float(ebm.fitted_distribution(model, dual.get_params(state), X).energy.norm) <= RADIUS


@pytest.mark.slow
def test_a_subsample_moves_neurons_as_its_rows_alone_would():  # 6 s
    def subsampled(x):
        energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=RADIUS)
        with numpyro.plate("data", 60, subsample_size=20):
            numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=numpyro.subsample(x, event_dim=1))

    dual = make(subsampled, timescale=30.0)
    state = dual.init(random.key(0), X)
    before = params(dual, state)
    new, _ = dual.update(state, X)
    # the rows that the update drew
    key = random.split(random.split(state.rng_key)[1])[0]
    with handlers.seed(rng_seed=key):
        trace = handlers.trace(handlers.substitute(subsampled, {"energy$params": before})).get_trace(X)
    theta, log_weights = algorithm_1(before, pool(state).position, trace["x"]["value"], 0.3)
    np.testing.assert_allclose(params(dual, new)["features"], theta, atol=2e-6)
    np.testing.assert_allclose(params(dual, new)["log_weights"], log_weights, atol=2e-6)


def test_masked_rows_and_scales_leave_the_step_per_observation():
    def masked(x):
        energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=RADIUS)
        with handlers.scale(scale=7.0), numpyro.plate("data", 60), handlers.mask(mask=jnp.arange(60) < 25):
            numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=x)

    dual = make(masked, timescale=30.0)
    state = dual.init(random.key(0), X)
    theta, log_weights = algorithm_1(params(dual, state), pool(state).position, X[:25], 0.3)
    state, _ = dual.update(state, X)
    np.testing.assert_allclose(params(dual, state)["features"], theta, atol=2e-6)
    np.testing.assert_allclose(params(dual, state)["log_weights"], log_weights, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["weights", "two masks", "to_event"])
def test_weighted_and_doubly_masked_rows(case):  # 8 s
    weights = jnp.linspace(0.1, 2, 60) if case == "weights" else (jnp.arange(60) < 20) & (jnp.arange(60) >= 10)

    def weighted(x):
        energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=RADIUS)
        d = ebm.EnergyBased(energy, ebm.SphereUniform(3))
        with numpyro.plate("data", 60):
            if case == "weights":
                with handlers.scale(scale=weights):
                    numpyro.sample("x", d, obs=x)
            elif case == "two masks":
                with handlers.mask(mask=jnp.arange(60) < 20), handlers.mask(mask=jnp.arange(60) >= 10):
                    numpyro.sample("x", d, obs=x)
            else:
                with handlers.mask(mask=weights):
                    numpyro.sample("x", d.expand([60, 2]).to_event(1), obs=jnp.stack([x, x], 1))

    dual = make(weighted, timescale=30.0)
    state = dual.init(random.key(0), X)
    # rows as often as they weigh
    rows = jnp.repeat(X, np.round(np.asarray(weights) * 10_000).astype(int), axis=0)
    theta, log_weights = algorithm_1(params(dual, state), pool(state).position, rows, 0.3)
    state, _ = dual.update(state, X)
    np.testing.assert_allclose(params(dual, state)["features"], theta, atol=1e-5)
    np.testing.assert_allclose(params(dual, state)["log_weights"], log_weights, atol=1e-5)


def test_rows_that_are_all_masked_teach_nothing():
    def masked(x, mask):
        energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=RADIUS)
        numpyro.param("other", 1.0)
        with numpyro.plate("data", 60), handlers.mask(mask=mask):
            numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=x)

    dual = make(masked)
    state = dual.init(random.key(0), X, jnp.ones(60, bool))
    new, _ = dual.update(state, X, jnp.zeros(60, bool))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), dual.get_params(new), dual.get_params(state))


@pytest.mark.slow
def test_other_parameters_descend_per_observation_or_by_optim():  # 5 s
    def model(x):
        loc = numpyro.param("loc", 0.0)
        with numpyro.plate("data", 40):
            numpyro.sample("x", ebm.EnergyBased(lambda x: -loc * x, dist.Normal(0, 1)), obs=x)

    x = jnp.linspace(0.0, 1.0, 40)
    for optim, factor in ((None, 0.1 / 40), (optax.sgd(1e-3), 1e-3)):
        dual = make(model, timescale=10.0, optim=optim)
        state = dual.init(random.key(0), x)
        contrast = 40 * (x.mean() - pool(state).position.mean())
        new, _ = dual.update(state, x)
        np.testing.assert_allclose(dual.get_params(new)["loc"], factor * contrast, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_two_sites_share_an_energy():  # 5 s
    def model(x):
        energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=RADIUS)
        for name, rows in (("a", x[:20]), ("b", x[20:])):
            with numpyro.plate(f"plate_{name}", len(rows)):
                numpyro.sample(name, ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=rows)

    dual = make(model, timescale=30.0)
    state = dual.init(random.key(0), X)
    # as one site of all rows, whose particles stand for those of each site in proportion
    particles = jnp.concatenate([pool(state, "a").position, *[pool(state, "b").position] * 2])
    theta, log_weights = algorithm_1(params(dual, state), particles, X, 0.3)
    state, _ = dual.update(state, X)
    np.testing.assert_allclose(params(dual, state)["features"], theta, atol=2e-6)
    np.testing.assert_allclose(params(dual, state)["log_weights"], log_weights, atol=2e-6)


def test_particles_start_at_the_data_and_stay_on_the_sphere():
    dual = make(num_chains=120, num_substeps=4)
    state = dual.init(random.key(0), X)
    distances = np.linalg.norm(np.asarray(pool(state).position)[:, None] - np.asarray(X), axis=-1)
    np.testing.assert_array_equal(np.sort(distances, -1)[:, 0], 0)
    assert (np.bincount(distances.argmin(-1)) == 2).all()
    state = dual.run(random.key(0), 20, X, progress_bar=False).state
    assert int(pool(state).num_moves) == 80
    np.testing.assert_allclose(jnp.linalg.norm(pool(state).position, axis=-1), 1, atol=1e-5)


def test_run_is_updates_and_goes_on_from_a_state():
    dual = make()
    result = dual.run(random.key(0), 130, X, progress_bar=False)
    state, losses = dual.init(random.key(0), X), []
    update = jax.jit(dual.update)
    for _ in range(130):
        state, loss = update(state, X)
        losses.append(loss)
    np.testing.assert_allclose(result.losses, jnp.stack(losses), rtol=1e-3, atol=1e-3)
    first = dual.run(random.key(0), 100, X, progress_bar=False)
    second = dual.run(random.key(9), 30, X, progress_bar=False, init_state=first.state)
    np.testing.assert_array_equal(second.state.mutable_state["x$chains"]["state"].position, pool(result.state).position)


@pytest.mark.parametrize("kernel", [None, ebm.kernels.ula, ebm.kernels.sphere.projected, ebm.kernels.mala(1e-3)])
@pytest.mark.slow
@pytest.mark.parametrize("step_size", [1e-2, optax.cosine_decay_schedule(1e-2, 100)])  # 5 s each
def test_kernels_and_schedules(kernel, step_size):
    dual = make(kernel=kernel, step_size=step_size, num_substeps=2, restart_prob=0.2)
    result = dual.run(random.key(0), 20, X, progress_bar=False)
    assert jnp.isfinite(result.losses).all()
    assert jnp.isfinite(dual.evaluate(result.state, X))


@pytest.mark.case("A8")
def test_stable_update_skips_a_bad_gradient():
    def model(x, poison):
        energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=RADIUS)
        with numpyro.plate("data", 60):
            numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=x)
        # finite, with a gradient that is not
        numpyro.factor("factor", jnp.sqrt(poison * jnp.sum(energy.log_weights) ** 2 * 0))

    dual = make(model)
    state = dual.init(random.key(0), X, 0.0)
    new, loss = dual.stable_update(state, X, 1.0)
    assert jnp.isnan(loss)
    jax.tree.map(np.testing.assert_array_equal, params(dual, new), params(dual, state))
    with pytest.raises(ebm.DivergenceError, match="update 1 went wrong, it turned non-finite"):
        dual.run(random.key(0), 5, X, 1.0, progress_bar=False)


@pytest.mark.slow
def test_a_run_that_turns_non_finite_stops_and_keeps_the_last_finite_state():  # 6 s
    def model(x):
        energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=RADIUS)
        count = numpyro.primitives.mutable("count", {"n": jnp.zeros((), jnp.int32)})
        count["n"] = count["n"] + 1
        beta = jnp.where(count["n"] > 123, jnp.nan, 1.0)
        with numpyro.plate("data", 60):
            numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3), beta), obs=x)

    dual = make(model)
    with pytest.raises(ebm.DivergenceError, match="update 123 went wrong, it turned non-finite") as caught:
        dual.run(random.key(0), 300, X, progress_bar=False)
    assert caught.value.step == 123
    result = caught.value.result
    assert result.losses.shape == (122,)
    assert jnp.isfinite(result.losses).all()
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(result.params))


def test_the_last_finite_state_is_finite_in_the_constrained_space():
    def model(x):
        loc = numpyro.param("loc", 0.0)
        scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
        with numpyro.plate("data", 500):
            numpyro.sample("x", ebm.EnergyBased(lambda x: 0.0 * x, dist.Normal(loc, scale)), obs=x)

    x = 2 + 0.5 * random.normal(random.key(0), (500,))
    dual = make(model, step_size=0.05, timescale=2.0, num_chains=1000, num_substeps=3)
    with pytest.raises(ebm.DivergenceError) as caught:
        dual.run(random.key(0), 3000, x, progress_bar=False)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(caught.value.result.params))
    error = ebm.DivergenceError("message", 3, None)
    assert pickle.loads(pickle.dumps(error)).step == 3


@pytest.mark.slow
def test_arguments_that_are_equal_but_not_the_same_are_kept_apart():  # 12 s
    def model(x, flag):
        energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=RADIUS)
        with numpyro.plate("data", 60):
            d = ebm.EnergyBased(energy, ebm.SphereUniform(3), 2.0 if flag is True else 1.0)
            numpyro.sample("x", d, obs=x)

    dual = make(model)
    losses = [dual.run(random.key(0), 2, X, flag, progress_bar=False).losses for flag in (1, True, np.int64(1))]
    np.testing.assert_allclose(losses[1][0], 2 * losses[0][0], rtol=1e-5)
    np.testing.assert_array_equal(losses[2], losses[0])


@pytest.mark.slow
@pytest.mark.case("A15")
def test_later_runs_and_updates_trace_nothing():  # 6 s
    calls = []

    def counted(inner):
        calls.append(1)
        return jax.nn.relu(inner)

    def model(x, size):
        energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=RADIUS, activation=counted)
        with numpyro.plate("data", x.shape[0], subsample_size=size):
            batch = numpyro.subsample(x, event_dim=1)
            numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=batch)

    dual = make(model)
    dual.run(random.key(0), 120, X, size=30, progress_bar=False)
    traced = len(calls)
    for i in range(2, 21):
        dual.run(random.key(i), 120, -X, size=30, progress_bar=False)
    assert len(calls) == traced
    update = jax.jit(functools.partial(dual.update, size=30))
    state, _ = update(dual.init(random.key(0), X, size=30), X)
    traced = len(calls)
    for i in range(2, 21):
        state, _ = update(state, X * (-1) ** i)
    assert len(calls) == traced


@pytest.mark.slow  # 12 s
@pytest.mark.case("A14")
def test_training_goes_on_after_a_round_trip_in_pickle():
    dual = make()
    state = dual.run(random.key(0), 10, X, progress_bar=False).state
    state = state._replace(rng_key=random.key_data(state.rng_key))
    other, copied = pickle.loads(pickle.dumps((dual, state)))
    state, copied = (s._replace(rng_key=random.wrap_key_data(s.rng_key)) for s in (state, copied))
    expected = dual.run(random.key(1), 10, X, progress_bar=False, init_state=state)
    found = other.run(random.key(1), 10, X, progress_bar=False, init_state=copied)
    np.testing.assert_array_equal(found.losses, expected.losses)
    update, _ = pickle.loads(pickle.dumps(dual)).update(copied, X)
    jax.tree.map(np.testing.assert_array_equal, update.mutable_state, dual.update(state, X)[0].mutable_state)


@pytest.mark.slow
def test_a_trainer_round_trips_in_pickle_after_a_run_on_subsamples():  # 12 s
    dual = make(subsampled_model)
    expected = dual.run(random.key(0), 5, X, progress_bar=False).losses
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(dual)).run(random.key(0), 5, X, progress_bar=False).losses, expected
    )


def subsampled_model(x):
    energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=RADIUS)
    with numpyro.plate("data", 60, subsample_size=20):
        numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=numpyro.subsample(x, event_dim=1))


@pytest.mark.slow
def test_states_of_another_trainer_are_refused():  # 5 s
    state = make().run(random.key(0), 5, X, progress_bar=False).state
    for other in (
        make(num_chains=20),
        make(optim=optax.adam(1e-3), model=lambda x: (numpyro.param("a", 1.0), model(x))),
    ):
        with pytest.raises(ValueError, match="init_state is of another model"):
            other.run(random.key(0), 5, X, progress_bar=False, init_state=state)
    with pytest.raises(TypeError, match="init_state must be an SVIState"):
        make().run(random.key(0), 5, X, progress_bar=False, init_state=(state,))


def test_particles_that_do_not_move_are_reported():
    def steep(x):
        scale = numpyro.param("scale", 1e6)
        with numpyro.plate("data", 60):
            numpyro.sample("x", ebm.EnergyBased(lambda x: scale * x[2] ** 2, ebm.SphereUniform(3)), obs=x)

    dual = make(steep, step_size=1.0, timescale=1e-9, monitor=ebm.Monitor(np.inf, np.inf))
    with pytest.warns(UserWarning, match="particles hardly move"):
        dual.run(random.key(0), 5, X, progress_bar=False)


def test_a_network_that_was_not_declared_is_refused():
    def model(x):
        with numpyro.plate("data", 60):
            numpyro.sample("x", ebm.EnergyBased(lambda x: x[2], ebm.SphereUniform(3)), obs=x)

    with pytest.raises(ValueError, match=r"\['x'\] have nothing to train.*nnx_module"):
        make(model).run(random.key(0), 5, X, progress_bar=False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kernel": ebm.MALA}, "kernel is one of MCMC's"),
        ({"kernel": 3}, "kernel must be a kernel or a function"),
        ({"guide": 3}, "guide must be callable"),
        ({"model": 3}, "model must be callable"),
        ({"optim": 3}, "optim must be an optax"),
        ({"model": ebm.estimate(model, lambda site: None)}, "DualSGDA estimates by itself"),
    ],
)
def test_types_are_checked(change, message):
    with pytest.raises(TypeError, match=message):
        make(**change)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.case("A17")
def test_double_precision(dtype):  # 10 s
    with jax.enable_x64(True):
        x = np.asarray(X, np.float64)
        x = (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(dtype)
        result = make(num_substeps=3).run(random.key(0), 5, x, progress_bar=False)
        assert pool(result.state).position.dtype == dtype
        assert result.losses.dtype == jnp.float64
        assert all(leaf.dtype == jnp.float64 for leaf in jax.tree.leaves(result.params))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step_size": 0.0}, "step_size must be positive"),
        ({"step_size": "a"}, "step_size must be a positive number"),
        ({"timescale": optax.constant_schedule(1.0)}, "timescale must be a positive number"),
        ({"step_size": float("nan")}, "step_size must be positive"),
        ({"timescale": -1.0}, "timescale must be positive"),
        ({"num_chains": 0}, "num_chains must be a positive integer, got 0"),
        ({"num_substeps": 0}, "num_substeps must be a positive integer"),
        ({"restart_prob": 1.5}, "restart_prob must be a probability"),
    ],
)
def test_numbers_are_checked(change, message):
    with pytest.raises(ValueError, match=message):
        make(**change)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (X.at[4, 1].set(jnp.nan), "site 'x': .*nan at row 4, column 1"),
        (X.at[4, 1].set(jnp.inf), "inf at row 4, column 1"),
        (X.at[9].multiply(1.5), r"row 9 does not.*norm 1\.5"),
        (X[:, :2], r"shape \(60, 2\).*event shape \(3,\)"),
    ],
)
@pytest.mark.case("A8")
def test_data_are_checked_before_training(x, message):
    with pytest.raises(ValueError, match=message):
        make().run(random.key(0), 5, x, progress_bar=False)


def test_models_that_particles_moved_once_would_fit_wrongly_are_refused():
    def latent(x):
        beta = numpyro.sample("beta", dist.Gamma(2, 2))
        with numpyro.plate("data", 60):
            numpyro.sample("x", ebm.EnergyBased(lambda x: -x[2], ebm.SphereUniform(3), beta), obs=x)

    def guide(x):
        numpyro.sample("beta", dist.Gamma(numpyro.param("a", 2.0), 2))

    with pytest.raises(ValueError, match=r"depends on latent \['beta'\]"):
        make(latent, guide=guide).run(random.key(0), 5, X, progress_bar=False)
    with pytest.raises(ValueError, match="no site with an EnergyBased"):
        make(lambda x: None).run(random.key(0), 5, X, progress_bar=False)


@pytest.mark.slow
def test_a_guide_of_other_latent_variables_trains_along():  # 5 s
    def model(x, y):
        energy = ebm.f1_energy("energy", dim=3, num_neurons=8, radius=RADIUS)
        loc = numpyro.sample("loc", dist.Normal(0, 10))
        with numpyro.plate("data", 60):
            numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=x)
            numpyro.sample("y", dist.Normal(loc, 1), obs=y)

    def guide(x, y):
        numpyro.sample("loc", dist.Normal(numpyro.param("m", 0.0), 0.13))

    dual = make(model, guide=guide, optim=optax.adam(0.1))
    result = dual.run(random.key(0), 300, X, jnp.linspace(2, 4, 60), progress_bar=False)
    assert abs(float(result.params["m"]) - 3) < 0.3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kernel", [ebm.kernels.sphere.projected, None], ids=["published", "default"])
def test_published_setting(kernel, seed):
    """Budget: 20 seconds each. The published move reaches 0.03, geodesic MALA 0.01."""
    x = rejection(random.key(seed), 10_000)
    dual = ebm.DualSGDA(student, step_size=2e-2, timescale=10.0, num_chains=20_000, kernel=kernel)
    result = dual.run(random.key(seed + 100), 1_000, x, progress_bar=False)
    found = divergence(ebm.fitted_distribution(student, result.params, x), fresh_points())
    assert found <= (0.04 if kernel else 0.015)


@pytest.mark.slow
def test_four_moves_of_a_quarter_step_do_better_than_published():
    """Budget: 2 minutes. And the last particles are draws of the fit."""
    x = rejection(random.key(0), 10_000)
    dual = ebm.DualSGDA(
        student, step_size=2e-2, timescale=10.0, num_chains=20_000, num_substeps=4, kernel=ebm.kernels.ula
    )
    result = dual.run(random.key(100), 3_000, x, progress_bar=False)
    fitted = ebm.fitted_distribution(student, result.params, x)
    assert divergence(fitted, fresh_points()) <= 0.008

    # moments of the particles against the fit's own, from the teacher's draws weighted to the fit
    particles = np.asarray(pool(result.state).position, np.float64)
    fresh = fresh_points()
    weights = np.asarray(jax.nn.softmax(teacher()[0](fresh) - fitted.energy(fresh)), np.float64)
    for function in (lambda x: x, lambda x: x**2, lambda x: x[:, :1] * x):
        truth = weights @ function(np.asarray(fresh, np.float64))
        error = np.sqrt(
            function(particles).var(0) / len(particles)
            + ((weights[:, None] * (function(np.asarray(fresh, np.float64)) - truth)) ** 2).sum(0)
        )
        # particles' step is 5e-3: its bias, O(step * (d - 1)), is allowed on top
        assert np.all(np.abs(function(particles).mean(0) - truth) < BOUND * error + 0.01)
