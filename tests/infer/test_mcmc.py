"""ULA and MALA in NumPyro's MCMC and Gibbs, and in ArviZ."""

import pickle
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC, NUTS, DiscreteGibbs, Gibbs, init_to_value
from numpyro.infer.util import log_density

import numpyro_ebm as ebm
from tests.kernels.test_kernels import mean_resultant
from tests.statistics import BOUND, assert_mean

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.x announces its successor
    import arviz as az

VMF = ebm.EnergyBased(lambda x: -2 * x[2], ebm.SphereUniform(3))


def real():
    numpyro.sample("x", dist.Normal(1, 2))


def interval():
    numpyro.sample("x", dist.Beta(2, 5))


def on_sphere():
    numpyro.sample("x", VMF)


def run(kernel, *args, num_warmup=300, num_samples=500, num_chains=4, chain_method="vectorized", key=0, **kwargs):
    options = {name: kwargs.pop(name) for name in ("thinning", "jit_model_args") if name in kwargs}
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method=chain_method,
        progress_bar=False,
        **options,
    )
    mcmc.run(random.key(key), *args, **kwargs)
    return mcmc


@pytest.mark.parametrize(
    ("chain_method", "model", "dims"),
    [
        pytest.param(
            method,
            model,
            dims,
            id=f"{method}-{model.__name__}",
            marks=[] if model is real and method != "sequential" else pytest.mark.slow,  # 8 s each
        )
        for method in ("sequential", "vectorized", "parallel")
        for model, dims in ((real, 2), (interval, 2), (on_sphere, 3))
    ],
)
@pytest.mark.parametrize("kernel", [ebm.MALA, ebm.ULA])
def test_arviz_finds_posterior_and_statistics(kernel, chain_method, model, dims):
    mcmc = run(kernel(model), num_warmup=20, num_samples=40, num_chains=2, chain_method=chain_method)
    data = az.from_numpyro(mcmc)
    posterior, stats = data["posterior"], data["sample_stats"]
    assert posterior["x"].dims[:2] == ("chain", "draw")
    assert posterior["x"].ndim == dims
    for name in ("acceptance_rate", "lp", "step_size", "diverging", "num_nonfinite"):
        assert stats[name].dims == ("chain", "draw")
        assert stats[name].shape == (2, 40)
    assert ((stats["acceptance_rate"] >= 0) & (stats["acceptance_rate"] <= 1)).all()
    # lp is the log-density of the draws, in the unconstrained space where there is one
    x = np.asarray(posterior["x"])
    expected = np.asarray(jax.vmap(jax.vmap(lambda x: log_density(model, (), {}, {"x": x})[0]))(jnp.asarray(x)))
    if model is interval:
        expected = expected + np.log(x * (1 - x))
    np.testing.assert_allclose(stats["lp"], expected, rtol=1e-3, atol=1e-3)
    assert np.isfinite(np.asarray(az.rhat(data)["x"] if hasattr(az.rhat(data), "data_vars") else 1.0)).all()


