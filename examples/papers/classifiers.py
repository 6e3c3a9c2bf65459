"""What the scripts on paper B share: data, networks, the models as NumPyro programs, and their training, all seeds at once."""

from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from jax import lax, random
from jax.tree_util import Partial
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI, Trace_ELBO
from sklearn.datasets import load_breast_cancer, load_digits

import numpyro_ebm as ebm

BATCH, POOL, TEMPERATURE = 64, 1_000, 0.1
SEEDS = 3


class Data(NamedTuple):
    x: np.ndarray
    y: np.ndarray
    held_out: tuple[np.ndarray, np.ndarray]


def _split(x, y, num_train: int) -> Data:
    order = np.random.default_rng(0).permutation(len(y))
    x, y = x[order].astype(np.float32), y[order].astype(np.int32)
    return Data(x[:num_train], y[:num_train], (x[num_train:], y[num_train:]))


def digits() -> Data:
    """8 x 8 pixels in [-1, 1], ten classes (E. Alpaydin and C. Kaynak, UCI, by scikit-learn)."""
    data = load_digits()
    return _split(data.data / 8 - 1, data.target, 1_400)


def tumours() -> Data:
    """Thirty measures of cell nuclei, standardised, two classes (W. Wolberg et al., UCI, by scikit-learn)."""
    data = load_breast_cancer()
    return _split((data.data - data.data.mean(0)) / data.data.std(0), data.target, 400)


class Perceptron(nn.Module):
    activation: Any
    num_classes: int
    width: int = 256

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = self.activation(nn.Dense(self.width)(x))
        return nn.Dense(self.num_classes)(x)


class Convolutional(nn.Module):
    activation: Any
    num_classes: int

    @nn.compact
    def __call__(self, x):
        x = jnp.reshape(x, (*x.shape[:-1], 8, 8, 1))
        for width in (16, 32):
            x = self.activation(nn.Conv(width, (3, 3), (2, 2))(x))
        x = self.activation(nn.Dense(128)(jnp.reshape(x, (*x.shape[:-3], -1))))
        return nn.Dense(self.num_classes)(x)


def base_of(x) -> dist.Distribution:
    return dist.Normal(0, 1).expand([x.shape[-1]]).to_event(1)


def program(kind: str, network):
    """log p(y|x), and before it nothing, log p(x) for JEM, log p(x|y) for ST-JEM."""

    def model(x, y):
        base = base_of(x)
        joint = ebm.JointEnergy(flax_module("logits", network, input_shape=base.event_shape), base)
        with numpyro.plate("data", x.shape[0], subsample_size=BATCH):
            xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
            if kind.startswith("JEM"):
                numpyro.sample("x", joint.marginal(), obs=xb)
            if kind.startswith("ST-JEM"):
                numpyro.sample("x", joint.conditional(yb), obs=xb)
            numpyro.sample("y", joint.classifier(xb), obs=yb)

    return model


def buffer(num_steps: int) -> ebm.ChainPool:
    """JEM's replay buffer, of Langevin moves with reduced noise."""
    kernel = ebm.kernels.ula(0.05, temperature=TEMPERATURE)
    return ebm.ChainPool(kernel, POOL, num_chains=BATCH, num_steps=num_steps, reinit_prob=0.05)


class Runs(NamedTuple):
    """Trained models of `SEEDS` seeds: joint energies, and for each how its chains were (None without chains)."""

    joints: list[ebm.JointEnergy]
    report: Any
    states: Any

    @property
    def num_diverged(self) -> int:
        return 0 if self.report is None else int(np.sum(self.report.diverged))

    def scores(self, score) -> np.ndarray:
        """`score` of each joint energy."""
        return np.array([float(score(joint)) for joint in self.joints])


def train(model, estimator, network, data: Data, num_epochs: int, learning_rate, num_seeds: int = SEEDS) -> Runs:
    """Train all seeds side by side. Without an estimator the model is a plain classifier."""
    model = model if estimator is None else ebm.estimate(model, estimator)
    svi = SVI(model, lambda x, y: None, optax.adam(learning_rate), Trace_ELBO())
    num_updates = num_epochs * -(-len(data.x) // BATCH)
    x, y = jnp.asarray(data.x), jnp.asarray(data.y)

    def run(rng_key):
        state = svi.init(rng_key, x, y)
        return lax.scan(lambda state, _: (svi.update(state, x, y)[0], None), state, length=num_updates)[0]

    states = jax.jit(jax.vmap(run))(random.split(random.key(0), num_seeds))
    weights = svi.get_params(states)["logits$params"]
    joints = []
    for seed in range(num_seeds):
        own = jax.tree.map(lambda leaf, seed=seed: leaf[seed], weights)
        joints.append(ebm.JointEnergy(Partial(network.apply, {"params": own}), base_of(x)))
    return Runs(joints, None if estimator is None else ebm.chain_report(states)["x"], states)


def accuracy(joint: ebm.JointEnergy, x, y) -> float:
    return float(jnp.mean(jnp.argmax(joint.classifier(x).logits, -1) == y))


@partial(jax.jit, static_argnames="num_moves")
def generate(joint: ebm.JointEnergy, labels, rng_key, num_moves: int = 500):
    """An example of p(x|y) for each of the given classes, by Langevin moves from the base."""
    pool = ebm.ChainPool(ebm.kernels.ula(0.05, temperature=TEMPERATURE), 1, num_steps=num_moves)
    return pool.sample(rng_key, joint.conditional(labels))[0]
