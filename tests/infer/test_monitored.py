"""A watched run: what is seen, what happens then, and what is kept."""

import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI, Trace_ELBO
from sklearn.datasets import make_moons

import numpyro_ebm as ebm

X = 1 + random.normal(random.key(0), (100,))


def tilted(x, poison=0.0):
    loc = numpyro.param("loc", 0.0)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(lambda x: -loc * x, dist.Normal(0, 1)), obs=x)
    numpyro.factor("poison", poison * loc)


def make(model=tilted, pool=None, learning_rate=1e-2, **kwargs):
    pool = ebm.ChainPool(pool_size=50) if pool is None else pool
    estimated = ebm.estimate(model, ebm.ContrastiveDivergence(pool))
    return ebm.MonitoredSVI(estimated, lambda *args: None, optax.adam(learning_rate), Trace_ELBO(), **kwargs)


def counted(site_fault_at):
    """A model that goes wrong at one update: `site_fault_at(number of the update)` is added to its energies."""

    def model(x):
        loc = numpyro.param("loc", 0.0)
        count = numpyro.primitives.mutable("count", {"n": jnp.zeros((), jnp.int32)})
        count["n"] = count["n"] + 1
        fault = site_fault_at(count["n"] - 1)  # SVI.init runs the model too
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(lambda x: fault - loc * x, dist.Normal(0, 1)), obs=x)

    return model


@pytest.mark.slow
def test_a_healthy_run_is_that_of_svi():  # 12 s
    svi = make()
    result = svi.run(random.key(1), 150, X, progress_bar=False)
    plain = SVI(svi.model, svi.guide, svi.optim, Trace_ELBO()).run(random.key(1), 150, X, progress_bar=False)
    np.testing.assert_allclose(result.losses, plain.losses, rtol=1e-5)
    np.testing.assert_allclose(result.params["loc"], plain.params["loc"], rtol=1e-5)


def joint_classifier(x, y):
    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(nn.swish(nn.Dense(64)(x)))

    base = dist.Normal(0, 2).expand([2]).to_event(1)
    joint = ebm.JointEnergy(flax_module("logits", Network(), input_shape=(2,)), base)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", joint.marginal(), obs=x)
        numpyro.sample("y", joint.classifier(x), obs=y)


def moons(num, seed):
    x, y = make_moons(num, noise=0.1, random_state=seed)
    return jnp.asarray(x, jnp.float32), jnp.asarray(y)


def classifier_of(step_size, **kwargs):
    kernel = ebm.kernels.mala() if step_size is None else ebm.kernels.ula(step_size)
    return make(joint_classifier, ebm.ChainPool(kernel, 128, num_steps=5), **kwargs)


@pytest.mark.slow
@pytest.mark.case("A7")
def test_langevin_steps_of_a_joint_classifier_that_are_far_too_large():  # 15 s
    with pytest.raises(ebm.DivergenceError, match=r"update \d+ went wrong, site 'x': an energy of size") as caught:
        classifier_of(1000 * 0.05).run(random.key(0), 500, *moons(200, 0), progress_bar=False)
    error = caught.value
    assert error.site == "x"
    assert error.report["x"].diverged
    assert error.result.losses.shape == (error.step - 1,)
    assert not ebm.chain_report(error.result.state)["x"].diverged
    assert all(
        jnp.isfinite(leaf).all()
        for leaf in jax.tree.leaves((error.result.params, error.result.state.mutable_state["x$chains"]["state"]))
    )
    again = pickle.loads(pickle.dumps(ebm.DivergenceError("m", 3, None, "x", error.report)))
    assert (again.step, again.site, again.report) == (3, "x", error.report)


def test_an_exploding_energy_is_found_at_its_update():
    svi = make(counted(lambda n: jnp.where(n == 137, 2e4, 0.0)))
    with pytest.raises(
        ebm.DivergenceError,
        match=r"update 137 went wrong, site 'x': an energy of size 2e\+04 \(limit 10000\); 50 chains",
    ) as caught:
        svi.run(random.key(0), 300, X, progress_bar=False)
    assert caught.value.result.losses.shape == (136,)
    assert jnp.isfinite(caught.value.result.losses).all()
    again = make(counted(lambda n: jnp.where(n == 137, 2e4, 0.0))).run(random.key(0), 136, X, progress_bar=False)
    np.testing.assert_array_equal(caught.value.result.params["loc"], again.params["loc"])


@pytest.mark.slow
def test_limits_are_the_users():  # 5 s
    model = counted(lambda n: jnp.where(n == 7, 2e4, 0.0))
    losses = make(model, monitor=ebm.Monitor(max_energy=1e5)).run(random.key(0), 20, X, progress_bar=False).losses
    assert losses.shape == (20,)
    with pytest.raises(ebm.DivergenceError, match=r"chains' energies are .* over the data's \(limit 0.001\)"):
        make(monitor=ebm.Monitor(max_gap=1e-3)).run(random.key(0), 20, X, progress_bar=False)


