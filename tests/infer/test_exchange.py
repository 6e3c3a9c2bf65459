"""Exchange against posteriors that are known."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro import handlers
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS, Gibbs
from scipy.special import ive

import numpyro_ebm as ebm
from tests.statistics import assert_mean, assert_uniform_ranks

FLAT = dist.ImproperUniform(constraints.real, (), ())


def precision(x):
    theta = numpyro.sample("theta", dist.Gamma(1, 1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2 / 2, FLAT), obs=x)


def exponential(x):
    theta = numpyro.sample("theta", dist.Gamma(2, 0.5))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x, dist.Uniform(0, 1)), obs=x)


def concentration(x):
    kappa = numpyro.sample("kappa", dist.Gamma(2, 0.2))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", ebm.EnergyBased(lambda x: -kappa * x[0], ebm.SphereUniform(x.shape[-1])), obs=x)


def normal_data(num=50):
    return 0.7 * random.normal(random.key(11), (num,))


def interval_data(num=40):
    return random.beta(random.key(12), 1, 2, (num,))


def directions(dim, kappa, num=100):
    """Draws of von Mises-Fisher: heights on a grid, the rest uniform around."""
    t = np.linspace(-1, 1, 200_001)[1:-1]
    log_density = kappa * t + (dim - 3) / 2 * np.log1p(-(t**2))
    p = np.exp(log_density - log_density.max())
    rng = np.random.default_rng(0)
    height = rng.choice(t, num, p=p / p.sum())
    around = rng.normal(size=(num, dim - 1))
    around /= np.linalg.norm(around, axis=1, keepdims=True)
    x = np.concatenate([height[:, None], np.sqrt(1 - height[:, None] ** 2) * around], 1).astype(np.float32)
    return jnp.asarray(x / np.linalg.norm(x, axis=1, keepdims=True))


def moments(log_density, low, high):
    """Mean and second moment of a density in one dimension."""
    t = np.linspace(low, high, 200_001)
    p = np.exp(log_density(t) - log_density(t).max())
    return np.array([np.sum(p * t), np.sum(p * t**2)]) / np.sum(p)


def exact_precision(x):
    shape, rate = 1 + len(x) / 2, 1 + float(jnp.sum(x**2)) / 2
    return np.array([shape / rate, shape * (shape + 1) / rate**2])


def exact_exponential(x):
    total, num = float(jnp.sum(x)), len(x)
    return moments(lambda t: np.log(t) - 0.5 * t - t * total - num * np.log(-np.expm1(-t) / t), 1e-4, 40)


def exact_concentration(x):
    total, num, order = float(jnp.sum(x[:, 0])), len(x), x.shape[-1] / 2 - 1
    log_z = lambda t: np.log(ive(order, t)) + t - order * np.log(t)  # noqa: E731
    return moments(lambda t: np.log(t) - 0.2 * t + t * total - num * log_z(t), 1e-3, 60)


def run(kernel, *args, num_warmup=500, num_samples=1500, num_chains=4, **kwargs):
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *args, **kwargs)
    return mcmc


CASES = {
    "precision": (precision, normal_data, exact_precision, "theta"),
    "exponential": (exponential, interval_data, exact_exponential, "theta"),
    "S^2": (concentration, lambda: directions(3, 2.0), exact_concentration, "kappa"),
    "S^14": (concentration, lambda: directions(15, 10.0), exact_concentration, "kappa"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.case("A1")
def test_posteriors_are_exact(name):  # 12 to 40 s
    model, data, exact, site = CASES[name]
    x = data()
    mcmc = run(ebm.Exchange(model, num_auxiliary_steps=40), x)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)[site], np.float64)
    assert_mean(np.stack([draws, draws**2], -1), exact(x))
    fields = mcmc.get_extra_fields()
    assert 0.15 < fields["accept_prob"].mean() < 0.5
    assert 0.7 < fields["auxiliary_accept_prob"].mean() < 0.9
    assert not fields["diverging"].any()


def test_nuts_still_refuses():
    with pytest.raises(ebm.IntractableNormalizerError, match="normaliser"):
        run(NUTS(precision), normal_data())


@pytest.mark.slow  # 40 s
def test_a_latent_on_a_sphere():
    """A posterior that is narrow in one direction, beside an energy that does not matter."""
    weights = jnp.array([4.0, 0.0, -4.0])

    def model(x):
        w = numpyro.sample("w", ebm.SphereUniform(3))
        numpyro.factor("quadratic", jnp.sum(weights * w**2))
        with numpyro.plate("data", 2):
            numpyro.sample("x", ebm.EnergyBased(lambda x: 0.0 * w[0] * x, dist.Uniform(0, 1)), obs=x)

    nodes, log_weights = ebm.Quadrature(300).nodes(ebm.EnergyBased(lambda x: 0 * x[0], ebm.SphereUniform(3)))
    truth = jax.nn.softmax(log_weights + nodes**2 @ weights) @ nodes**2
    mcmc = run(ebm.Exchange(model), random.uniform(random.key(1), (2,)), num_warmup=1_000, num_samples=6_000)
    assert_mean(np.asarray(mcmc.get_samples(group_by_chain=True)["w"], np.float64) ** 2, np.asarray(truth))


@pytest.mark.slow  # 40 s
def test_elements_of_other_scales():
    """Each element of an auxiliary data set finds a step size of its own."""

    def model(x):
        with numpyro.plate("groups", 3):
            theta = numpyro.sample("theta", dist.Gamma(2, 1))
            d = ebm.EnergyBased(
                ebm.as_energy(lambda x: x**2 / 2, ()), FLAT, inverse_temperature=theta * jnp.array([1, 30, 0.03])
            )
            with numpyro.plate("data", x.shape[0]):
                numpyro.sample("x", d, obs=x)

    scale = jnp.array([1, 30, 0.03])
    x = random.normal(random.key(4), (12, 3)) / jnp.sqrt(scale)
    mcmc = run(ebm.Exchange(model, num_auxiliary_steps=40), x, num_warmup=1_000, num_samples=4_000)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["theta"], np.float64)
    shape, rate = 2 + 12 / 2, 1 + np.asarray(jnp.sum(scale * x**2, 0)) / 2
    assert_mean(np.stack([draws, draws**2], -1), np.stack([shape / rate, shape * (shape + 1) / rate**2], -1))


@pytest.mark.slow
def test_exact_auxiliary_draws():  # 5 s
    """With draws from the model itself nothing is left of the bias, whatever num_auxiliary_steps."""

    def normal(rng_key, d, sample_shape):
        theta = 2 * (d.unnormalized_log_prob(0.0) - d.unnormalized_log_prob(1.0))
        return random.normal(rng_key, sample_shape) / jnp.sqrt(theta)

    x = normal_data()
    mcmc = run(ebm.Exchange(precision, auxiliary=normal, num_auxiliary_steps=1), x)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["theta"], np.float64)
    assert_mean(np.stack([draws, draws**2], -1), exact_precision(x))


@pytest.mark.slow
def test_masked_rows_and_a_proposal_of_ones_own():
    x = normal_data()

    def masked(x):
        theta = numpyro.sample("theta", dist.Gamma(1, 1))
        with numpyro.plate("data", x.shape[0]), handlers.mask(mask=jnp.isfinite(x)):
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2 / 2, FLAT), obs=x)

    def proposal(rng_key, z):
        return {"theta": z["theta"] + 0.4 * random.normal(rng_key)}

    holes = x.at[::3].set(jnp.nan)
    mcmc = run(ebm.Exchange(masked, proposal=proposal, num_auxiliary_steps=40), holes)
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["theta"], np.float64)
    assert_mean(draws[..., None], exact_precision(x[jnp.isfinite(holes)])[:1])


@pytest.mark.slow  # 20 s
def test_a_block_of_gibbs_beside_nuts():
    """The location of other data under NUTS; the energy's parameter under Exchange."""

    def both(x, y):
        theta = numpyro.sample("theta", dist.Gamma(1, 1))
        location = numpyro.sample("location", dist.Normal(0, 10))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2 / 2, FLAT), obs=x)
            numpyro.sample("y", dist.Normal(location, 1), obs=y)

    x, y = normal_data(), 3 + normal_data()
    kernel = Gibbs([(ebm.Exchange(both, num_auxiliary_steps=40), ["theta"]), (NUTS(both), ["location"])])
    mcmc = MCMC(kernel, num_warmup=300, num_samples=800, num_chains=4, chain_method="sequential", progress_bar=False)
    mcmc.run(random.key(0), x, y)
    draws = mcmc.get_samples(group_by_chain=True)
    assert_mean(np.asarray(draws["theta"])[..., None], exact_precision(x)[:1])
    assert_mean(np.asarray(draws["location"])[..., None], float(y.sum()) / (len(y) + 0.01))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["precision", "exponential"])
