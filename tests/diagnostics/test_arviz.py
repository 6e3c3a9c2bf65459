"""Results as ArviZ takes them, whichever of its generations is installed."""

import arviz as az
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, SVI, Gibbs, Trace_ELBO

import numpyro_ebm as ebm
from tests.infer.test_exchange import exponential, interval_data
from tests.statistics import BOUND

X = ebm.SphereUniform(3).sample(random.key(0), (100,))


def shallow(x):
    energy = ebm.f1_energy("energy", dim=3, num_neurons=16, radius=5.0)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=x)


def exchange(num_samples=500, num_chains=4):
    mcmc = MCMC(
        ebm.Exchange(exponential),
        num_warmup=300,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), interval_data(20))
    return mcmc


def exact_log_z(theta):
    return np.log(-np.expm1(-theta) / theta)


def leave_one_out(x):
    """Exact log predictive density of each observation, given all others."""
    theta = np.linspace(1e-3, 60, 100_001)
    pointwise = -np.outer(np.asarray(x, np.float64), theta) - exact_log_z(theta)
    log_posterior = np.log(theta) - 0.5 * theta + pointwise.sum(0) - pointwise
    weights = np.exp(log_posterior - log_posterior.max(1, keepdims=True))
    return np.log(np.sum(weights * np.exp(pointwise), 1) / weights.sum(1))


@pytest.mark.slow
@pytest.mark.parametrize("method", ["smc", "quadrature"])  # 25 s each
def test_loo_of_an_exchange_posterior_is_that_of_refits(method):
    idata = ebm.to_arviz(exchange(2_000), rng_key=random.key(1), options={"method": method})
    stats, theta = idata["sample_stats"], np.asarray(idata["posterior"]["theta"], np.float64)
    error = np.asarray(stats["log_normalizer"]) - exact_log_z(theta)
    assert np.all(np.abs(error) < BOUND * np.asarray(stats["log_normalizer_stderr"]) + 1e-5)
    loo = az.loo(idata, pointwise=True)
    pointwise = np.asarray(loo.loo_i if hasattr(loo, "loo_i") else loo.elpd_i)
    good = np.asarray(loo.pareto_k) < 0.7
    assert good.mean() > 0.9
    assert np.all(np.abs(pointwise - leave_one_out(interval_data(20)))[good] < 0.1)


@pytest.mark.slow
def test_an_exchange_posterior_needs_a_key_for_its_likelihood():  # 6 s
    mcmc = exchange(20)
    with pytest.raises(ValueError, match="give rng_key"):
        ebm.to_arviz(mcmc)
    idata = ebm.to_arviz(mcmc, log_likelihood=False)
    assert idata["posterior"]["theta"].shape == (4, 20)
    assert {"acceptance_rate", "lp", "diverging", "auxiliary_accept_prob"} <= set(idata["sample_stats"].data_vars)
    assert idata["observed_data"]["x"].shape == (20,)
    assert az.summary(idata).shape[0] == 1


@pytest.mark.slow  # 15 s each
@pytest.mark.parametrize("trainer", ["dual", "svi"])
def test_results_of_training(trainer):
    if trainer == "dual":
        result = ebm.DualSGDA(shallow, step_size=1e-2, num_chains=64).run(random.key(1), 20, X, progress_bar=False)
    else:
        pool = ebm.ChainPool(pool_size=64)
        svi = SVI(
            ebm.estimate(shallow, ebm.ContrastiveDivergence(pool)), lambda x: None, optax.adam(1e-3), Trace_ELBO()
        )
        result = svi.run(random.key(1), 20, X, progress_bar=False)
    idata = ebm.to_arviz(
        result, shallow, X, rng_key=random.key(2), num_samples=200, dims={"x": ["axis"]}, coords={"axis": list("abc")}
    )
    posterior = idata["posterior"]["x"]
    assert posterior.dims == ("chain", "draw", "axis")
    assert posterior.shape == (8, 200, 3)
    assert list(posterior["axis"].values) == list("abc")
    np.testing.assert_allclose(np.linalg.norm(posterior, axis=-1), 1, atol=1e-5)
    assert {"acceptance_rate", "lp", "step_size", "diverging"} <= set(idata["sample_stats"].data_vars)
    assert idata["observed_data"]["x"].dims[-1] == "axis"
    np.testing.assert_allclose(idata["observed_data"]["x"], X, atol=1e-6)
    fitted = ebm.fitted_distribution(shallow, result.params, X)
    exact = ebm.log_likelihood(fitted, X, random.key(0), method="quadrature").value
    np.testing.assert_allclose(np.asarray(idata["log_likelihood"]["x"])[0, 0], exact, atol=0.1)
    assert float(az.rhat(idata)["x"].max()) < 1.1
    assert az.summary(idata).shape[0] == 3


def test_a_pool_and_what_it_needs():
    d = ebm.EnergyBased(lambda x: x**2, dist.Uniform(0, 3))
    state = ebm.ChainPool(pool_size=8).start(random.key(0), d)
    idata = ebm.to_arviz(state, d, rng_key=random.key(1), num_samples=30)
    assert idata["posterior"]["x"].shape == (8, 30)
    assert float(idata["posterior"]["x"].min()) > 0
    for arguments, error, message in (
        ((state,), TypeError, "needs its fitted distribution"),
        ((state, d), ValueError, "rng_key is needed"),
        (([1.0],), TypeError, "source must be"),
    ):
        with pytest.raises(error, match=message):
            ebm.to_arviz(*arguments)
    with pytest.raises(ValueError, match="at most the pool's 8"):
        ebm.to_arviz(state, d, rng_key=random.key(0), num_chains=9)


