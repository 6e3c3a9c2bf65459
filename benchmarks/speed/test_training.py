"""A training step: persistent contrastive divergence against torchebm and ebmkit, ST-JEM against PyTorch."""

import functools

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from conftest import Contest
from flax import linen as nn
from jax import lax, random
from networks import WIDTHS, floor_of_updates, torch_energy, torch_network, torchebm_energy
from numpyro.contrib.module import flax_module
from numpyro.infer import SVI, Trace_ELBO
from sklearn.datasets import load_digits, make_moons

import numpyro_ebm as ebm

torch = pytest.importorskip("torch", reason="peers are an extra: pip install -e '.[peers]'")

device = "cuda" if torch.cuda.is_available() else "cpu"
BATCH, NUM_MOVES, STEP_SIZE, CAPACITY, LEARNING_RATE = 1_024, 10, 0.01, 8_192, 1e-3
DIGITS_BATCH, NUM_CLASSES, DIGITS_WIDTHS = 128, 10, (64, 256, 256, 10)
NUM_UPDATES = 10


class Network(nn.Module):
    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x):
        for width in self.widths[1:-1]:
            x = nn.silu(nn.Dense(width)(x))
        x = nn.Dense(self.widths[-1])(x)
        return x[..., 0] if self.widths[-1] == 1 else x


def updates_of(model, estimator, *data):
    svi = SVI(ebm.estimate(model, estimator), lambda *data: None, optax.adam(LEARNING_RATE), Trace_ELBO())
    state = svi.init(random.key(0), *data)

    @jax.jit
    def updates(state, *data):
        return lax.fori_loop(0, NUM_UPDATES, lambda _, state: svi.update(state, *data)[0], state)

    def work():
        jax.block_until_ready(updates(state, *data))
        return NUM_UPDATES

    return work


def moons() -> np.ndarray:
    return make_moons(20_000, noise=0.1, random_state=0)[0].astype(np.float32)


def contrastive_by_library():
    def model(x):
        energy = flax_module("energy", Network(WIDTHS), input_shape=(2,))
        with numpyro.plate("data", x.shape[0], subsample_size=BATCH):
            batch = numpyro.subsample(x, event_dim=1)
            numpyro.sample("x", ebm.EnergyBased(energy, dist.Normal(0, 1).expand([2]).to_event(1)), obs=batch)

    kernel = ebm.kernels.ula(STEP_SIZE)
    pool = ebm.ChainPool(kernel, CAPACITY, num_chains=BATCH, num_steps=NUM_MOVES, reinit_prob=0.05)
    return updates_of(model, ebm.ContrastiveDivergence(pool), jax.numpy.asarray(moons()))


def steps_of(loss, network):
    """What a training loop of PyTorch does: a random minibatch, a loss, a step of Adam."""
    x = torch.tensor(moons(), device=device)
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)

    def work():
        for _ in range(NUM_UPDATES):
            batch = x[torch.randint(len(x), (BATCH,), device=device)]
            optimizer.zero_grad()
            loss(batch).backward()
            optimizer.step()
        return NUM_UPDATES

    return work


def contrastive_by_torchebm():
    losses, samplers = pytest.importorskip("torchebm.losses"), pytest.importorskip("torchebm.samplers")
    model = torchebm_energy().to(device)
    sampler = samplers.LangevinDynamics(model, step_size=STEP_SIZE, device=device)
    loss = losses.ContrastiveDivergence(model, sampler, NUM_MOVES, persistent=True, buffer_size=CAPACITY, device=device)
    return steps_of(lambda batch: loss(batch)[0], model)


def contrastive_by_ebmkit():
    ebmkit = pytest.importorskip("ebm")
    model = torch_energy().to(device)
    sampler = ebmkit.LangevinDynamics(STEP_SIZE, NUM_MOVES)
    loss = ebmkit.ContrastiveDivergence(sampler, buffer=ebmkit.ReplayBuffer(CAPACITY, (2,)))
    return steps_of(lambda batch: loss(model, batch).loss, model)


