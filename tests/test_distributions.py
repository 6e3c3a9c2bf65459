"""EnergyBased, the guard, and the sphere."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import nnx
from jax import random
from numpyro.contrib.module import eqx_module, flax_module, nnx_module
from numpyro.distributions import biject_to, constraints
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO

import numpyro_ebm as ebm
from numpyro_ebm.distributions import sphere, validate_observations
from tests.energies.test_energies import Linen, Nnx, Quadratic, equinox_network, f1
from tests.statistics import BOUND

FLAT = dist.ImproperUniform(constraints.real, (), ())
NORMAL3 = dist.Normal(0, 1).expand([3]).to_event(1)


def test_log_prob_is_base_less_energy():
    d = ebm.EnergyBased(lambda x: 4 * x**2, dist.Normal(0, 1), inverse_temperature=0.5)
    x = jnp.linspace(-2, 2, 5)
    expected = dist.Normal(0, 1).log_prob(x) - 2 * x**2
    np.testing.assert_allclose(d.log_prob(x), expected, rtol=1e-6)
    np.testing.assert_allclose(d.unnormalized_log_prob(x), expected, rtol=1e-6)
    np.testing.assert_allclose(d.score(x), -5 * x, rtol=1e-6)


@pytest.mark.parametrize("given", [0.25, jnp.array(0.25), lambda: 0.25, lambda d: 0.25 * d.inverse_temperature])
def test_log_prob_is_exact_where_log_z_is_given(given):
    d = ebm.EnergyBased(lambda x: x**2, dist.Normal(0, 1), log_normalizer=given)
    np.testing.assert_allclose(d.log_prob(1.0), d.unnormalized_log_prob(1.0) - 0.25, rtol=1e-6)


@pytest.mark.parametrize("value", [jnp.array(1), np.int64(1), 1, 1.0])
def test_integers_are_taken_as_floats(value):
    d = ebm.EnergyBased(lambda x: x**2, dist.Normal(0, 1))
    assert jnp.issubdtype(d.log_prob(value).dtype, jnp.floating)
    np.testing.assert_allclose(d.score(value), -3.0, rtol=1e-6)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
@pytest.mark.case("A17")
def test_output_type_is_the_promoted_type(x64, dtype):
    if dtype == "float64" and not x64:
        dtype = "float32"  # JAX has no doubles then
    with jax.enable_x64(x64):
        d = ebm.EnergyBased(lambda x: x**2, dist.Normal(0, 1))
        x = jnp.ones(3, dtype)
        expected = jnp.result_type(x, float) if dtype == "int32" else x.dtype
        assert d.log_prob(x).dtype == expected
        assert d.score(x).dtype == expected


@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.case("A4")
def test_outside_a_bounded_support_the_density_is_zero(validate):
    d = ebm.EnergyBased(lambda x: x, dist.Uniform(0, 1), validate_args=validate)
    density = jax.jit(d.log_prob)
    assert density(1.5) == -jnp.inf
    assert density(-0.5) == -jnp.inf
    assert jax.grad(d.log_prob)(0.5) == -1.0
    assert jnp.isfinite(jax.grad(d.unnormalized_log_prob)(1.5))


def test_an_energy_that_is_not_finite_outside_leaves_the_gradient_inside_alone():
    d = ebm.EnergyBased(jnp.log, dist.Uniform(0, 1))
    gradients = jax.jit(jax.vmap(jax.grad(d.unnormalized_log_prob)))(jnp.array([0.5, -0.5]))
    np.testing.assert_allclose(gradients, [-2.0, 0.0])


@pytest.mark.case("A5")
def test_vmap_of_the_constructor_equals_a_loop():
    scales, x = jnp.array([0.5, 1.0, 2.0]), jnp.linspace(-1, 1, 4)
    loop = jnp.stack([ebm.EnergyBased(lambda x, s=s: s * x**2, dist.Normal(0, 1)).log_prob(x) for s in scales])
    made = jax.vmap(lambda s: ebm.EnergyBased(lambda x: s * x**2, dist.Normal(0, 1)))(scales)
    np.testing.assert_allclose(jax.vmap(lambda d: d.log_prob(x))(made), loop, rtol=1e-6)
    inside = jax.vmap(lambda s: ebm.EnergyBased(lambda x: s * x**2, dist.Normal(0, 1)).log_prob(x))(scales)
    np.testing.assert_allclose(inside, loop, rtol=1e-6)


@pytest.mark.case("A5")
def test_shapes_of_expand_to_event_and_batches():
    d = ebm.EnergyBased(f1(d=3), NORMAL3)
    x = jnp.ones((7, 5, 3))
    assert (d.batch_shape, d.event_shape) == ((), (3,))
    assert d.expand([5]).log_prob(x).shape == (7, 5)
    assert d.expand([7, 5]).to_event(1).log_prob(x).shape == (7,)
    assert d.mask(jnp.arange(5) > 2).log_prob(x).shape == (7, 5)
    assert jax.jit(lambda d, x: d.expand([5]).to_event(1).log_prob(x))(d, x).shape == (7,)
    batch = ebm.EnergyBased(lambda x: jnp.arange(5.0) * x, dist.Normal(0, 1))
    assert batch.batch_shape == (5,)
    assert batch.log_prob(jnp.ones((7, 5))).shape == (7, 5)
    assert batch.score(jnp.ones((7, 5))).shape == (7, 5)
    warm = ebm.EnergyBased(lambda x: x**2, dist.Normal(0, 1), inverse_temperature=jnp.arange(4.0))
    np.testing.assert_allclose(warm.score(jnp.ones(4)), -1 - 2 * jnp.arange(4.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ebm.EnergyBased(lambda x: x, 1.0), TypeError, "base must be a NumPyro distribution, got float"),
        (lambda: ebm.EnergyBased(3.0, FLAT), TypeError, "energy must be callable"),
        (lambda: ebm.EnergyBased(lambda x: x, FLAT, inverse_temperature=-1.0), ValueError, "nonnegative and finite"),
        (lambda: ebm.EnergyBased(lambda x: x, FLAT, inverse_temperature=jnp.nan), ValueError, "nonnegative and finite"),
        (lambda: ebm.EnergyBased(lambda x: x, FLAT, sampler=1), TypeError, "sampler must be callable"),
        (
            lambda: ebm.EnergyBased(lambda x: jnp.ones(3) * x, dist.Normal(jnp.zeros(2), 1)),
            ValueError,
            "do not broadcast",
        ),
        (lambda: ebm.EnergyBased(f1(d=3), NORMAL3).log_prob(jnp.ones(4)), ValueError, r"event shape \(3,\)"),
        (lambda: ebm.EnergyBased(f1(d=3), NORMAL3).log_prob(1.0), ValueError, r"event shape \(3,\)"),
        (lambda: ebm.SphereUniform(1), ValueError, "at least 2"),
        (lambda: ebm.EnergyBased(f1(d=3), dist.Normal(0, 1).expand([3])), ValueError, r"\.to_event\(\)"),
        (lambda: ebm.EnergyBased(f1(d=3), dist.Normal(0, 1)), ValueError, r"\.to_event\(\)"),
        (lambda: ebm.EnergyBased(f1(d=2), ebm.SphereUniform(3)), ValueError, "features have dimension 2"),
        (lambda: ebm.EnergyBased(lambda x: x, FLAT, log_normalizer="a"), ValueError, "log_normalizer must be finite"),
        (
            lambda: ebm.EnergyBased(lambda x: x, FLAT, log_normalizer=jnp.nan),
            ValueError,
            "log_normalizer must be finite",
        ),
        (lambda: ebm.EnergyBased(lambda x: x, FLAT, log_normalizer=jnp.ones(3)), ValueError, "does not broadcast"),
        (lambda: ebm.EnergyBased(lambda x: x, FLAT, inverse_temperature=None), ValueError, "nonnegative and finite"),
    ],
)
def test_refuses(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.case("A14")
def test_round_trips_in_pickle():
    d = ebm.EnergyBased(f1(d=3), ebm.SphereUniform(3), 2.0)
    x = jnp.array([0.6, 0.0, 0.8])
    assert float(pickle.loads(pickle.dumps(d)).log_prob(x)) == float(d.log_prob(x))


def test_the_guard_leaves_derivatives_in_x_alone():
    d = ebm.EnergyBased(f1(d=3, power=3), NORMAL3)
    x = jnp.array([0.3, -0.2, 0.5])
    gradient = jax.grad(d.unnormalized_log_prob)(x)
    for derivative in (
        jax.grad,
        jax.jacfwd,
        jax.jacrev,
        lambda f: jax.grad(jax.checkpoint(f)),
        lambda f: jax.jit(jax.grad(f)),
    ):
        np.testing.assert_allclose(derivative(d.log_prob)(x), gradient, rtol=1e-5)
    np.testing.assert_allclose(
        jax.hessian(d.log_prob)(x), jax.hessian(d.unnormalized_log_prob)(x), rtol=1e-5, atol=1e-6
    )

    def scanned(x):
        return jax.lax.scan(lambda c, _: (c + d.log_prob(x), None), 0.0, None, length=3)[0]

    np.testing.assert_allclose(jax.grad(scanned)(x), 3 * gradient, rtol=1e-5)
    branched = jax.grad(lambda x: jax.lax.cond(x[0] > 0, d.log_prob, lambda x: 0.0, x))(x)
    np.testing.assert_allclose(branched, gradient, rtol=1e-5)


def declare(spelling):
    """A trainable energy of events of shape (3,), in one of the spellings."""
    weight = numpyro.param("weight", 1.0)
    if spelling == "f1":
        return ebm.f1_energy("energy", dim=3, num_neurons=4)
    if spelling == "closure":
        return lambda x: weight * jnp.sum(x**2)
    if spelling == "partial":
        return functools.partial(lambda w, x: w * jnp.sum(x**2), weight)
    if spelling == "dataclass":
        return Quadratic(weight)
    if spelling == "linen":
        return flax_module("energy", Linen(), input_shape=(3,))
    if spelling == "nnx":
        return nnx_module("energy", Nnx(nnx.Rngs(0)))
    if spelling == "eqx":
        return eqx_module("energy", equinox_network())
    raise AssertionError(spelling)


TRAINABLE = ["f1", "closure", "partial", "dataclass", "linen", "nnx", "eqx"]


@pytest.mark.parametrize("spelling", TRAINABLE)
def test_the_guard_raises_under_svi(spelling):
    def model(x):
        energy = declare(spelling)
        with numpyro.plate("data", 5):
            numpyro.sample("obs", ebm.EnergyBased(energy, NORMAL3), obs=x)

    svi = SVI(model, lambda x: None, optax.sgd(0.1), Trace_ELBO())
    x = random.normal(random.key(0), (5, 3))
    with pytest.raises(ebm.IntractableNormalizerError, match=r"site 'obs'.*estimate.*log_normalizer"):
        svi.run(random.key(0), 2, x, progress_bar=False)
    state = svi.init(random.key(0), x)
    with pytest.raises(ebm.IntractableNormalizerError):
        jax.jit(svi.update)(state, x)


@pytest.mark.parametrize(
    "density",
    [
        lambda z: ebm.EnergyBased(lambda x: z * x**2, dist.Normal(0, 1)),
        lambda z: ebm.EnergyBased(lambda x: x**2, dist.Normal(0, 1), inverse_temperature=z),
        lambda z: ebm.EnergyBased(lambda x: x**2, dist.Normal(0, z)),
        lambda z: ebm.EnergyBased(lambda x: z * x**2, dist.Normal(0, 1), log_normalizer=0.3),
    ],
    ids=["energy", "inverse temperature", "base", "numeric log Z"],
)
@pytest.mark.case("A1", "A19")
def test_the_guard_raises_under_nuts(density):
    def model():
        z = numpyro.sample("z", dist.Gamma(1, 1))
        numpyro.sample("obs", density(z), obs=0.3)

    with pytest.raises(ebm.IntractableNormalizerError, match="site 'obs'"):
        MCMC(NUTS(model), num_warmup=5, num_samples=5, progress_bar=False).run(random.key(0))


FIXED = {
    "closure": lambda: lambda x: jnp.sum(x**2),
    "partial": lambda: functools.partial(lambda w, x: w * jnp.sum(x**2), jnp.array(2.0)),
    "dataclass": lambda: Quadratic(2.0),
    "f1": lambda: f1(d=3),
    "nnx": lambda: Nnx(nnx.Rngs(0)),
    "eqx": equinox_network,
}


@pytest.mark.parametrize("spelling", FIXED)
def test_the_guard_is_silent_for_a_fixed_energy(spelling):
    energy = FIXED[spelling]()

    def model():
        scale = numpyro.sample("scale", dist.Gamma(5, 5))
        x = numpyro.sample("x", ebm.EnergyBased(energy, NORMAL3))
        numpyro.sample("y", dist.Normal(x.sum(), scale), obs=1.0)

    mcmc = MCMC(NUTS(model), num_warmup=20, num_samples=20, progress_bar=False)
    mcmc.run(random.key(0))
    assert jnp.isfinite(mcmc.get_samples()["x"]).all()


def test_a_network_updated_in_place_is_seen():
    net = Nnx(nnx.Rngs(0))
    d = ebm.EnergyBased(net, NORMAL3)
    x = jnp.ones(3)
    before = float(d.log_prob(x))
    net.outer.bias[...] += 1.0
    np.testing.assert_allclose(float(d.log_prob(x)), before - 1, rtol=1e-5)
    np.testing.assert_allclose(float(jax.jit(d.log_prob)(x)), before - 1, rtol=1e-5)


@pytest.mark.parametrize("given", ["callable", "array"])
@pytest.mark.case("A1")
def test_log_z_of_the_same_parameters_lifts_the_guard(given):
    x = random.normal(random.key(0), (50,))

    def model(x):
        theta = numpyro.sample("theta", dist.Gamma(1, 1))
        log_z = 0.5 * jnp.log(2 * jnp.pi / theta)
        d = ebm.EnergyBased(
            lambda x: theta * x**2 / 2, FLAT, log_normalizer=log_z if given == "array" else lambda: log_z
        )
        with numpyro.plate("data", 50):
            numpyro.sample("x", d, obs=x)

    mcmc = MCMC(
        NUTS(model), num_warmup=500, num_samples=1000, num_chains=4, chain_method="vectorized", progress_bar=False
    )
    mcmc.run(random.key(1), x)
    from tests.statistics import assert_mean

    assert_mean(mcmc.get_samples(group_by_chain=True)["theta"], 26 / (1 + jnp.sum(x**2) / 2))


@pytest.mark.case("A2")
def test_predictive_needs_a_sampler_and_uses_it():
    d = ebm.EnergyBased(lambda x: 4 * x**2, dist.Normal(0, 1))
    with pytest.raises(NotImplementedError, match=r"site 'x'.*with_sampler"):
        Predictive(lambda: numpyro.sample("x", d), num_samples=3)(random.key(0))

    def sampler(rng_key, d, sample_shape):
        return random.normal(rng_key, d.shape(sample_shape)) / 3

    draws = Predictive(lambda: numpyro.sample("x", d.with_sampler(sampler)), num_samples=4000)(random.key(0))["x"]
    assert abs(float(jnp.var(draws)) * 9 - 1) < BOUND * np.sqrt(2 / 4000)
    with pytest.raises(ValueError, match=r"sampler returned shape \(2,\)"):
        d.with_sampler(lambda *_: jnp.ones(2)).sample(random.key(0))


def test_stereographic_map_and_its_volume():
    transform = biject_to(sphere)
    y = random.normal(random.key(0), (20, 4))
    x = transform(y)
    np.testing.assert_allclose(jnp.linalg.norm(x, axis=-1), 1, rtol=1e-6)
    np.testing.assert_allclose(transform.inv(x), y, rtol=1e-4, atol=1e-5)
    assert transform.forward_shape((7, 4)) == (7, 5)
    assert transform.inverse_shape((7, 5)) == (7, 4)

    # the density of the uniform measure on S^2, integrated over circles of R^2
    radius = np.tan(np.linspace(0, np.pi / 2, 20_001)[:-1])
    y = jnp.stack([radius, jnp.zeros_like(radius)], -1)
    volume = np.exp(np.asarray(transform.log_abs_det_jacobian(y, transform(y)), np.float64))
    total = np.trapezoid(2 * np.pi * radius * volume, radius)
    assert abs(total - 1) < 1e-3
    assert jnp.isfinite(transform.inv(jnp.array([0.0, 0.0, 1.0]))).all()


def test_sphere_uniform():
    d = ebm.SphereUniform(5)
    x = d.sample(random.key(0), (4000,))
    np.testing.assert_allclose(jnp.linalg.norm(x, axis=-1), 1, rtol=1e-5)
    assert np.all(np.abs(x.mean(0)) < BOUND * np.sqrt(1 / 5 / 4000))
    np.testing.assert_array_equal(d.log_prob(x), 0)
    assert d.support(x).all()
    assert not d.support(1.01 * x).any()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (jnp.ones((4, 2)), r"event shape \(3,\)"),
        (jnp.array([[0, 0, 1.0], [0, jnp.nan, 1.0]]), "nan at row 1, column 1"),
        (jnp.array([[0, 0, 1.0], [jnp.inf, 0, 1.0]]), "inf at row 1, column 0"),
        (jnp.array([[0, 0, 1.0], [0, 0, 1.1]]), r"row 1 does not.*norm 1\.1"),
    ],
)
def test_observations_are_checked(value, message):
    with pytest.raises(ValueError, match=message):
        validate_observations("x", ebm.EnergyBased(f1(d=3), ebm.SphereUniform(3)), value)
