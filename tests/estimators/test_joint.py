"""Estimators of joint energies against exact gradients.

Logits theta * a_y * x + b_y on N(0, 1): p(x|y) is N(theta a_y, 1), log Z_y = theta^2 a_y^2 / 2 + b_y.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO

import numpyro_ebm as ebm
from tests.estimators.gradients import gradients
from tests.statistics import assert_mean

THETA = 0.7
A = jnp.array([1.0, -1.5, 0.3])
B = jnp.array([0.0, 0.4, -0.3])
X = jnp.linspace(-1.5, 2, 12)
Y = jnp.arange(12) % 3
LOG_Z = THETA**2 * A**2 / 2 + B
P_Y = jax.nn.softmax(LOG_Z)
GRAD_LOG_Z = THETA * A**2  # of each class


def joint():
    theta = numpyro.param("theta", THETA)
    return ebm.JointEnergy(lambda x: theta * A * x + B, dist.Normal(0, 1))


def conditional(x, y):
    with numpyro.plate("data", 12):
        numpyro.sample("x", joint().conditional(y), obs=x)


def subsampled(x, y):
    with numpyro.plate("data", 12, subsample_size=5):
        xb, yb = numpyro.subsample(x, event_dim=0), numpyro.subsample(y, event_dim=0)
        numpyro.sample("x", joint().conditional(yb), obs=xb)


def nested(x, y):
    with numpyro.plate("columns", 4, dim=-1), numpyro.plate("rows", 3, dim=-2):
        numpyro.sample("x", joint().conditional(y.reshape(3, 4)), obs=x.reshape(3, 4))


def masked(x, y):
    with numpyro.plate("data", 12), handlers.mask(mask=jnp.arange(12) < 5):
        numpyro.sample("x", joint().conditional(y), obs=x)


def one_class(x, y):
    with numpyro.plate("data", 12):
        numpyro.sample("x", joint().conditional(1), obs=x)


def marginal(x, y):
    with numpyro.plate("data", 12):
        numpyro.sample("x", joint().marginal(), obs=x)


TERMS = GRAD_LOG_Z[Y] - A[Y] * X
EXPECTED = {
    conditional: TERMS.sum(),
    subsampled: TERMS.sum(),
    nested: TERMS.sum(),
    masked: TERMS[:5].sum(),
    one_class: jnp.sum(GRAD_LOG_Z[1] - A[1] * X),
}


def pool(num=400, **kwargs):
    return ebm.ChainPool(ebm.kernels.mala(0.6), num, num_steps=3, **kwargs)


def fast(cases, chosen):
    """All combinations, those that are not chosen among the slow tests: ten seconds each."""
    return [case if case in chosen else pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "target"),
    fast(
        list(itertools.product(EXPECTED, ["marginal", "conditional"])),
        [(subsampled, "marginal"), (subsampled, "conditional"), (masked, "conditional")],
    ),
)
def test_contrastive_divergence_on_a_conditional_is_unbiased(model, target):  # 25 s
    estimator = ebm.ContrastiveDivergence(pool(4000 if target == "marginal" else 100), target=target)
    assert_mean(gradients(model, estimator, X, Y, num_updates=100, burn_in=30), EXPECTED[model])


@pytest.mark.slow
def test_contrastive_divergence_on_the_marginal_is_unbiased():  # 5 s
    p = jax.nn.softmax(THETA * A * X[:, None] + B)
    expected = jnp.sum(P_Y @ GRAD_LOG_Z - jnp.sum(p * A * X[:, None], -1))
    assert_mean(gradients(marginal, ebm.ContrastiveDivergence(pool()), X, Y), expected)


@pytest.mark.slow
def test_chains_of_a_conditional_are_of_all_classes():
    svi = SVI(
        ebm.estimate(subsampled, ebm.ContrastiveDivergence(pool(50), target="conditional")),
        lambda x, y: None,
        optax.sgd(0.0),
        Trace_ELBO(),
    )
    state = svi.init(random.key(0), X, Y)
    assert state.mutable_state["x$chains"]["state"].position.shape == (50, 3)


@pytest.mark.slow
@pytest.mark.parametrize("start", [{"restart_prob": 1.0}, {"init": "data"}], ids=str)  # 10 s each
def test_chains_of_a_class_start_at_its_own_observations(start):
    """Class 2 is absent, and its chains stay where they are."""
    x, y = jnp.arange(12.0) + 100, jnp.arange(12) % 2

    def model(x, y):
        with numpyro.plate("data", 12):
            numpyro.sample("x", joint().conditional(y), obs=x)

    still = ebm.ChainPool(ebm.kernels.ula(1e-14), 60, **start)
    estimator = ebm.ContrastiveDivergence(still, target="conditional")
    svi = SVI(ebm.estimate(model, estimator), lambda x, y: None, optax.sgd(0.0), Trace_ELBO())
    before = svi.init(random.key(0), x, y)
    after, _ = jax.jit(svi.update)(before, x, y)
    position = np.asarray(after.mutable_state["x$chains"]["state"].position)
    for label in range(2):
        assert set(np.round(position[:, label])) == set(np.asarray(x[y == label]))
    np.testing.assert_allclose(position[:, 2], before.mutable_state["x$chains"]["state"].position[:, 2], atol=1e-4)


# what SoftmaxContrastive estimates, by quadrature
GRID = jnp.linspace(-8, 8, 4001)
WEIGHT = dist.Normal(0, 1).log_prob(GRID) + jnp.log(GRID[1] - GRID[0])
F = THETA * A * GRID[:, None] + B


def softmax_gradient(target, positives, num_chains, kept=None):
    """Of -sum_i log p, with log E_q[exp f_y] for log Z_y: q is `num_chains` of the model and the positives."""
    f_data = THETA * A * X[:, None] + B
    gradient = 0.0
    for i in range(12) if kept is None else range(kept):
        log_q = WEIGHT + (F[:, Y[i]] if target == "conditional" else jax.nn.logsumexp(F, -1))
        q = jax.nn.softmax(log_q)
        own = {"batch": jnp.ones(12), "class": Y[i] == Y, "own": jnp.arange(12) == i, None: jnp.zeros(12)}[positives]
        own = own if kept is None else own * (jnp.arange(12) < kept)
        chains, data = num_chains * q * jnp.exp(F[:, Y[i]]), own * jnp.exp(f_data[:, Y[i]])
        pulled = jnp.sum(chains * A[Y[i]] * GRID) + jnp.sum(data * A[Y[i]] * X)
        gradient += pulled / (jnp.sum(chains) + jnp.sum(data)) - A[Y[i]] * X[i]
    return gradient


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "positives"),
    fast(
        list(itertools.product(["marginal", "conditional"], ["batch", "class", "own", None])),
        [("marginal", "batch"), ("conditional", "class"), ("marginal", "own")],
    ),
)
def test_softmax_contrastive_has_the_documented_gradient(target, positives):  # 30 s
    num = 2000
    estimator = ebm.SoftmaxContrastive(pool(num), target=target, positives=positives)
    series = gradients(conditional, estimator, X, Y, num_updates=60, burn_in=30)
    expected = softmax_gradient(target, positives, num)
    assert_mean(series, expected)
    assert abs(expected - TERMS.sum()) > 0.1  # it is not the likelihood's


@pytest.mark.slow
@pytest.mark.parametrize("positives", ["batch", "class"])
def test_masked_rows_are_no_candidates(positives):  # 10 s
    estimator = ebm.SoftmaxContrastive(pool(2000), positives=positives)
    x = X.at[5:].set(jnp.nan)
    series = gradients(masked, estimator, x, Y, num_updates=60, burn_in=30)
    assert_mean(series, softmax_gradient("marginal", positives, 2000, kept=5))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["marginal", pytest.param("conditional", marks=pytest.mark.slow)])
def test_uniform_weights_without_positives_are_contrastive_divergence_to_rounding(target):  # conditional: 10 s
    for model in (marginal, conditional) if target == "conditional" else (marginal,):
        plain = gradients(model, ebm.ContrastiveDivergence(pool(30), target=target), X, Y, num_updates=5, burn_in=0)
        uniform = ebm.SoftmaxContrastive(pool(30), target=target, positives=None, weighting="uniform")
        np.testing.assert_allclose(gradients(model, uniform, X, Y, num_updates=5, burn_in=0), plain, rtol=1e-5)


@pytest.mark.slow
def test_positives_leave_the_gradient_in_x_alone():  # 5 s
    """A learned prior over a latent: its guide follows the score of the density itself."""
    d = ebm.JointEnergy(lambda x: A * x + B, dist.Normal(0, 1)).marginal()
    estimator = ebm.SoftmaxContrastive(pool(20))
    state = estimator.init(random.key(0), d, ebm.pool.Observations())
    objective, _ = estimator.update(random.key(1), state, d, ebm.pool.Observations())
    np.testing.assert_allclose(jax.grad(lambda x: objective(x).sum())(X), d.score(X), rtol=1e-5)


@pytest.mark.slow  # 12 s
def test_the_mutual_information_term_has_the_exact_gradient():
    """Of the model's own mutual information, whose draws move with theta too."""

    def exact(theta):
        f = theta * A * GRID[:, None] + B
        p_x = jax.nn.softmax(WEIGHT + jax.nn.logsumexp(f, -1))
        p_y_x = jax.nn.softmax(f)
        p_y = p_x @ p_y_x
        return jnp.sum(p_x[:, None] * p_y_x * (jnp.log(p_y_x) - jnp.log(p_y)))

    plain = ebm.ContrastiveDivergence(pool(1000))
    with_term = ebm.ContrastiveDivergence(pool(1000), mutual_information=2.0)
    series = [gradients(marginal, e, X, Y, num_updates=100, burn_in=50) for e in (plain, with_term)]
    # the chains are the same: their difference is the term alone, once for each of twelve observations
    assert_mean((series[0] - series[1]) / 24, jax.grad(exact)(THETA))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ebm.SoftmaxContrastive(pool(), positives="all"), "positives must be"),
        (lambda: ebm.SoftmaxContrastive(pool(), weighting="none"), "weighting must be"),
        (lambda: ebm.SoftmaxContrastive(pool(), target="joint"), "target must be"),
        (lambda: ebm.ContrastiveDivergence(pool(), target="joint"), "target must be"),
        (lambda: ebm.ContrastiveDivergence(pool(), mutual_information=-1), "mutual_information"),
        (lambda: ebm.ChainPool(pool_size=0), "pool_size must be a positive integer"),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("estimator", "model", "message"),
    [
        (ebm.SoftmaxContrastive(pool(), positives="class"), marginal, "for sites of JointEnergy.conditional"),
        (
            ebm.ContrastiveDivergence(pool(), mutual_information=1.0, target="conditional"),
            conditional,
            "needs chains of the marginal",
        ),
    ],
    ids=["class", "information"],
)
def test_what_a_site_can_not_have_is_said_before_training(estimator, model, message):
    svi = SVI(ebm.estimate(model, estimator), lambda x, y: None, optax.sgd(0.1), Trace_ELBO())
    with pytest.raises(ValueError, match=message):
        svi.init(random.key(0), X, Y)