@pytest.mark.slow
def test_nuts_with_a_fitted_prior_keeps_its_likelihood():  # 5 s
    def noisy(y):
        x = numpyro.sample("x", ebm.EnergyBased(lambda x: x**2, dist.Normal(0, 1)))
        numpyro.sample("y", dist.Normal(x, 1), obs=y)

    mcmc = MCMC(NUTS(noisy), num_warmup=50, num_samples=50, num_chains=2, chain_method="sequential", progress_bar=False)
    mcmc.run(random.key(0), jnp.array(1.0))
    idata = ebm.to_arviz(mcmc)
    expected = dist.Normal(mcmc.get_samples(group_by_chain=True)["x"], 1).log_prob(1.0)
    np.testing.assert_allclose(np.squeeze(idata["log_likelihood"]["y"]), expected, rtol=1e-5)


@pytest.mark.slow
def test_masked_rows_are_left_out_of_the_likelihood():  # 5 s
    x = interval_data(20).at[::4].set(jnp.nan)

    def masked(x):
        theta = numpyro.sample("theta", dist.Gamma(2, 0.5))
        with numpyro.plate("data", x.shape[0]), handlers.mask(mask=jnp.isfinite(x)):
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x, dist.Uniform(0, 1)), obs=x)

    mcmc = MCMC(
        ebm.Exchange(masked),
        num_warmup=50,
        num_samples=100,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), x)
    idata = ebm.to_arviz(mcmc, rng_key=random.key(1), options={"method": "quadrature"})
    assert idata["log_likelihood"]["x"].shape == (2, 100, 15)
    loo = az.loo(idata)
    assert np.isfinite(loo.elpd_loo if hasattr(loo, "elpd_loo") else loo.elpd)


@pytest.mark.slow
def test_a_known_normaliser_needs_no_key():  # 5 s
    def known(x):
        theta = numpyro.sample("theta", dist.Gamma(1, 1))
        log_z = 0.5 * jnp.log(2 * jnp.pi / theta)
        flat = dist.ImproperUniform(dist.constraints.real, (), ())
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2 / 2, flat, log_normalizer=log_z), obs=x)

    x = random.normal(random.key(0), (10,))
    mcmc = MCMC(NUTS(known), num_warmup=50, num_samples=50, num_chains=2, chain_method="sequential", progress_bar=False)
    mcmc.run(random.key(0), x)
    theta = mcmc.get_samples(group_by_chain=True)["theta"][..., None]
    expected = dist.Normal(0, theta**-0.5).log_prob(x)
    np.testing.assert_allclose(ebm.to_arviz(mcmc)["log_likelihood"]["x"], expected, rtol=1e-4)


@pytest.mark.slow
def test_energies_below_a_transform_are_left_out():  # 5 s
    def shifted(x):
        location = numpyro.sample("location", dist.Normal(0, 1))
        noise = ebm.EnergyBased(lambda e: e**2, dist.Normal(0, 1))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample(
                "x", dist.TransformedDistribution(noise, dist.transforms.AffineTransform(location, 1.0)), obs=x
            )

    mcmc = MCMC(
        ebm.MALA(shifted), num_warmup=20, num_samples=20, num_chains=2, chain_method="sequential", progress_bar=False
    )
    mcmc.run(random.key(0), interval_data(10))
    with pytest.warns(UserWarning, match="left out"):
        idata = ebm.to_arviz(mcmc, rng_key=random.key(1))
    assert "log_likelihood" not in (idata.groups() if callable(idata.groups) else [g.strip("/") for g in idata.groups])


@pytest.mark.slow  # 25 s
def test_statistics_of_gibbs_blocks():
    def both(x, y):
        theta = numpyro.sample("theta", dist.Gamma(2, 0.5))
        location = numpyro.sample("location", dist.Normal(0, 10))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x, dist.Uniform(0, 1)), obs=x)
            numpyro.sample("y", dist.Normal(location, 1), obs=y)

    kernel = Gibbs([(ebm.Exchange(both), ["theta"]), (NUTS(both), ["location"])])
    mcmc = MCMC(kernel, num_warmup=20, num_samples=30, num_chains=2, chain_method="sequential", progress_bar=False)
    data = interval_data(15), interval_data(15)
    mcmc.run(random.key(0), *data, extra_fields=ebm.block_fields(kernel))
    idata = ebm.to_arviz(mcmc, rng_key=random.key(1), options={"method": "quadrature"})
    names = {
        "acceptance_rate_theta",
        "acceptance_rate_location",
        "n_steps_location",
        "auxiliary_accept_prob_theta",
        "lp",
        "diverging",
    }
    assert names <= set(idata["sample_stats"].data_vars)
    assert idata["log_likelihood"]["x"].shape == idata["log_likelihood"]["y"].shape == (2, 30, 15)
    mcmc.run(random.key(0), *data)
    with pytest.warns(UserWarning, match="block_fields"):
        ebm.to_arviz(mcmc, log_likelihood=False)


@pytest.mark.slow
def test_unreliable_normalisers_are_said():  # 8 s
    mcmc = exchange(20)
    with pytest.warns(UserWarning, match="not reliable"):
        ebm.to_arviz(mcmc, rng_key=random.key(0), options={"method": "importance", "num_draws": 80})