@pytest.mark.slow
@pytest.mark.parametrize("thinning", [1, 2])
@pytest.mark.case("A13")
def test_thinning(thinning):  # 8 s
    mcmc = run(ebm.MALA(real), num_samples=200, thinning=thinning)
    data = az.from_numpyro(mcmc)
    assert data["posterior"]["x"].shape == (4, 200 // thinning)
    assert data["sample_stats"]["acceptance_rate"].shape == (4, 200 // thinning)


@pytest.mark.slow
def test_mala_is_exact_and_adapts():  # 10 s
    for model, truth, variance in ((real, 1.0, 4.0), (interval, 2 / 7, 10 / 49 / 8)):
        mcmc = run(ebm.MALA(model), num_warmup=500, num_samples=2000)
        draws = mcmc.get_samples(group_by_chain=True)["x"]
        assert_mean(draws, truth)
        assert_mean((draws - truth) ** 2, variance)
        assert abs(float(mcmc.get_extra_fields()["accept_prob"].mean()) - 0.574) < 0.12


def test_ula_has_its_own_stationary_law():
    mcmc = run(ebm.ULA(lambda: numpyro.sample("x", dist.Normal(0, 1)), step_size=0.5), num_samples=4000)
    assert_mean(mcmc.get_samples(group_by_chain=True)["x"] ** 2, 1 / (1 - 0.25))


@pytest.mark.parametrize("kernel", [ebm.MALA, pytest.param(NUTS, marks=pytest.mark.slow)])  # 5 s each
@pytest.mark.parametrize(("dim", "kappa"), [(3, 2.0), (15, 10.0)], ids=["S2", "S14"])
@pytest.mark.case("A3")
def test_von_mises_fisher(kernel, dim, kappa):  # NUTS through the stereographic map
    d = ebm.EnergyBased(lambda x: -kappa * x[0], ebm.SphereUniform(dim))
    mcmc = run(kernel(lambda: numpyro.sample("x", d)), num_warmup=500, num_samples=2000)
    draws = mcmc.get_samples(group_by_chain=True)["x"]
    assert_mean(draws[..., 0], mean_resultant(dim, kappa))
    assert np.abs(jnp.linalg.norm(draws, axis=-1) - 1).max() < 1e-5


def mixed(y):
    """A direction and a length: a sphere beside a bounded support."""
    direction = numpyro.sample("direction", ebm.SphereUniform(3))
    length = numpyro.sample("length", dist.Gamma(2, 1))
    numpyro.deterministic("vector", direction * length)
    numpyro.sample("y", dist.Normal(direction * length, 0.5).to_event(1), obs=y)


Y = jnp.array([1.0, 1.0, 0.0])


def z_between(a, b):
    """z-scores between means of two sets of chains."""
    from numpyro.diagnostics import effective_sample_size

    a, b = (np.asarray(draws, np.float64) for draws in (a, b))
    errors = [
        draws.var((0, 1)) / np.minimum(effective_sample_size(draws), draws.shape[0] * draws.shape[1])
        for draws in (a, b)
    ]
    return (a.mean((0, 1)) - b.mean((0, 1))) / np.sqrt(errors[0] + errors[1])


@pytest.mark.slow
def test_mala_agrees_with_nuts_on_a_mixed_model_and_as_a_block_of_gibbs():  # 30 s
    truth = run(NUTS(mixed), Y, num_warmup=500, num_samples=2000).get_samples(group_by_chain=True)
    options = {"num_warmup": 500, "num_samples": 2000}
    found = {
        "alone": run(ebm.MALA(mixed), Y, **options),
        "direction": run(
            Gibbs([(ebm.MALA(mixed), ["direction"]), (NUTS(mixed), ["length"])]), Y, chain_method=jax.vmap, **options
        ),
        "length": run(
            Gibbs([(NUTS(mixed), ["direction"]), (ebm.MALA(mixed), ["length"])]), Y, chain_method=jax.vmap, **options
        ),
    }
    for name, mcmc in found.items():
        draws = mcmc.get_samples(group_by_chain=True)
        assert set(draws) == {"direction", "length", "vector"}, name
        for site in draws:
            z = z_between(draws[site], truth[site])
            assert np.all(np.abs(z) < BOUND), (name, site, z)


@pytest.mark.slow
def test_gibbs_with_a_discrete_block():  # 8 s
    def model():
        c = numpyro.sample("c", dist.Bernoulli(0.3))
        x = numpyro.sample("x", dist.Normal(2.0 * c, 1))
        numpyro.sample("y", dist.Normal(x, 1), obs=1.5)

    mcmc = run(
        Gibbs([(DiscreteGibbs(model), ["c"]), (ebm.MALA(model), ["x"])]), chain_method=jax.vmap, num_samples=3000
    )
    odds = 0.3 / 0.7 * np.exp(dist.Normal(2, np.sqrt(2)).log_prob(1.5) - dist.Normal(0, np.sqrt(2)).log_prob(1.5))
    assert_mean(mcmc.get_samples(group_by_chain=True)["c"].astype(float), odds / (1 + odds))


def plated(y):
    with numpyro.plate("outer", 3, dim=-2), numpyro.plate("inner", 20, dim=-1):
        x = numpyro.sample("x", dist.Gamma(3, 1))
        numpyro.sample("y", dist.Normal(x, 1), obs=y)


@pytest.mark.slow
def test_elements_of_a_plate_are_accepted_each_on_its_own():  # 15 s
    y = jnp.linspace(0, 4, 60).reshape(3, 20)
    kernel = ebm.MALA(plated)
    mcmc = run(kernel, y, num_warmup=1000, num_samples=2000)
    assert kernel._elements.dims == [-2, -1]
    truth = run(NUTS(plated), y, num_warmup=500, num_samples=1000)
    z = z_between(*(m.get_samples(group_by_chain=True)["x"] for m in (mcmc, truth)))
    assert np.all(np.abs(z) < BOUND)
    # a joint acceptance of 60 elements needs a far smaller step
    assert float(mcmc.get_extra_fields()["adapt_state.step_size"].min()) > 0.05


@pytest.mark.slow
def test_elements_that_share_a_variable_are_accepted_together():  # 6 s
    def shared():
        loc = numpyro.sample("loc", dist.Normal(0, 1))
        with numpyro.plate("data", 5):
            numpyro.sample("x", dist.Normal(loc, 1))

    kernel = ebm.MALA(shared)
    mcmc = run(kernel, num_warmup=500, num_samples=4000)
    assert kernel._elements is None
    assert_mean(mcmc.get_samples(group_by_chain=True)["x"] ** 2, 2.0)


@pytest.mark.slow
def test_elements_that_a_model_couples_against_its_plate_are_accepted_together():  # 10 s
    y = jnp.array([1.0, 2, -1, 0, 1])

    def coupled():
        with numpyro.plate("data", 5):
            x = numpyro.sample("x", dist.Normal(0, 1))
            numpyro.sample("y", dist.Normal(x + 0.6 * jnp.roll(x, 1), 0.7), obs=y)

    kernel = ebm.MALA(coupled)
    mcmc = run(kernel, num_warmup=500, num_samples=4000)
    assert kernel._elements is None
    design = np.eye(5) + 0.6 * np.roll(np.eye(5), 1, axis=0)
    mean = np.linalg.solve(np.eye(5) + design.T @ design / 0.49, design.T @ np.asarray(y) / 0.49)
    assert_mean(mcmc.get_samples(group_by_chain=True)["x"], mean)


@pytest.mark.slow
def test_scaled_sites_have_numpyros_potential_in_and_out_of_a_plate():  # 10 s
    def model():
        with numpyro.plate("data", 4), numpyro.handlers.scale(scale=2.0):
            numpyro.sample("x", dist.HalfNormal(1))

    kernel = ebm.MALA(model)
    mcmc = run(kernel, num_samples=20)
    assert kernel._elements is not None
    z = mcmc.last_state.z
    expected = [numpyro.infer.util.potential_energy(model, (), {}, {"x": z["x"][i]}) for i in range(4)]
    np.testing.assert_allclose(mcmc.last_state.potential_energy, jnp.stack(expected), rtol=1e-4)


@pytest.mark.slow
def test_numpyros_own_sphere():  # 6 s
    mcmc = run(ebm.MALA(lambda: numpyro.sample("x", dist.ProjectedNormal(jnp.array([1.0, 0, 0])))), num_samples=2000)
    draws = mcmc.get_samples(group_by_chain=True)["x"]
    truth = dist.ProjectedNormal(jnp.array([1.0, 0, 0])).sample(random.key(1), (200_000,)).mean(0)
    assert np.all(np.abs(draws.mean((0, 1)) - truth) < 0.05)


def test_supports_across_blocks_of_gibbs_are_refused():
    def model():
        a = numpyro.sample("a", dist.Uniform(1, 2))
        numpyro.sample("b", dist.Uniform(0, a))

    with pytest.raises(ValueError, match="supports that depend on another block"):
        run(Gibbs([(ebm.MALA(model), ["b"]), (ebm.MALA(model), ["a"])]), num_chains=1)


@pytest.mark.slow
@pytest.mark.case("A17")
def test_single_precision_starts_in_double_precision():  # 8 s
    with jax.enable_x64(True):
        start = {"x": np.tile(np.float32([0, 0, 1]), (4, 1))}
        mcmc = run(ebm.MALA(on_sphere), num_warmup=10, num_samples=10, init_params=start)
        assert jnp.isfinite(mcmc.get_samples()["x"]).all()


@pytest.mark.slow
def test_dynamic_supports():  # 5 s
    def model():
        a = numpyro.sample("a", dist.Uniform(1, 2))
        numpyro.sample("b", dist.Uniform(0, a))

    draws = run(ebm.MALA(model), num_warmup=500, num_samples=4000).get_samples(group_by_chain=True)
    assert_mean(draws["b"], 0.75)
    assert (draws["b"] <= draws["a"]).all()


def test_potential_fn_over_any_pytree():
    mcmc = run(
        ebm.MALA(potential_fn=lambda z: jnp.sum(z["a"] ** 2) / 2 + (z["b"][0] - 3) ** 2 / 2),
        init_params={"a": jnp.zeros((4, 2)), "b": (jnp.zeros(4),)},
        num_samples=2000,
    )
    draws = mcmc.get_samples(group_by_chain=True)
    assert_mean(draws["a"], 0.0)
    assert_mean(draws["b"][0], 3.0)
    with pytest.raises(ValueError, match="init_params are needed"):
        run(ebm.MALA(potential_fn=lambda z: z**2))


@pytest.mark.slow
def test_a_kernel_serves_other_data_and_goes_on_after_warmup():
    def model(y):
        loc = numpyro.sample("loc", dist.Normal(0, 10))
        with numpyro.plate("data", y.shape[0]):
            numpyro.sample("y", dist.Normal(loc, 1), obs=y)

    kernel = ebm.MALA(model)
    for y in (jnp.full(20, 3.0), jnp.full(20, -5.0), jnp.full(7, 1.0)):
        mcmc = run(kernel, y, num_samples=1000)
        draws = mcmc.get_samples(group_by_chain=True)["loc"]
        assert_mean(draws, float(y.sum()) / (len(y) + 0.01))
        mcmc.post_warmup_state = mcmc.last_state
        mcmc.run(random.key(3), y)
        assert_mean(mcmc.get_samples(group_by_chain=True)["loc"], float(y.sum()) / (len(y) + 0.01))
    step_sizes = mcmc.get_extra_fields(group_by_chain=True)["adapt_state.step_size"]
    assert (step_sizes == step_sizes[:, :1]).all()


@pytest.mark.slow
def test_init_params_and_strategy():  # 6 s
    mcmc = run(
        ebm.MALA(on_sphere, step_size=1e-8, adapt_step_size=False),
        num_warmup=0,
        num_samples=1,
        init_params={"x": jnp.tile(jnp.array([3.0, 0, 4]), (4, 1))},
    )
    np.testing.assert_allclose(mcmc.get_samples()["x"], np.tile([0.6, 0, 0.8], (4, 1)), atol=1e-2)
    kernel = ebm.MALA(interval, step_size=1e-8, adapt_step_size=False, init_strategy=init_to_value(values={"x": 0.25}))
    np.testing.assert_allclose(run(kernel, num_warmup=0, num_samples=1).get_samples()["x"], 0.25, atol=1e-3)


@pytest.mark.case("A9")
def test_nonfinite_proposals_are_counted():
    def model():
        flat = dist.ImproperUniform(dist.constraints.real, (), ())
        numpyro.sample("x", ebm.EnergyBased(lambda x: jnp.where(x > 3, jnp.nan, x**2 / 2), flat))

    for kernel in (ebm.MALA(model, step_size=5.0, adapt_step_size=False), ebm.ULA(model, step_size=0.5)):
        mcmc = run(kernel, num_warmup=0, init_params={"x": jnp.array([2.9, 0.0, 0.0, 0.0])})
        fields = mcmc.get_extra_fields(group_by_chain=True)
        draws = mcmc.get_samples(group_by_chain=True)["x"]
        assert jnp.isfinite(draws).all()
        assert fields["num_nonfinite"][0].sum() > 0
        assert (fields["diverging"] == (fields["num_nonfinite"] > 0)).all()
        assert (draws.std(1) > 0.1).all()


@pytest.mark.parametrize("num_chains", [1, 4])
@pytest.mark.case("A10")
def test_a_start_without_a_gradient_is_an_error_that_names_the_chain(num_chains):
    def model():
        flat = dist.ImproperUniform(dist.constraints.real, (), ())
        numpyro.sample("x", ebm.EnergyBased(lambda x: jnp.sqrt(jnp.abs(x)), flat))

    start = jnp.ones(4).at[2].set(0.0) if num_chains == 4 else 0.0
    message = r"chain 2 .*gradient is not finite" if num_chains == 4 else "gradient is not finite at {'x'"
    with pytest.raises(ValueError, match=message):
        run(ebm.MALA(model), num_chains=num_chains, init_params={"x": start})


@pytest.mark.case("A1", "A19")
def test_an_unknown_normaliser_is_refused():
    def model(x):
        theta = numpyro.sample("theta", dist.Gamma(1, 1))
        numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2, dist.Normal(0, 1)), obs=x)

    for kernel in (ebm.MALA, ebm.ULA):
        with pytest.raises(ebm.IntractableNormalizerError, match=r"site 'x'.*\['theta'\]"):
            run(kernel(model), 0.5)


