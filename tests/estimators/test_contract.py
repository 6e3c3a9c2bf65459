"""What holds for every estimator, in every model that it serves."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import linen, nnx
from jax import random
from numpyro.contrib.module import (
    eqx_module,
    flax_module,
    nnx_module,
    random_eqx_module,
    random_flax_module,
    random_nnx_module,
)
from numpyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from numpyro.infer.autoguide import AutoNormal

import numpyro_ebm as ebm

TRACES = []
X = random.normal(random.key(0), (12, 2))
Y = jnp.arange(12) % 3
BASE = dist.Normal(0, 1).expand([2]).to_event(1)


def counted(x):
    TRACES.append(1)
    return x


def plain(x, y):
    theta = numpyro.param("theta", jnp.array([0.3, -0.2]))
    with numpyro.plate("data", 12):
        numpyro.sample("x", ebm.EnergyBased(lambda x: counted(theta) @ x**2, BASE), obs=x)


def subsampled(x, y):
    theta = numpyro.param("theta", jnp.array([0.3, -0.2]))
    with numpyro.plate("data", 12, subsample_size=5):
        batch = numpyro.subsample(x, event_dim=1)
        numpyro.sample("x", ebm.EnergyBased(lambda x: counted(theta) @ x**2, BASE), obs=batch)


def covariates(x, y):
    theta = numpyro.param("theta", 0.3)
    with numpyro.plate("data", 12, subsample_size=5):
        batch, c = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("x", ebm.EnergyBased(lambda x: counted(theta) * c * x[..., 0], BASE), obs=batch)


def joint(theta):
    weights = jnp.array([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5]])
    return ebm.JointEnergy(lambda x: counted(theta) * (weights @ x), BASE)


def jem(x, y):
    energy = joint(numpyro.param("theta", 0.3))
    with numpyro.plate("data", 12, subsample_size=5):
        batch, labels = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("x", energy.marginal(), obs=batch)
        numpyro.sample("y", energy.classifier(batch), obs=labels)


def st_jem(x, y):
    energy = joint(numpyro.param("theta", 0.3))
    with numpyro.plate("data", 12, subsample_size=5):
        batch, labels = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("x", energy.conditional(labels), obs=batch)
        numpyro.sample("y", energy.classifier(batch), obs=labels)


POOL = ebm.ChainPool(pool_size=20, num_steps=2)
BUFFER = ebm.ChainPool(
    ebm.kernels.ula(0.1, temperature=0.5), 20, num_chains=8, num_steps=2, reinit_prob=0.05, restart_prob=0.1
)
CASES = {
    "contrastive": (plain, ebm.ContrastiveDivergence(POOL)),
    "contrastive, buffer": (subsampled, ebm.ContrastiveDivergence(BUFFER)),
    "contrastive, covariates": (covariates, ebm.ContrastiveDivergence(POOL)),
    "JEM": (jem, ebm.ContrastiveDivergence(BUFFER)),
    "conditional, exact weights": (st_jem, ebm.ContrastiveDivergence(POOL, mutual_information=0.5)),
    "conditional, own chains": (st_jem, ebm.ContrastiveDivergence(POOL, target="conditional")),
    "ST-JEM": (st_jem, ebm.SoftmaxContrastive(BUFFER)),
    "ST-JEM, classes": (st_jem, ebm.SoftmaxContrastive(POOL, target="conditional", positives="class")),
    "softmax, covariates": (covariates, ebm.SoftmaxContrastive(POOL)),
    "explicit": (subsampled, ebm.ScoreMatching()),
    "sliced": (subsampled, ebm.ScoreMatching("sliced")),
    "denoising": (subsampled, ebm.ScoreMatching("denoising", noise_scale=0.1)),
    "score, covariates": (covariates, ebm.ScoreMatching()),
    "quadrature": (st_jem, ebm.Quadrature(30)),
    "quadrature, covariates": (covariates, ebm.Quadrature(30)),
}


# the rest run with the slow tests, 15 s each
FAST = {"ST-JEM"}
NAMES = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]


def trainer(model, estimator):
    return SVI(ebm.estimate(model, estimator), lambda x, y: None, optax.sgd(1e-2), Trace_ELBO())


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "ST-JEM" else name for name in NAMES]
)  # 20 s
def test_jit_is_eager_keys_are_keys_and_one_trace_is_enough(name):
    model, estimator = CASES[name]
    svi = trainer(model, estimator)
    init, update, evaluate = jax.jit(svi.init), jax.jit(svi.update), jax.jit(svi.evaluate)
    states = [init(key(3), X, Y) for key in (random.key, random.PRNGKey)]
    compiled = [update(state, X, Y) for state in states]
    eager = svi.update(states[0], X, Y)
    new, old, plain = (
        jax.tree.leaves((svi.get_params(state), state.mutable_state, loss)) for state, loss in (*compiled, eager)
    )
    for a, b, c in zip(new, old, plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
        np.testing.assert_allclose(a, c, rtol=2e-4, atol=1e-5)
    (state, _), traces = compiled[0], len(TRACES)
    for _ in range(3):
        state, loss = update(state, X + 0.1, Y)
    assert len(TRACES) == traces
    assert jnp.isfinite(loss)
    assert jnp.any(svi.get_params(state)["theta"] != svi.get_params(states[0])["theta"])
    assert jnp.isfinite(evaluate(state, X, Y))


@pytest.mark.parametrize("name", NAMES)
def test_double_precision_stays_double(name):
    model, estimator = CASES[name]
    with jax.enable_x64(True):
        svi = trainer(model, estimator)
        x = np.asarray(X, np.float64)
        state, loss = jax.jit(lambda key: svi.update(svi.init(key, x, Y), x, Y))(random.key(3))
        assert loss.dtype == jnp.float64
        floats = [leaf for leaf in jax.tree.leaves(state.mutable_state) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        assert all(leaf.dtype == jnp.float64 for leaf in floats)


POINTS = jnp.linspace(-2.0, 2.0, 40) + 0.5
EXACT = 1 / float(jnp.mean((POINTS - 0.5) ** 2)) - 1 / 9


def with_a_latent(x):
    """The energy's parameter, and a latent variable that has nothing to do with it."""
    theta = numpyro.param("theta", 0.1, constraint=dist.constraints.positive)
    loc = numpyro.sample("loc", dist.Normal(0, 1))
    numpyro.sample("y", dist.Normal(loc, 1), obs=1.0)
    with numpyro.plate("data", 40, subsample_size=20):
        batch = numpyro.subsample(x, event_dim=0)
        numpyro.sample("x", ebm.EnergyBased(lambda x: theta * (x - 0.5) ** 2 / 2, dist.Normal(0.5, 3.0)), obs=batch)


