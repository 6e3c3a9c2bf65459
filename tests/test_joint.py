"""Joint energies: their three densities, what they cost, and faulty labels."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from flax import nnx
from jax import random
from numpyro.contrib.module import nnx_module
from numpyro.infer import SVI, Trace_ELBO

import numpyro_ebm as ebm

BASE = dist.Normal(0, 1).expand([2]).to_event(1)
WEIGHTS = jnp.array([[1.0, -0.5], [0.3, 2.0], [-1.0, 0.1]])
X = random.normal(random.key(0), (7, 2))
Y = jnp.array([0, 1, 2, 0, 1, 2, 0])


def logits(x):
    return WEIGHTS @ x + jnp.array([0.0, 0.5, -0.2])


JOINT = ebm.JointEnergy(logits, BASE)


@pytest.mark.parametrize(
    "joint",
    [JOINT, ebm.JointEnergy(lambda x, y: logits(x)[y], BASE, num_classes=3)],
    ids=["logits", "function of x and y"],
)
@pytest.mark.case("A12")
def test_the_three_densities_are_those_of_the_logits(joint):
    f = jax.vmap(logits)(X)
    log_base = BASE.log_prob(X)
    conditional = joint.conditional(Y).unnormalized_log_prob(X)
    marginal = joint.marginal().unnormalized_log_prob(X)
    classifier = joint.classifier(X)
    np.testing.assert_allclose(conditional, log_base + f[jnp.arange(7), Y], atol=1e-5)
    np.testing.assert_allclose(marginal, log_base + jax.nn.logsumexp(f, -1), atol=1e-5)
    np.testing.assert_allclose(conditional - marginal, classifier.log_prob(Y), atol=1e-5)
    assert isinstance(classifier, dist.CategoricalLogits)
    assert joint.num_classes == 3


def test_scores_are_those_of_the_conditional_and_the_marginal():
    p = jax.nn.softmax(jax.vmap(logits)(X))
    np.testing.assert_allclose(JOINT.conditional(Y).score(X), WEIGHTS[Y] - X, atol=1e-5)
    np.testing.assert_allclose(JOINT.marginal().score(X), p @ WEIGHTS - X, atol=1e-5)


def test_labels_give_the_batch_shape():
    assert JOINT.conditional(1).batch_shape == ()
    assert JOINT.conditional(Y.reshape(7, 1)).batch_shape == (7, 1)
    pairs = JOINT.conditional(Y).unnormalized_log_prob(X[:, None])
    assert pairs.shape == (7, 7)
    np.testing.assert_allclose(jnp.diag(pairs), JOINT.conditional(Y).unnormalized_log_prob(X), atol=1e-6)


def test_logits_are_computed_once_for_each_candidate():
    joint = ebm.JointEnergy(lambda x: jnp.tanh(WEIGHTS @ x), BASE)
    jaxpr = str(jax.make_jaxpr(joint.conditional(Y).unnormalized_log_prob)(X[:5, None]))
    (shape,) = re.findall(r"f32\[([0-9,]+)\] = tanh", jaxpr)
    assert sorted(shape.split(",")) == ["3", "5"]


def test_transformations_of_a_joint_energy():
    def density(joint, x):
        return joint.conditional(Y).unnormalized_log_prob(x)

    np.testing.assert_allclose(jax.jit(density)(JOINT, X), density(JOINT, X), rtol=1e-6)

    def scaled(scale):
        return ebm.JointEnergy(lambda x: scale * logits(x), BASE)

    stacked = jax.vmap(lambda s: scaled(s).marginal().unnormalized_log_prob(X))(jnp.arange(3.0))
    loop = jnp.stack([scaled(s).marginal().unnormalized_log_prob(X) for s in jnp.arange(3.0)])
    np.testing.assert_allclose(stacked, loop, rtol=1e-6)


@pytest.mark.slow  # 12 s
def test_a_fitted_joint_energy_comes_back_from_its_conditional():
    def model(x, y):
        joint = ebm.JointEnergy(nnx_module("logits", nnx.Linear(2, 3, rngs=nnx.Rngs(0))), BASE)
        with numpyro.plate("data", 7):
            numpyro.sample("x", joint.conditional(y), obs=x)
            numpyro.sample("y", joint.classifier(x), obs=y)

    svi = SVI(ebm.estimate(model, ebm.SoftmaxContrastive()), lambda x, y: None, optax.sgd(0.1), Trace_ELBO())
    result = svi.run(random.key(0), 3, X, Y, progress_bar=False)
    fitted = ebm.fitted_distribution(model, result.params, X, Y, site="x")
    joint = ebm.JointEnergy(fitted.energy.logits, fitted.base)
    assert joint.num_classes == 3
    kernel, bias = result.params["logits$params"]["kernel"], result.params["logits$params"]["bias"]
    np.testing.assert_allclose(joint.classifier(X).logits, X @ kernel + bias, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ebm.JointEnergy(3, BASE), TypeError, "logits must be callable"),
        (lambda: ebm.JointEnergy(logits, 3), TypeError, "base must be a NumPyro distribution"),
        (lambda: ebm.JointEnergy(logits, dist.Normal(0, 1).expand([2])), ValueError, "empty batch shape"),
        (lambda: ebm.JointEnergy(lambda x: x.sum(), BASE), ValueError, r"got shape \(\): give num_classes"),
        (lambda: ebm.JointEnergy(lambda x: jnp.ones((3, 1)), BASE), ValueError, r"got shape \(3, 1\)"),
        (lambda: ebm.JointEnergy(lambda x: jnp.ones((5, 2)) @ jnp.ones((3, 2)), BASE), ValueError, "can't be called"),
        (lambda: ebm.JointEnergy(lambda x, y: jnp.ones(2), BASE, num_classes=3), ValueError, "can't be called"),
        (lambda: ebm.JointEnergy(lambda x, y: x[0], BASE, num_classes=0), ValueError, "num_classes"),
        (lambda: JOINT.conditional(jnp.array([0, 3])), ValueError, "from 0 to 2, got 3 at row 1"),
        (lambda: JOINT.conditional(jnp.array([0, -1, 1])), ValueError, "from 0 to 2, got -1 at row 1"),
        (lambda: JOINT.conditional(jnp.array([0.0, 1.0])), ValueError, "labels must be integers, got float32"),
        (lambda: JOINT.conditional(jnp.array([True, False])), ValueError, "labels must be integers, got bool"),
        (lambda: JOINT.classifier(X).log_prob(Y + 1), ValueError, "from 0 to 2, got 3"),
        (lambda: JOINT.classifier(X).log_prob(Y * 1.0), ValueError, "labels must be integers"),
    ],
)
def test_faulty_input_is_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("part", ["classifier", "conditional"])
@pytest.mark.parametrize(("fault", "trainer"), [(5, "SVI"), (-1, "DualSGDA")])
def test_a_faulty_label_anywhere_in_subsampled_data_is_named_before_training(part, fault, trainer):
    """Row 6 may not be in the first minibatch."""

    def model(x, y):
        joint = ebm.JointEnergy(lambda x: numpyro.param("theta", 1.0) * logits(x), BASE)
        with numpyro.plate("data", 7, subsample_size=2):
            xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
            numpyro.sample("x", joint.marginal() if part == "classifier" else joint.conditional(yb), obs=xb)
            if part == "classifier":
                numpyro.sample("y", joint.classifier(xb), obs=yb)

    svi = SVI(ebm.estimate(model, ebm.ContrastiveDivergence()), lambda x, y: None, optax.sgd(0.1), Trace_ELBO())
    if trainer == "DualSGDA":
        svi = ebm.DualSGDA(model, step_size=1e-2, num_chains=10)
    for seed in range(3):
        with pytest.raises(ValueError, match=f"labels must be from 0 to 2, got {fault} at row"):
            svi.init(random.key(seed), X, Y.at[6].set(fault))


def test_mutual_information_is_that_of_equation_14():
    probs = np.asarray(JOINT.classifier(X).probs)
    p_y = probs.mean(0)
    entropy = -np.sum(p_y * np.log(p_y))
    expected = entropy + np.mean(np.sum(probs * np.log(probs), -1))
    np.testing.assert_allclose(ebm.mutual_information(JOINT, X), expected, rtol=1e-5)