@pytest.mark.slow  # 10 s each
@pytest.mark.parametrize("positives", ["batch", "class"])
def test_labels_of_more_dimensions_than_x(positives):
    """Two sets of labels share x; with a mask of ones the candidates are the same."""

    def model(x, y, mask):
        with numpyro.plate("sets", 2, dim=-2), numpyro.plate("data", 12, dim=-1), handlers.mask(mask=mask):
            numpyro.sample("x", joint().conditional(y), obs=x)

    estimator = ebm.SoftmaxContrastive(pool(50), positives=positives)
    y = jnp.stack([Y, Y[::-1]])
    losses = []
    for mask in (True, jnp.ones((2, 12), bool)):
        svi = SVI(ebm.estimate(model, estimator), lambda *args: None, optax.sgd(0.0), Trace_ELBO())
        losses.append(svi.update(svi.init(random.key(0), X, y, mask), X, y, mask)[1])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


def test_labels_out_of_range_that_can_not_be_looked_at_are_not_a_number():
    d = jax.jit(lambda y: joint().conditional(y).unnormalized_log_prob(0.3))(jnp.array([0, 3, -1]))
    np.testing.assert_array_equal(np.isnan(d), [False, True, True])
    y = jax.jit(lambda y: joint().classifier(0.3).log_prob(y))(jnp.array([0, 3, -1]))
    np.testing.assert_array_equal(np.isnan(y), [False, True, True])