def by_hand(x):
    loc = numpyro.param("q_loc", 0.0)
    numpyro.sample("loc", dist.Normal(loc, numpyro.param("q_scale", 1.0, constraint=dist.constraints.positive)))


@pytest.mark.slow
@pytest.mark.parametrize("guide", ["AutoNormal", "by hand"])
@pytest.mark.parametrize("loss", [Trace_ELBO(), TraceMeanField_ELBO()], ids=lambda loss: type(loss).__name__)
@pytest.mark.parametrize("stable_update", [False, True])
@pytest.mark.parametrize("name", ["contrastive", "score", "quadrature"])
def test_svi_trains_beside_a_guide(name, stable_update, loss, guide):  # 6 s each
    estimator = {
        "contrastive": ebm.ContrastiveDivergence(ebm.ChainPool(pool_size=64, num_steps=5)),
        "score": ebm.ScoreMatching(),
        "quadrature": ebm.Quadrature(100),
    }[name]
    estimated = ebm.estimate(with_a_latent, estimator)
    q = AutoNormal(estimated) if guide == "AutoNormal" else by_hand
    svi = SVI(estimated, q, optax.adam(optax.cosine_decay_schedule(5e-2, 600)), loss)
    result = svi.run(random.key(0), 600, POINTS, progress_bar=False, stable_update=stable_update)
    assert abs(float(result.params["theta"]) - EXACT) < 0.12
    loc = result.params["loc_auto_loc" if guide == "AutoNormal" else "q_loc"]
    assert abs(float(loc) - 0.5) < 0.25


