"""What is recorded while a model is trained."""

import functools

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI, Trace_ELBO

import numpyro_ebm as ebm
from numpyro_ebm import plots
from numpyro_ebm.handlers.history import empty_history, record
from tests.statistics import BOUND

X = random.normal(random.key(0), (30, 2))


def two_sites(x):
    theta = numpyro.param("theta", jnp.ones(2))
    energy = ebm.f1_energy("energy", dim=2, num_neurons=8, radius=3.0)
    with numpyro.plate("data", x.shape[0]):
        base = dist.Normal(0, 1).expand([2]).to_event(1)
        numpyro.sample("shallow", ebm.EnergyBased(energy, base), obs=x)
        numpyro.sample("plain", ebm.EnergyBased(lambda x: jnp.sum(theta * x**2), base), obs=x)


@functools.cache
def trained(num_steps, **pool):
    estimators = {
        "shallow": ebm.ContrastiveDivergence(ebm.ChainPool(pool_size=20, num_steps=2)),
        "plain": ebm.ContrastiveDivergence(ebm.ChainPool(pool_size=12, num_steps=3, **pool)),
    }
    svi = SVI(ebm.estimate(two_sites, estimators), lambda x: None, optax.adam(1e-2), Trace_ELBO())
    return svi.run(random.key(1), num_steps, X, progress_bar=False)


@pytest.mark.slow
def test_every_update_is_recorded():  # 15 s
    result = trained(40, restart_prob=0.5)
    data = ebm.training_diagnostics(result)
    assert data.sizes["update"] == 40
    assert set(data["site"].values) == {"shallow", "plain"}
    report = ebm.chain_report(result.state)
    for site in ("shallow", "plain"):
        last = data.sel(site=site, update=39)
        for name in ("energy_gap", "acceptance_rate", "step_size", "max_energy", "num_nonfinite"):
            assert float(last[name]) == pytest.approx(getattr(report[site], name), rel=1e-6)
    fitted = ebm.fitted_distribution(two_sites, result.params, X, site="shallow")
    assert float(data["norm"].sel(site="shallow", update=39)) == pytest.approx(float(fitted.energy.norm), rel=2e-2)
    assert np.isnan(data["norm"].sel(site="plain")).all()
    np.testing.assert_array_equal(data["loss"], result.losses)
    assert len(plots.plot_training(data)) == 4
    plt.close("all")
    np.testing.assert_array_equal(ebm.training_diagnostics(result.state)["energy_gap"], data["energy_gap"])


def test_age_and_origin_of_chains():
    data = ebm.training_diagnostics(trained(40, restart_prob=0.5))
    shallow, plain = (data.sel(site=site) for site in ("shallow", "plain"))
    np.testing.assert_array_equal(shallow["age"], 80)
    assert np.all(shallow["num_restarts"] == 0)
    assert np.all(shallow["origin"] == 0)
    age, restarts, origin = (plain[name].values[:12] for name in ("age", "num_restarts", "origin"))
    assert np.isnan(plain["age"].values[12:]).all()
    assert set(age % 3) == {0.0}
    assert age.mean() < 20
    assert abs(restarts.mean() - 20) < BOUND * np.sqrt(40 / 4 / 12)
    assert set(origin) == {1.0}
    assert data["origin"].attrs["flag_meanings"] == "start observation init repair"


def test_history_keeps_every_second_fourth_and_so_on():
    state = ebm.ChainPool(pool_size=2).start(random.key(0), ebm.EnergyBased(lambda x: x**2, dist.Normal(0, 1)))
    d = ebm.EnergyBased(lambda x: x**2, dist.Normal(0, 1))

    def body(history, i):
        return record(history, state._replace(energy_gap=i.astype(jnp.float32)), d), None

    for num, stride in ((512, 1), (513, 2), (1024, 2), (1025, 4), (5000, 16)):
        history, _ = jax.lax.scan(body, empty_history(), jnp.arange(num))
        assert (int(history.num_updates), int(history.stride)) == (num, stride)
        kept = np.arange(0, num, stride)
        np.testing.assert_array_equal(history.rows[: len(kept), 0], kept)


def test_what_has_no_chains_is_refused():
    with pytest.raises(ValueError, match="has no chains"):
        ebm.training_diagnostics(None)
    runs = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), trained(40, restart_prob=0.5).state)
    with pytest.raises(ValueError, match="several runs"):
        ebm.training_diagnostics(runs)
