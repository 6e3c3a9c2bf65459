"""Calibration: samplers by simulation, gradient estimators by their z-scores over many seeds."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import random
from numpyro.infer import MCMC
from scipy import stats

import numpyro_ebm as ebm
from tests.estimators import test_contrastive as contrastive
from tests.estimators import test_joint as joint
from tests.estimators import test_score as score
from tests.estimators.gradients import gradients
from tests.statistics import BOUND, assert_uniform, assert_uniform_ranks

pytestmark = pytest.mark.slow

# a prior, the law of an observation of what was drawn, a step size
POSTERIORS = {
    "line": (dist.Normal(0, 1), lambda x: dist.Normal(x, 0.7), 0.4),
    "half-line": (dist.Gamma(2, 1), dist.Poisson, 0.3),
    "interval": (dist.Beta(2, 3), lambda x: dist.Binomial(5, x), 0.5),
    "plane": (
        dist.MultivariateNormal(jnp.zeros(2), jnp.array([[1, 0.7], [0.7, 1]])),
        lambda x: dist.Normal(x[..., 0] * x[..., 1], 1),
        0.1,
    ),
    "simplex": (dist.Dirichlet(jnp.array([1.0, 2.0, 3.0])), lambda x: dist.Multinomial(4, x), 0.2),
    "sphere": (ebm.SphereUniform(3), lambda x: dist.Normal(x, 0.5).to_event(1), 0.3),
}
NUM_POSTERIORS, NUM_DRAWS = 200, 19


@functools.partial(jax.tree_util.register_dataclass, data_fields=["y"], meta_fields=["name", "batch_shape"])
@dataclasses.dataclass(frozen=True)
class MinusLogLikelihood(ebm.Energy):
    """With the prior as base, the density is a posterior."""

    name: str
    y: jax.Array
    batch_shape: tuple = (NUM_POSTERIORS,)

    def __call__(self, x):
        return -POSTERIORS[self.name][1](x).log_prob(self.y)


def by_pool(d, step_size):
    return ebm.ChainPool(ebm.kernels.mala(step_size), NUM_DRAWS, num_steps=300).sample(random.key(2), d)


def by_smc(d, step_size):
    """Of some of its particles, spread over the runs of which it is made."""
    return ebm.smc_sampler(d, random.key(2), 8 * (NUM_DRAWS + 1)).particles[::8][:NUM_DRAWS]


def by_mcmc(d, step_size):
    def model():
        with numpyro.plate("posteriors", NUM_POSTERIORS):
            numpyro.sample("x", d)

    mcmc = MCMC(
        ebm.MALA(model),
        num_warmup=500,
        num_samples=1,
        num_chains=NUM_DRAWS,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(2))
    return mcmc.get_samples()["x"]


@pytest.mark.parametrize("name", POSTERIORS)
@pytest.mark.parametrize("sampler", [by_pool, by_smc, by_mcmc])
def test_the_rank_of_what_was_drawn_is_uniform(sampler, name):
    """Budget: a minute each. Among draws of its posterior (Talts et al., 2018)."""
    prior, observation, step_size = POSTERIORS[name]
    x = prior.sample(random.key(0), (NUM_POSTERIORS,))
    y = observation(x).sample(random.key(1))
    draws = sampler(ebm.EnergyBased(MinusLogLikelihood(name, y), prior.expand([NUM_POSTERIORS])), step_size)
    assert draws.shape == (NUM_DRAWS, *x.shape)
    first, draws = x.reshape(NUM_POSTERIORS, -1)[:, 0], draws.reshape(NUM_DRAWS, NUM_POSTERIORS, -1)[..., 0]
    assert_uniform_ranks(np.asarray(jnp.sum(draws < first, 0)), NUM_DRAWS + 1)


def mala(step_size, num, **kwargs):
    return ebm.ChainPool(ebm.kernels.mala(step_size), num, num_steps=3, **kwargs)


def contrast(case, model=contrastive.plated, **kwargs):
    _, x, exact, step_size = contrastive.CASES[case]
    return model, ebm.ContrastiveDivergence(mala(step_size, 50), **kwargs), (x,), exact(x).sum()


def softmax(target, positives):
    expected = joint.softmax_gradient(target, positives, 1_000)
    return joint.conditional, ebm.SoftmaxContrastive(mala(0.6, 1_000), target, positives), (joint.X, joint.Y), expected


# model, estimator, data, and the gradient that the estimator is to have in the mean
GRADIENTS = {
    "contrastive divergence": lambda: contrast("exponential"),
    "of a minibatch": lambda: contrast("exponential", contrastive.subsampled),
    "simultaneous": lambda: contrast("exponential", simultaneous=True),
    "of a class": lambda: (
        joint.conditional,
        ebm.ContrastiveDivergence(mala(0.6, 100), target="conditional"),
        (joint.X, joint.Y),
        joint.EXPECTED[joint.conditional],
    ),
    "softmax": lambda: softmax("marginal", "batch"),
    "softmax of a class": lambda: softmax("conditional", "class"),
    "sliced score": lambda: (score.gaussian, ebm.ScoreMatching("sliced", 3), (score.X,), score.GAUSSIAN),
    "sliced score on a sphere": lambda: (
        score.fisher_bingham,
        ebm.ScoreMatching("sliced", 3),
        (score.ON_SPHERE,),
        score.SPHERE,
    ),
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_z_scores_of_gradients_are_those_of_chance(name):
    """Budget: 20 seconds each. Means over ten seeds are Student's t around the exact gradient, 100 times over."""
    model, estimator, args, exact = GRADIENTS[name]()
    series = gradients(model, estimator, *args, num_updates=4, burn_in=20, num_series=100 * 10)
    t, _ = stats.ttest_1samp(np.asarray(series, np.float64).mean(1).reshape(100, 10), float(exact), axis=1)
    assert_uniform(stats.t.cdf(t, 9))
    assert abs(t.mean() / np.sqrt(9 / 7 / 100)) < BOUND
