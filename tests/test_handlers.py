"""estimate, check_model and fitted_distribution."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import (
    MCMC,
    NUTS,
    SVI,
    DiscreteGibbs,
    Gibbs,
    RenyiELBO,
    Trace_ELBO,
    TraceGraph_ELBO,
    TraceMeanField_ELBO,
)
from numpyro.infer.autoguide import AutoLaplaceApproximation, AutoNormal

import numpyro_ebm as ebm

POOL = ebm.ChainPool(ebm.kernels.mala(0.5), 64, num_steps=5)
CD = ebm.ContrastiveDivergence(POOL)
X = jnp.linspace(-2.0, 2.0, 40) + 0.5


def model(x):
    theta = numpyro.param("theta", 0.1, constraint=dist.constraints.positive)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(lambda x: theta * (x - 0.5) ** 2 / 2, dist.Normal(0.5, 3.0)), obs=x)


def guide(*args):
    pass


def make(loss=None, optim=None, fn=None):
    return SVI(fn or ebm.estimate(model, CD), guide, optim or optax.adam(3e-2), loss or Trace_ELBO())


# maximum likelihood: 1 / (1/9 + theta) = mean (x - 1/2)^2
EXACT = 1 / float(jnp.mean((X - 0.5) ** 2)) - 1 / 9


@pytest.mark.parametrize(
    ("way", "loss"),
    [
        *[(way, Trace_ELBO()) for way in ("run", "bar", "stable", "by hand")],
        ("run", TraceMeanField_ELBO()),
        *[pytest.param(way, TraceMeanField_ELBO(), marks=pytest.mark.slow) for way in ("bar", "stable", "by hand")],
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_svi_trains(way, loss):
    svi = make(loss)
    if way == "by hand":
        state = svi.init(random.key(0), X)
        update = jax.jit(svi.update)
        for _ in range(600):
            state, _value = update(state, X)
    else:
        options = {"progress_bar": way == "bar", "stable_update": way == "stable"}
        state = svi.run(random.key(0), 600, X, **options).state
    assert abs(float(svi.get_params(state)["theta"]) - EXACT) < 0.15
    assert jnp.isfinite(svi.evaluate(state, X))
    assert set(state.mutable_state) == {"x$chains"}


@pytest.mark.slow
def test_a_learned_prior_over_a_latent_trains_with_an_autoguide():
    """z ~ exp(-theta z^2 / 2) N(0, 3), y ~ N(z, 1/2): y is Gaussian, theta by maximum likelihood."""
    y = 2 * random.normal(random.key(3), (200,))

    def model(y):
        theta = numpyro.param("theta", 0.5, constraint=dist.constraints.positive)
        with numpyro.plate("data", 200):
            z = numpyro.sample("z", ebm.EnergyBased(lambda z: theta * z**2 / 2, dist.Normal(0, 3)))
            numpyro.sample("y", dist.Normal(z, 0.5), obs=y)

    estimated = ebm.estimate(model, CD)
    svi = SVI(estimated, AutoNormal(estimated), optax.adam(3e-2), Trace_ELBO())
    result = svi.run(random.key(0), 1500, y, progress_bar=False)
    variance = float(jnp.mean(y**2)) - 0.25
    assert abs(float(result.params["theta"]) / (1 / variance - 1 / 9) - 1) < 0.25


@pytest.mark.slow
def test_two_sites_each_with_its_own_estimator():  # 6 s
    def model(x):
        for name in ("a", "b"):
            theta = numpyro.param(f"theta_{name}", 0.1)
            with numpyro.plate(f"plate_{name}", 40):
                numpyro.sample(name, ebm.EnergyBased(lambda x, t=theta: t * x**2 / 2, dist.Normal(0, 3)), obs=x)

    small = ebm.ContrastiveDivergence(ebm.ChainPool(ebm.kernels.mala(0.1), 7))
    for config in ({"a": CD, "b": small}, lambda site: {"a": CD, "b": small}[site["name"]]):
        svi = make(fn=ebm.estimate(model, config))
        state = svi.run(random.key(0), 3, X, progress_bar=False).state
        sizes = {name: holder["state"].position.shape for name, holder in state.mutable_state.items()}
        assert sizes == {"a$chains": (64,), "b$chains": (7,)}


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (Trace_ELBO(num_particles=2), "num_particles=1, got 2"),
        (TraceMeanField_ELBO(num_particles=4), "num_particles=1, got 4"),
        (Trace_ELBO(multi_sample_guide=True), "multi_sample_guide"),
        (RenyiELBO(), "Trace_ELBO or TraceMeanField_ELBO"),
        (TraceGraph_ELBO(), "Trace_ELBO or TraceMeanField_ELBO"),
    ],
    ids=["particles", "mean-field particles", "multi-sample", "Renyi", "graph"],
)
def test_losses_that_drop_the_chains_are_refused_before_training(loss, message):
    with pytest.raises(ValueError, match=message):
        make(loss).init(random.key(0), X)


def test_the_estimate_does_not_act_under_mcmc():
    def model(x):
        theta = numpyro.sample("theta", dist.Gamma(2, 2))
        with numpyro.plate("data", 40):
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2, dist.Normal(0, 1)), obs=x)

    mcmc = MCMC(NUTS(ebm.estimate(model, CD)), num_warmup=2, num_samples=2, progress_bar=False)
    with pytest.raises(ebm.IntractableNormalizerError, match="site 'x'"):
        mcmc.run(random.key(0), X)


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        (3, TypeError, "config must be an estimator"),
        ({"x": 3}, TypeError, r"config\['x'\] must be an estimator"),
        (lambda site: 3, TypeError, "returned 3 for site 'x'"),
        ({"x": CD, "y": CD}, ValueError, r"names \['y'\].*are \['x'\]"),
    ],
)
def test_config_is_checked(config, error, message):
    with pytest.raises(error, match=message):
        make(fn=ebm.estimate(model, config)).init(random.key(0), X)


@pytest.mark.parametrize(
    ("x", "message"),
    [(X.at[3].set(jnp.nan), "site 'x': .*nan at row 3"), (X.at[5].set(-jnp.inf), "-inf at row 5")],
)
@pytest.mark.case("A8")
def test_data_are_checked_before_training(x, message):
    with pytest.raises(ValueError, match=message):
        make().init(random.key(0), x)


def test_a_site_left_alone_keeps_its_guard():
    svi = make(fn=ebm.estimate(model, lambda site: None))
    with pytest.raises(ebm.IntractableNormalizerError):
        svi.run(random.key(0), 1, X, progress_bar=False)


@pytest.mark.slow
def test_chains_of_a_batch_follow_their_observations_under_subsampling():
    """Row i has the mean 100 i: its chains must be there whenever it is drawn."""

    def model(x):
        numpyro.param("theta", 0.1)
        with numpyro.plate("outer", 3, dim=-2), numpyro.plate("data", 40, subsample_size=10, dim=-1) as index:
            d = ebm.EnergyBased(lambda x: x - x, dist.Normal(100.0 * index, 1.0))
            numpyro.sample("x", d, obs=jnp.broadcast_to(x[index], (3, 10)))

    still = ebm.ContrastiveDivergence(ebm.ChainPool(ebm.kernels.ula(1e-14), 4))
    svi = make(fn=ebm.estimate(model, still))
    state, before = svi.init(random.key(0), X), None
    update = jax.jit(svi.update)
    for _ in range(60):
        state, _loss = update(state, X)
        holder = state.mutable_state["x$chains"]
        if before is not None:
            # those that have started stay where they are
            np.testing.assert_array_equal(
                np.round(holder["state"].position[:, before["is_started"]]),
                np.round(before["state"].position[:, before["is_started"]]),
            )
        before = holder
    assert holder["is_started"].shape == (40,)
    assert holder["is_started"].all()
    assert np.all(np.abs(holder["state"].position - 100 * jnp.arange(40)) < 6)


@pytest.mark.case("A6")
def test_log_density_scales_with_the_subsample():
    for size in (1, 100):
        x = jnp.linspace(0, 1, 1000)

        def model(x, size=size):
            with numpyro.plate("data", 1000, subsample_size=size) as index:
                numpyro.sample("x", ebm.EnergyBased(lambda x: x**2, dist.Normal(0, 1)), obs=x[index])

        with numpyro.handlers.seed(rng_seed=0):
            value, trace = numpyro.infer.util.log_density(model, (x,), {}, {})
        batch = trace["x"]["value"]
        assert batch.shape == (size,)
        np.testing.assert_allclose(value, 1000 / size * trace["x"]["fn"].log_prob(batch).sum(), rtol=1e-5)


def check_latent(z_dist, energy):
    def model(x):
        z = numpyro.sample("z", z_dist)
        numpyro.sample("x", ebm.EnergyBased(energy(z), dist.Normal(0, 1)), obs=x)

    return ebm.check_model(model, 0.5)


@pytest.mark.case("A19")
def test_check_model_names_latent_and_discrete_and_learned():
    assert check_latent(dist.Gamma(1, 1), lambda z: lambda x: z * x**2) == {"x": {"z"}}
    rates = jnp.array([0.5, 2.0])
    assert check_latent(dist.Bernoulli(0.5), lambda z: lambda x: rates[z] * x**2) == {"x": {"z"}}
    assert check_latent(dist.Gamma(1, 1), lambda z: lambda x: x**2) == {}
    assert ebm.check_model(model, X) == {"x": {"theta"}}

    def latent_everywhere(x):
        beta = numpyro.sample("beta", dist.Gamma(2, 2))
        scale = numpyro.sample("scale", dist.Gamma(2, 2))
        unused = numpyro.sample("unused", dist.Gamma(2, 2))
        numpyro.sample("a", ebm.EnergyBased(lambda x: x**2, dist.Normal(0, 1), inverse_temperature=beta), obs=x)
        numpyro.sample("b", ebm.EnergyBased(lambda x: x**2, dist.Normal(0, scale)), obs=x)
        numpyro.sample("c", dist.Normal(unused, 1), obs=x)

    assert ebm.check_model(latent_everywhere, 0.5) == {"a": {"beta"}, "b": {"scale"}}


@pytest.mark.parametrize(("given", "expected"), [("same", {}), ("number", {"x": {"theta"}})])
def test_check_model_knows_a_given_log_z(given, expected):
    def model(x):
        theta = numpyro.sample("theta", dist.Gamma(1, 1))
        log_z = {"same": lambda: -jnp.log1p(2 * theta) / 2, "number": 0.3}[given]
        numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2, dist.Normal(0, 1), log_normalizer=log_z), obs=x)

    assert ebm.check_model(model, 0.5) == expected


def test_check_model_of_a_latent_site():
    def model():
        x = numpyro.sample("x", ebm.EnergyBased(lambda x: x[0] ** 2, ebm.SphereUniform(3)))
        numpyro.sample("y", dist.Normal(x, 1).to_event(1), obs=jnp.ones(3))

    assert ebm.check_model(model) == {}


def test_check_model_looks_below_transforms_into_mixtures_and_past_gibbs():
    def transformed(x):
        theta = numpyro.sample("theta", dist.Gamma(1, 1))
        d = ebm.EnergyBased(lambda x: theta * x**2, dist.Normal(0, 1))
        numpyro.sample("x", dist.TransformedDistribution(d, dist.transforms.ExpTransform()), obs=x)

    def mixed(x):
        weight = numpyro.sample("weight", dist.Beta(1, 1))
        parts = [ebm.EnergyBased(lambda x: 5 + 0 * x, dist.Normal(0, 1)), dist.Normal(0, 1)]
        weights = dist.Categorical(jnp.stack([weight, 1 - weight]))
        numpyro.sample("x", dist.MixtureGeneral(weights, parts, support=dist.constraints.real), obs=x)

    assert ebm.check_model(transformed, 0.5) == {"x": {"theta"}}
    assert ebm.check_model(mixed, 0.5) == {"x": {"weight"}}
    with pytest.raises(ebm.IntractableNormalizerError, match="component of a mixture"):
        MCMC(NUTS(mixed), num_warmup=2, num_samples=2, progress_bar=False).run(random.key(0), 0.5)

    def switched():
        z = numpyro.sample("z", dist.Bernoulli(0.5))
        numpyro.sample("y", ebm.EnergyBased(lambda y: 4 * z * y**2, dist.Normal(0, 1)))

    kernel = Gibbs([(ebm.MALA(switched), ["y"]), (DiscreteGibbs(switched), ["z"])])
    with pytest.raises(ebm.IntractableNormalizerError, match=r"site 'y'.*\['z'\]"):
        MCMC(kernel, num_warmup=2, num_samples=2, progress_bar=False).run(random.key(0))


@pytest.mark.parametrize("key", range(3))
def test_data_are_checked_as_a_whole_under_subsampling(key):
    def model(x):
        theta = numpyro.param("theta", 1.0)
        with numpyro.plate("data", 40, subsample_size=4):
            d = ebm.EnergyBased(lambda x: theta * x**2, dist.Normal(0, 1))
            numpyro.sample("x", d, obs=numpyro.subsample(x, event_dim=0))

    x = X.at[37].set(jnp.nan)
    with pytest.raises(ValueError, match="nan at row 37"):
        make(fn=ebm.estimate(model, CD)).init(random.key(key), x)
    with pytest.raises(ValueError, match="nan at row 37"):
        ebm.DualSGDA(model, step_size=0.1, num_chains=5).run(random.key(key), 3, x, progress_bar=False)


@pytest.mark.parametrize("way", ["estimate", "dual"])
def test_missing_rows_may_hold_anything_under_a_mask(way):
    x = X.at[:3].set(jnp.nan)

    def model(x):
        theta = numpyro.param("theta", 1.0)
        with numpyro.plate("data", 40), numpyro.handlers.mask(mask=~jnp.isnan(x)):
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2, dist.Normal(0, 1)), obs=x)

    if way == "dual":
        result = ebm.DualSGDA(model, step_size=0.1, num_chains=50, restart_prob=0.5).run(
            random.key(0), 20, x, progress_bar=False
        )
    else:
        result = make(fn=ebm.estimate(model, CD)).run(random.key(0), 20, x, progress_bar=False)
    assert jnp.isfinite(result.params["theta"])


def test_missing_rows_outside_of_a_mask_are_refused():
    def model(x):
        theta = numpyro.param("theta", 1.0)
        with numpyro.plate("data", 40), numpyro.handlers.mask(mask=jnp.arange(40) != 3):
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2, dist.Normal(0, 1)), obs=x)

    with pytest.raises(ValueError, match="nan at row 7"):
        make(fn=ebm.estimate(model, CD)).init(random.key(0), X.at[jnp.array([3, 7])].set(jnp.nan))


def learned_bound(x):
    high = numpyro.param("high", 5.0)
    with numpyro.plate("data", 40):
        numpyro.sample("x", ebm.EnergyBased(lambda x: -x, dist.Uniform(-5.0, high)), obs=x)


def test_learned_bounds_of_a_support_are_refused():
    """The gradient of log Z has a boundary term that chains lack."""
    with pytest.raises(ebm.IntractableNormalizerError, match=r"site 'x'.*bounds of its support"):
        make(fn=ebm.estimate(learned_bound, CD)).run(random.key(0), 2, X, progress_bar=False)
    with pytest.raises(ebm.IntractableNormalizerError, match="bounds of its support"):
        ebm.DualSGDA(learned_bound, step_size=0.1, num_chains=5).run(random.key(0), 2, X, progress_bar=False)


def test_what_the_surrogate_can_not_serve_is_refused():
    def latent(x):
        theta = numpyro.sample("theta", dist.Gamma(2, 1))
        with numpyro.plate("data", 40):
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2, dist.Normal(0, 1)), obs=x)

    estimated = ebm.estimate(latent, CD)
    svi = SVI(estimated, AutoLaplaceApproximation(estimated), optax.adam(0.1), Trace_ELBO())
    with pytest.raises(ValueError, match="second derivatives"):
        svi.init(random.key(0), X)

    def scanned(x):
        scale = numpyro.param("scale", 1.0)

        def step(carry, x):
            numpyro.sample("x", ebm.EnergyBased(lambda x: x**2, dist.Normal(0, scale)), obs=x)
            return carry, None

        scan(step, None, x)

    with pytest.raises(NotImplementedError, match="inside of scan or cond"):
        make(fn=ebm.estimate(scanned, CD)).init(random.key(0), X)
    with pytest.raises(ValueError, match="no site with an EnergyBased"):
        make(fn=ebm.estimate(lambda x: None, CD)).init(random.key(0), X)


def test_scan_stacks_what_it_may_and_refuses_the_rest():
    base = dist.Normal(0, 1).expand([3]).to_event(1)
    rows = random.normal(random.key(0), (3, 3))

    def model(through):
        def step(carry, row):
            energy = {
                "temperature": lambda x: jnp.sum(2 * x**2),
                "closure": lambda x: jnp.sum(carry * x**2),
            }[through]
            beta = carry if through == "temperature" else 1.0
            numpyro.sample("x", ebm.EnergyBased(energy, base, beta), obs=row)
            return carry + 1.0, None

        scan(step, 1.0, rows)

    density, _ = numpyro.infer.util.log_density(model, ("temperature",), {}, {})
    expected = sum(base.log_prob(row) - (1 + i) * jnp.sum(2 * row**2) for i, row in enumerate(rows))
    np.testing.assert_allclose(density, expected, rtol=1e-5)
    with pytest.raises(NotImplementedError, match=r"stacked by jax\.vmap or scan"):
        numpyro.infer.util.log_density(model, ("closure",), {}, {})


def test_data_that_do_not_fit_their_plates_are_refused():
    def model(x):
        theta = numpyro.param("theta", 1.0)
        with numpyro.plate("rows", 4, dim=-2), numpyro.plate("columns", 10, dim=-1):
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2, dist.Normal(0, 1)), obs=x)

    with pytest.raises(ValueError, match=r"shape \(10, 4\) do not fit .*\(4, 10\)"):
        make(fn=ebm.estimate(model, CD)).init(random.key(0), X.reshape(10, 4))


def test_broadcasting_that_pairs_each_with_each_is_refused():
    def paired(x, loc):
        width = numpyro.param("width", 1.0)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(lambda x: width * (x - loc) ** 2, dist.Normal(0, 1)), obs=x)

    make(fn=ebm.estimate(paired, CD)).init(random.key(0), X, X)
    with pytest.raises(ValueError, match="would pair each with each, 1600 terms"):
        make(fn=ebm.estimate(paired, CD)).init(random.key(0), X, X[:, None])


def test_a_mask_outside_of_estimate_is_refused():
    mask = X > 0
    make(fn=ebm.estimate(handlers.mask(model, mask=mask), CD)).init(random.key(0), X)
    with pytest.raises(ValueError, match="a mask stands outside of estimate"):
        make(fn=handlers.mask(ebm.estimate(model, CD), mask=mask)).init(random.key(0), X)


def test_fitted_distribution():
    d = ebm.fitted_distribution(model, {"theta": 0.7}, X)
    assert d.batch_shape == ()
    np.testing.assert_allclose(d.energy(jnp.array(1.5)), 0.35, rtol=1e-6)
    with pytest.raises(ValueError, match=r"depends on 'theta' \(parameter\)"):
        ebm.fitted_distribution(model, {}, X)
    with pytest.raises(ValueError, match=r"energy-based sites \['x'\], got 'y'"):
        ebm.fitted_distribution(model, {"theta": 0.7}, X, site="y")
