"""Beside what users of NumPyro, ArviZ and JAX have already: guides, plots, profiles."""

import arviz as az
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import MCMC, SVI, Trace_ELBO, autoguide

import numpyro_ebm as ebm


def posterior_of_a_place():
    """A fitted energy, here that of N(0, 1/2), as a prior; y = 1 observed with variance 1/2 has a posterior N(1/2, 1/4)."""
    x = numpyro.sample("x", ebm.EnergyBased(lambda x: jnp.sum(x**2) / 2, dist.Normal(0, 1).expand([2]).to_event(1)))
    numpyro.sample("y", dist.Normal(x, np.sqrt(0.5)).to_event(1), obs=jnp.ones(2))


GUIDES = {
    "AutoNormal": {},
    "AutoDiagonalNormal": {},
    "AutoMultivariateNormal": {},
    "AutoLowRankMultivariateNormal": {"rank": 1},
    "AutoLaplaceApproximation": {},
    "AutoDelta": {},
    "AutoIAFNormal": {"hidden_dims": [4]},
    "AutoBNAFNormal": {"hidden_factors": [2]},
    "AutoDAIS": {"K": 2},
}


@pytest.mark.parametrize("name", GUIDES)
def test_every_autoguide_takes_an_energy_as_a_prior(name):
    start = numpyro.infer.init_to_value(values={"x": 0.3 * jnp.ones(2)})
    guide = getattr(autoguide, name)(posterior_of_a_place, init_loc_fn=start, **GUIDES[name])
    svi = SVI(posterior_of_a_place, guide, optax.adam(optax.exponential_decay(3e-2, 100, 0.5)), Trace_ELBO(10))
    result = svi.run(random.key(0), 600, progress_bar=False)
    draws = guide.sample_posterior(random.key(1), result.params, sample_shape=(1_000,))["x"]
    # a fit, not draws of the posterior: what Adam leaves of the way and the flows' own family
    np.testing.assert_allclose(draws.mean(0), 0.5, atol=0.1)
    np.testing.assert_allclose(draws.std(0), 0.0 if name == "AutoDelta" else 0.5, atol=0.12)


@pytest.fixture(scope="module")
def chains():
    def model(x):
        theta = numpyro.sample("theta", dist.Gamma(2, 1))
        numpyro.sample("other", dist.Normal(theta, 1))
        with numpyro.plate("data", x.shape[0]):
            log_z = lambda: -0.5 * jnp.log1p(theta)  # noqa: E731
            energy = ebm.EnergyBased(lambda x: theta * x**2 / 2, dist.Normal(0, 1), log_normalizer=log_z)
            numpyro.sample("x", energy, obs=x)

    mcmc = MCMC(ebm.MALA(model), num_warmup=100, num_samples=100, num_chains=4, chain_method="vectorized", progress_bar=False)  # fmt: skip
    mcmc.run(random.key(0), random.normal(random.key(1), (50,)))
    return ebm.to_arviz(mcmc)


# of ArviZ 0.x and 1.x alike
@pytest.mark.parametrize("name", ["trace", "rank", "forest", "autocorr", "ess", "mcse", "pair", "khat"])
@pytest.mark.filterwarnings("ignore")  # theirs
def test_arviz_plots(chains, name):
    getattr(az, f"plot_{name}")(az.loo(chains, pointwise=True) if name == "khat" else chains)
    assert plt.get_fignums()
    plt.close("all")


def test_profiles_show_an_update(tmp_path):
    def model(x):
        loc = numpyro.param("loc", 0.0)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(lambda x: -loc * x, dist.Normal(0, 1)), obs=x)

    dual = ebm.DualSGDA(model, step_size=1e-2, num_chains=10)
    alone = dual.run(random.key(0), 5, jnp.ones(4), progress_bar=False)
    with jax.profiler.trace(str(tmp_path)):
        profiled = dual.run(random.key(0), 5, jnp.ones(4), progress_bar=False)
    assert list(tmp_path.rglob("*.xplane.pb"))
    np.testing.assert_array_equal(alone.losses, profiled.losses)