def test_a_run_can_stop_at_the_last_good_state():
    svi = make(counted(lambda n: jnp.where(n == 7, jnp.nan, 0.0)), monitor=ebm.Monitor(policy="stop"))
    with pytest.warns(UserWarning, match="training stopped: update 7 went wrong"):
        result = svi.run(random.key(0), 20, X, progress_bar=False)
    assert result.losses.shape == (6,)
    assert jnp.isfinite(result.losses).all()
    assert jnp.isfinite(result.params["loc"])


def runs_away(x):
    """Fixed chains of an energy that falls without bound, until they start anew at the base."""
    loc = numpyro.param("loc", 0.0)
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(lambda x: -loc * x - x**2, dist.Normal(0, 1)), obs=x)


@pytest.mark.slow
def test_a_run_can_heal_and_gives_up_after_so_often():  # 6 s
    pool = ebm.ChainPool(ebm.kernels.ula(0.1), pool_size=50)
    monitor = ebm.Monitor(policy="heal", max_heals=3)
    svi = make(runs_away, pool, monitor=monitor)
    with pytest.warns(UserWarning, match="all chains start anew") as warned:
        result = svi.run(random.key(0), 120, X, progress_bar=False)
    assert 1 <= len(warned) <= 3
    assert result.losses.shape == (120,)
    assert jnp.isfinite(result.losses).all()
    report = ebm.chain_report(result.state)["x"]
    assert not report.diverged
    with pytest.warns(UserWarning, match="of at most 3 times") as warned, pytest.raises(ebm.DivergenceError):
        svi.run(random.key(0), 1_000, X, progress_bar=False)
    assert len(warned) == 3


@pytest.mark.slow
def test_a_run_whose_updates_are_all_skipped_stops():  # 5 s
    losses = make().run(random.key(0), 50, X, jnp.zeros(()), progress_bar=False, stable_update=True).losses
    assert jnp.isfinite(losses).all()
    with pytest.raises(ebm.DivergenceError, match="skipped"):
        make().run(random.key(0), 500, X, jnp.nan, progress_bar=False, stable_update=True)


def test_faulty_arguments():
    for arguments, name in [
        ({"max_energy": 0.0}, "max_energy"),
        ({"max_gap": -1.0}, "max_gap"),
        ({"policy": "ignore"}, "policy"),
        ({"max_heals": 0}, "max_heals"),
    ]:
        with pytest.raises(ValueError, match=name):
            ebm.Monitor(**arguments)
    with pytest.raises(TypeError, match="monitor must be a Monitor"):
        make(monitor="raise")


@pytest.mark.slow
def test_a_run_that_was_cut_off_goes_on(tmp_path):  # 8 s
    svi = make()
    whole = svi.run(random.key(1), 150, X, progress_bar=False)
    svi.run(random.key(1), 80, X, progress_bar=False, checkpoint=tmp_path, checkpoint_every=30)
    with pytest.warns(UserWarning, match="goes on after update 80 of 150"):
        rest = make().run(random.key(2), 150, X, progress_bar=False, checkpoint=tmp_path)
    np.testing.assert_array_equal(rest.params["loc"], whole.params["loc"])
    np.testing.assert_array_equal(rest.losses, whole.losses[80:])
    with pytest.raises(ValueError, match="150 updates from where this run starts"):
        svi.run(random.key(1), 100, X, progress_bar=False, checkpoint=tmp_path)
    with pytest.warns(UserWarning, match="after update 150 of 150"):
        again = svi.run(random.key(1), 150, X, progress_bar=False, checkpoint=tmp_path)
    assert again.losses.shape == (0,)


@pytest.mark.slow
def test_a_checkpoint_is_kept_where_a_run_goes_wrong(tmp_path):  # 5 s
    svi = make(counted(lambda n: jnp.where(n == 137, 2e4, 0.0)))
    with pytest.raises(ebm.DivergenceError):
        svi.run(random.key(0), 300, X, progress_bar=False, checkpoint=tmp_path, checkpoint_every=50)
    assert ebm.checkpoint.restore(tmp_path, like=svi.init(random.key(0), X)).optim_state[0] == 100


def test_a_checkpoint_of_something_else_is_refused_before_the_work(tmp_path):
    svi = make()
    svi.run(random.key(1), 1, X, progress_bar=False, checkpoint=tmp_path / "one")
    with pytest.raises(ValueError, match=r"expected float32\[40\], found float32\[50\]"):
        make(pool=ebm.ChainPool(pool_size=40)).run(random.key(1), 9, X, progress_bar=False, checkpoint=tmp_path / "one")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(FileExistsError, match="thesis"):
        svi.run(random.key(1), 9, X, progress_bar=False, checkpoint=tmp_path / "mine")