def networks():
    import equinox

    linen_net = linen.Sequential([linen.Dense(8), jnp.tanh, linen.Dense(1)])
    return {
        "flax": (flax_module, random_flax_module, (linen_net,), {"input_shape": (2,)}),
        "nnx": (nnx_module, random_nnx_module, (nnx.Linear(2, 1, rngs=nnx.Rngs(0)),), {}),
        "equinox": (
            eqx_module,
            random_eqx_module,
            (equinox.nn.MLP(2, 1, 8, 1, activation=jnp.tanh, key=random.key(0)),),
            {},
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["flax", "nnx", "equinox"])
@pytest.mark.parametrize("is_random", [False, True], ids=["parameters", "random"])
def test_networks_of_numpyro_train(kind, is_random):  # 15 s each
    """Towards a normal at 1.5: the loss's chains follow the data."""
    module, random_module, args, options = networks()[kind]
    x = X * 0.3 + 1.5

    def model(x):
        if is_random:
            energy = random_module("net", *args, prior=dist.Normal(0, 1), **options)
        else:
            energy = module("net", *args, **options)
        with numpyro.plate("data", 12):
            numpyro.sample("x", ebm.EnergyBased(energy, BASE), obs=x)

    estimated = ebm.estimate(model, ebm.ContrastiveDivergence(ebm.ChainPool(pool_size=64, num_steps=5)))
    guide = AutoNormal(estimated, init_scale=0.01) if is_random else lambda x: None
    svi = SVI(estimated, guide, optax.adam(3e-2), Trace_ELBO())
    state = svi.run(random.key(0), 150, x, progress_bar=False).state
    position = state.mutable_state["x$chains"]["state"].position
    assert np.all(position.mean(0) > 0.7)


def test_batches_of_energies_of_another_size_are_refused_in_words():
    def model(x, c):
        theta = numpyro.param("theta", 0.3)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(lambda x: theta * c * x, dist.Normal(0, 1)), obs=x)

    svi = SVI(ebm.estimate(model, ebm.ContrastiveDivergence(POOL)), lambda x, c: None, optax.sgd(0.1), Trace_ELBO())
    c = jnp.arange(12.0)
    state = svi.init(random.key(0), X[:, 0], c)
    with pytest.raises(ValueError, match=r"site 'x'.*shape \(12,\) so far, but now .* \(5,\)"):
        svi.update(state, X[:5, 0], c[:5])


@pytest.mark.slow
@pytest.mark.parametrize(("num_steps", "low", "high"), [(1, 0.4, 1.2), (20, 0.27, 0.38), (100, 0.27, 0.32)])
def test_a_guide_of_a_latent_in_the_energy_converges_as_moves_grow(num_steps, low, high):  # 20 s each
    """x given theta is N(theta, 1), and the prior N(0, 1): with 11 observations the posterior has sd 1 / sqrt(12)."""
    x = random.normal(random.key(0), (11,)) + 0.5

    def model(x):
        theta = numpyro.sample("theta", dist.Normal(0, 1))
        with numpyro.plate("data", 11):
            numpyro.sample("x", ebm.EnergyBased(lambda x: -theta * x, dist.Normal(0, 1)), obs=x)

    pool = ebm.ChainPool(ebm.kernels.mala(0.3), 256, num_steps=num_steps)
    estimated = ebm.estimate(model, ebm.ContrastiveDivergence(pool))
    guide = AutoNormal(estimated)
    svi = SVI(estimated, guide, optax.adam(optax.cosine_decay_schedule(2e-2, 3000, 0.01)), Trace_ELBO())
    params = svi.run(random.key(0), 3000, x, progress_bar=False).params
    assert abs(float(params["theta_auto_loc"]) - float(x.sum()) / 12) < 0.1
    assert low < float(params["theta_auto_scale"]) < high