def test_simulation_based_calibration(name):
    """Budget: 60 seconds each. The rank of the true value among posterior draws is uniform."""
    model, num_ranks = CASES[name][0], 20
    prior = {"precision": dist.Gamma(1, 1), "exponential": dist.Gamma(2, 0.5)}[name]
    kernel = ebm.Exchange(model, num_auxiliary_steps=40)

    def replicate(key):
        key_theta, key_data, key_run = random.split(key, 3)
        theta = prior.sample(key_theta)
        u = random.uniform(key_data, (15,))
        x = (
            random.normal(key_data, (15,)) / jnp.sqrt(theta)
            if name == "precision"
            else -jnp.log1p(u * jnp.expm1(-theta)) / theta
        )
        state = kernel.init(key_run, 300, None, (x,), {})

        def step(state, _):
            state = kernel.sample(state, (x,), {})
            return state, state.z["theta"]

        _, z = jax.lax.scan(step, state, length=300 + 40 * (num_ranks - 1))
        draws = jnp.exp(z[300::40])
        return jnp.sum(draws < theta)

    ranks = np.asarray(jax.jit(jax.vmap(replicate))(random.split(random.key(5), 400)))
    assert_uniform_ranks(ranks, num_ranks)


def test_refuses():
    x = normal_data()

    def known(x):
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(lambda x: x**2, FLAT), obs=x)
        numpyro.sample("z", dist.Normal(0, 1))

    def latent(x):
        theta = numpyro.sample("theta", dist.Gamma(1, 1))
        z = numpyro.sample("z", ebm.EnergyBased(lambda z: theta * z**2, dist.Normal(0, 1)))
        numpyro.sample("x", dist.Normal(z, 1).expand([x.shape[0]]).to_event(1), obs=x)

    def discrete(x):
        k = numpyro.sample("k", dist.Bernoulli(0.5))
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(lambda x: (1 + k) * x**2, FLAT), obs=x)

    def subsampled(x):
        theta = numpyro.sample("theta", dist.Gamma(1, 1))
        with numpyro.plate("data", x.shape[0], subsample_size=5) as i:
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x**2, FLAT), obs=x[i])

    for model, message in (
        (known, "no normaliser of the energy-based sites"),
        (latent, "is for observed sites"),
        (discrete, "are discrete"),
        (subsampled, "needs all the data"),
        (handlers.scale(precision, scale=2.0), "are scaled"),
    ):
        with pytest.raises(ValueError, match=message):
            run(ebm.Exchange(model), x)
    for arguments, error in (
        ({"proposal": -1.0}, ValueError),
        ({"auxiliary": 3}, TypeError),
        ({"num_auxiliary_steps": 0}, ValueError),
    ):
        with pytest.raises(error):
            ebm.Exchange(precision, **arguments)


@pytest.mark.slow
def test_old_keys_and_one_chain():  # 8 s
    mcmc = MCMC(ebm.Exchange(precision), num_warmup=20, num_samples=20, progress_bar=False)
    mcmc.run(random.PRNGKey(0), normal_data(10))
    first = mcmc.get_samples()["theta"]
    mcmc.run(random.key(0), normal_data(10))
    np.testing.assert_array_equal(first, mcmc.get_samples()["theta"])
    assert len(set(np.asarray(first).tolist())) > 2