def digits() -> tuple[np.ndarray, np.ndarray]:
    x, y = load_digits(return_X_y=True)
    return (x / 8 - 1).astype(np.float32), y


def joint_by_library():
    def model(x, y):
        base = dist.Normal(0, 1).expand([64]).to_event(1)
        joint = ebm.JointEnergy(flax_module("logits", Network(DIGITS_WIDTHS), input_shape=(64,)), base)
        with numpyro.plate("data", x.shape[0], subsample_size=DIGITS_BATCH):
            xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
            numpyro.sample("x", joint.conditional(yb), obs=xb)
            numpyro.sample("y", joint.classifier(xb), obs=yb)

    kernel = ebm.kernels.ula(STEP_SIZE)
    pool = ebm.ChainPool(kernel, CAPACITY, num_chains=DIGITS_BATCH, num_steps=NUM_MOVES, reinit_prob=0.05)
    x, y = digits()
    return updates_of(model, ebm.SoftmaxContrastive(pool), jax.numpy.asarray(x), jax.numpy.asarray(y))


def joint_by_pytorch():
    """Paper B's loss as a user of PyTorch would write it: log p(y|x), and log p(x|y) by a softmax over minibatch and chains."""
    x, y = (torch.tensor(array, device=device) for array in digits())
    network = torch_network(DIGITS_WIDTHS).to(device)
    optimizer = torch.optim.Adam(network.parameters(), LEARNING_RATE)
    buffer = torch.randn(CAPACITY, 64, device=device)

    def moved(chains):
        for _ in range(NUM_MOVES):
            chains.requires_grad_()
            score = network(chains).logsumexp(-1) - chains.square().sum(-1) / 2
            (slope,) = torch.autograd.grad(score.sum(), chains)
            noise = torch.randn_like(chains)
            chains = chains.detach() + STEP_SIZE * slope + (2 * STEP_SIZE) ** 0.5 * noise
        return chains

    def work():
        for _ in range(NUM_UPDATES):
            index = torch.randint(len(x), (DIGITS_BATCH,), device=device)
            picked = torch.randint(CAPACITY, (DIGITS_BATCH,), device=device)
            fresh = torch.rand(DIGITS_BATCH, 1, device=device) < 0.05
            begun = torch.where(fresh, torch.randn(DIGITS_BATCH, 64, device=device), buffer[picked])
            chains = moved(begun)
            buffer[picked] = chains
            of_data, of_chains = network(x[index]), network(chains)
            labels = y[index]
            own = of_data.gather(1, labels[:, None])[:, 0]
            candidates = torch.cat([of_data, of_chains]).T[labels]
            generative = own - candidates.logsumexp(1)
            loss = -generative.mean() + torch.nn.functional.cross_entropy(of_data, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return NUM_UPDATES

    return work


CONTESTS = {
    f"persistent contrastive divergence: batch {BATCH:,}, {NUM_MOVES} moves, a 2-256-256-1 network": Contest(
        {
            "numpyro_ebm": contrastive_by_library,
            "torchebm": contrastive_by_torchebm,
            "ebmkit": contrastive_by_ebmkit,
            "its matrix products": functools.partial(floor_of_updates, WIDTHS, BATCH, NUM_MOVES, NUM_UPDATES),
        },
        "update",
        {"torchebm": 4, "ebmkit": 4},
    ),
    f"ST-JEM on digits: batch {DIGITS_BATCH}, {NUM_MOVES} moves, a 64-256-256-10 network": Contest(
        {
            "numpyro_ebm": joint_by_library,
            "PyTorch, eager": joint_by_pytorch,
            "its matrix products": functools.partial(
                floor_of_updates, DIGITS_WIDTHS, DIGITS_BATCH, NUM_MOVES, NUM_UPDATES
            ),
        },
        "update",
        {"PyTorch, eager": 2},
    ),
}


def test_update(race, contest, turn, contender):
    race(CONTESTS[contest], contest, contender)