@pytest.mark.parametrize("y", [None, "a", [[0], [1, 2]], [], 1.0, True], ids=str)
def test_labels_are_integers(y):
    with pytest.raises(ValueError, match=r"labels must be (integers, got|an array of integers)"):
        joint().conditional(y)


def test_a_learned_base_is_refused():
    def model(x):
        d = ebm.EnergyBased(lambda x: x**2, dist.Normal(numpyro.param("theta", 0.0), 1))
        with numpyro.plate("data", 12):
            numpyro.sample("x", d, obs=x)

    svi = SVI(ebm.estimate(model, ebm.SoftmaxContrastive(pool())), lambda x: None, optax.sgd(0.1), Trace_ELBO())
    state = svi.init(random.key(0), X)
    with pytest.raises(ValueError, match="needs a fixed base"):
        svi.update(state, X)


@pytest.mark.slow
def test_batches_of_other_sizes_go_on_with_the_same_chains():  # 10 s
    svi = SVI(
        ebm.estimate(conditional_any, ebm.SoftmaxContrastive(pool(50))), lambda x, y: None, optax.sgd(0.1), Trace_ELBO()
    )
    state = svi.init(random.key(0), X, Y)
    update = jax.jit(svi.update)
    for size in (12, 5, 1):
        state, loss = update(state, X[:size], Y[:size])
        assert jnp.isfinite(loss)