@pytest.mark.case("A6")
def test_a_subsampled_plate_warns():
    def model(x):
        loc = numpyro.sample("loc", dist.Normal(0, 1))
        with numpyro.plate("data", 10, subsample_size=5) as index:
            numpyro.sample("x", dist.Normal(loc, 1), obs=x[index])

    with pytest.warns(UserWarning, match="plate 'data' is subsampled"):
        run(ebm.MALA(model), jnp.zeros(10), num_chains=1, num_warmup=2, num_samples=2)


@pytest.mark.slow
def test_a_kernel_round_trips_in_pickle():  # 5 s
    kernel = ebm.MALA(real)
    expected = run(kernel).get_samples()["x"]
    np.testing.assert_array_equal(run(pickle.loads(pickle.dumps(kernel))).get_samples()["x"], expected)


def test_a_distribution_is_no_model():
    with pytest.raises(TypeError, match="wrap the distribution"):
        ebm.MALA(VMF)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ebm.MALA(), "either model or potential_fn"),
        (lambda: ebm.MALA(real, lambda z: z), "either model or potential_fn"),
        (lambda: ebm.MALA(real, step_size=0.0), "step_size must be positive"),
        (lambda: ebm.ULA(real, step_size=-1.0), "step_size must be positive"),
        (lambda: ebm.ULA(real, step_size=lambda i: 0.1), "step_size must be a positive number"),
        (lambda: run(ebm.MALA(lambda: None)), "needs a continuous latent site"),
        (lambda: run(ebm.MALA(real), init_params={"y": jnp.zeros(4)}), r"names \['y'\]"),
        (lambda: ebm.MALA(real, target_accept_prob=1.5), "target_accept_prob must be a probability"),
        (lambda: ebm.MALA(potential_fn=lambda z: z).wrap_model(lambda m: m), "wrap_model needs"),
    ],
)
def test_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.slow
def test_a_fitted_distribution_is_an_argument_of_a_model():  # 8 s
    """NumPyro looks at arguments through tree transformations, which put other things in the place of arrays."""
    energy = ebm.F1Energy(jnp.eye(3), jnp.zeros(3), jnp.ones(3), radius=2.0)

    def places(prior):
        with numpyro.plate("places", 4):
            numpyro.sample("place", prior)

    mcmc = MCMC(NUTS(places), num_warmup=5, num_samples=5, progress_bar=False)
    mcmc.run(random.key(0), ebm.EnergyBased(energy, ebm.SphereUniform(3)))
    assert mcmc.get_samples()["place"].shape == (5, 4, 3)
