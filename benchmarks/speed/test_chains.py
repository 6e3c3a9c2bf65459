"""Langevin and MALA moves of 1,024 chains on a network's energy, against peers and bare BlackJAX."""

import functools

import blackjax
import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import pytest
from blackjax.mcmc.diffusions import DiffusionState, overdamped_langevin
from conftest import Contest
from jax import lax, random
from networks import WIDTHS, floor_of_moves, jax_network, torch_energy, torchebm_energy

import numpyro_ebm as ebm

torch = pytest.importorskip("torch", reason="peers are an extra: pip install -e '.[peers]'")

NUM_CHAINS, NUM_MOVES, STEP_SIZE = 1_024, 50, 0.01
device = "cuda" if torch.cuda.is_available() else "cpu"

KERNELS = {"Langevin": ebm.kernels.ula, "MALA": ebm.kernels.mala}


def start() -> jax.Array:
    return random.normal(random.key(0), (NUM_CHAINS, 2))


def library(name: str):
    energy = jax_network()
    base = dist.Normal(0, 1).expand([2]).to_event(1)
    pool = ebm.ChainPool(KERNELS[name](STEP_SIZE), NUM_CHAINS, num_steps=NUM_MOVES)

    @jax.jit
    def moves(key, energy, state):
        return pool.advance(key, state, None, ebm.EnergyBased(energy, base))

    state = pool.start(random.key(0), ebm.EnergyBased(energy, base))

    def work():
        jax.block_until_ready(moves(random.key(1), energy, state))
        return NUM_MOVES

    return work


def bare_blackjax(name: str):
    energy, position = jax_network(), start()

    @jax.jit
    def moves(key, energy, position):
        def logdensity(x):
            return -energy(x) - jnp.sum(x**2) / 2

        if name == "MALA":
            kernel = blackjax.mala(logdensity, STEP_SIZE)
            initial, step = jax.vmap(kernel.init)(position), kernel.step
        else:
            one = overdamped_langevin(jax.value_and_grad(logdensity))
            initial = jax.vmap(lambda x: DiffusionState(x, *jax.value_and_grad(logdensity)(x)))(position)

            def step(key, state):
                return one(key, state, STEP_SIZE), None

        def move(state, key):
            return jax.vmap(step)(random.split(key, NUM_CHAINS), state)[0], None

        return lax.scan(move, initial, random.split(key, NUM_MOVES))[0]

    def work():
        jax.block_until_ready(moves(random.key(1), energy, position))
        return NUM_MOVES

    return work


def torch_start():
    return torch.tensor(jax.device_get(start()), device=device)


def by_torchebm():
    samplers = pytest.importorskip("torchebm.samplers")
    sampler = samplers.LangevinDynamics(torchebm_energy().to(device), step_size=STEP_SIZE, device=device)
    position = torch_start()

    def work():
        sampler.sample(x=position, n_steps=NUM_MOVES).sum().item()
        return NUM_MOVES

    return work


def by_ebmkit(name: str):
    samplers = pytest.importorskip("ebm.samplers")
    kind = {"Langevin": samplers.LangevinDynamics, "MALA": samplers.MALA}[name]
    sampler, model, position = kind(STEP_SIZE, NUM_MOVES), torch_energy().to(device), torch_start()

    def work():
        sampler.sample(model, position).sum().item()
        return NUM_MOVES

    return work


CONTESTS = {
    f"{name}: {NUM_CHAINS:,} chains on a 2-256-256-1 network": Contest(
        {
            "numpyro_ebm": functools.partial(library, name),
            "BlackJAX under vmap": functools.partial(bare_blackjax, name),
            **({"torchebm": by_torchebm} if name == "Langevin" else {}),
            "ebmkit": functools.partial(by_ebmkit, name),
            "its matrix products": functools.partial(floor_of_moves, WIDTHS, NUM_CHAINS, NUM_MOVES),
        },
        "move",
        {"torchebm": 4, "BlackJAX under vmap": 0.95},
    )
    for name in KERNELS
}


def test_moves(race, contest, turn, contender):
    race(CONTESTS[contest], contest, contender)