def conditional_any(x, y):
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("x", joint().conditional(y), obs=x)
        numpyro.sample("y", joint().classifier(x), obs=y)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["JEM", "ST-JEM"])
@pytest.mark.case("A7")
def test_joint_classifiers_of_two_moons_finish_with_the_defaults(name):  # 60 s each
    from flax import nnx
    from numpyro.contrib.module import nnx_module
    from sklearn.datasets import make_moons

    (x, y), (held_out, labels) = (make_moons(1000, noise=0.1, random_state=seed) for seed in (0, 1))
    x, y = x.astype(np.float32), y.astype(np.int32)
    base = dist.Normal(0, 2).expand([2]).to_event(1)
    estimator = ebm.ContrastiveDivergence() if name == "JEM" else ebm.SoftmaxContrastive()
    for seed in range(5):
        rngs = nnx.Rngs(seed)
        network = nnx.Sequential(nnx.Linear(2, 64, rngs=rngs), nnx.swish, nnx.Linear(64, 2, rngs=rngs))

        def model(x, y, network=network):
            joint = ebm.JointEnergy(nnx_module("logits", network), base)
            with numpyro.plate("data", 1000, subsample_size=64):
                batch, label = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
                numpyro.sample("x", joint.marginal() if name == "JEM" else joint.conditional(label), obs=batch)
                numpyro.sample("y", joint.classifier(batch), obs=label)

        svi = SVI(ebm.estimate(model, estimator), lambda x, y: None, optax.adam(3e-3), Trace_ELBO())
        result = svi.run(random.key(seed), 2000, x, y, progress_bar=False)
        assert not ebm.chain_report(result.state)["x"].diverged
        fitted = ebm.fitted_distribution(model, result.params, x, y, site="x")
        predicted = jnp.argmax(fitted.energy.logits(jnp.asarray(held_out, jnp.float32)), -1)
        assert float(jnp.mean(predicted == labels)) > 0.9


@pytest.mark.parametrize("num_chains", [5, 12])
def test_each_observation_joins_all_chains_where_one_density_serves_a_plate(num_chains):
    d = ebm.EnergyBased(lambda x: -THETA * x, dist.Normal(0, 1))
    still = ebm.ChainPool(ebm.kernels.ula(1e-14), num_chains)
    estimator = ebm.SoftmaxContrastive(still, positives="own")
    state = estimator.init(random.key(0), d, ebm.pool.Observations(X))
    objective, state = estimator.update(random.key(1), state, d, ebm.pool.Observations(X))
    candidates = jnp.concatenate([jnp.broadcast_to(state.position[:, None], (num_chains, 12)), X[None]])
    log_z = jax.nn.logsumexp(THETA * candidates, axis=0) - jnp.log(num_chains + 1)
    np.testing.assert_allclose(objective(X), d.unnormalized_log_prob(X) - log_z, rtol=1e-4, atol=1e-5)
