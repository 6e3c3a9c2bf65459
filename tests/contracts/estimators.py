"""Parts of estimators: the first update of SVI, in every model that they serve."""

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import optax
from jax import random
from numpyro.infer import SVI, Trace_ELBO

import numpyro_ebm as ebm
from tests.contracts.parts import Part, counted

X = random.normal(random.key(0), (12, 2))
Y = jnp.arange(12) % 3
BASE = dist.Normal(0, 1).expand([2]).to_event(1)


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


def no_guide(x, y):
    pass


def trained(model, estimator):
    """Losses of two updates and of a whole evaluation, parameters and chains."""

    def call(rng_key, x):
        svi = SVI(ebm.estimate(model, estimator), no_guide, optax.sgd(1e-2), Trace_ELBO())
        state, first = svi.update(svi.init(rng_key, x, Y), x, Y)
        state, second = svi.update(state, x, Y)
        return first, second, svi.evaluate(state, x, Y), svi.get_params(state), state.mutable_state

    return Part(call, X, True)


ESTIMATORS = {f"estimator, {name}": trained(*case) for name, case in CASES.items()}
