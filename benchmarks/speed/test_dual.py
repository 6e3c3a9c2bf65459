"""An update of dual SGDA with the published move (paper A, Algorithm 1), against PyTorch and against its floor."""

import functools

import jax
import jax.numpy as jnp
import numpyro
import pytest
from conftest import Contest
from jax import lax, random

import numpyro_ebm as ebm

torch = pytest.importorskip("torch", reason="peers are an extra: pip install -e '.[peers]'")

RADIUS, STEP_SIZE = 10.0, 0.02
SIZES = {  # coordinates, neurons, observations, particles, updates per call
    "as published": (15, 64, 10_000, 20_000, 20),
    "wide": (100, 1_024, 10_000, 20_000, 2),
}
device = "cuda" if torch.cuda.is_available() else "cpu"


def points(dim: int, num: int, seed: int) -> jax.Array:
    return ebm.SphereUniform(dim).sample(random.key(seed), (num,))


def library(size: str, kernel):
    dim, num_neurons, num, num_particles, num_updates = SIZES[size]
    x = points(dim, num, 0)

    def model(x):
        energy = ebm.f1_energy("energy", dim=dim, num_neurons=num_neurons, radius=RADIUS)
        with numpyro.plate("data", x.shape[0]):
            numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(dim)), obs=x)

    dual = ebm.DualSGDA(model, step_size=STEP_SIZE, num_chains=num_particles, kernel=kernel)
    state = dual.init(random.key(1), x)

    @jax.jit
    def updates(state, x):
        return lax.fori_loop(0, num_updates, lambda _, state: dual.update(state, x)[0], state)

    def work():
        jax.block_until_ready(updates(state, x))
        return num_updates

    return work


def pytorch(size: str, compiled: bool):
    """The same update as a user of PyTorch would write it, with gradients by hand."""
    dim, num_neurons, num, num_particles, num_updates = SIZES[size]

    def tensor(x):
        return torch.tensor(jax.device_get(x), device=device)

    x, particles, neurons = (tensor(points(dim, *which)) for which in ((num, 0), (num_particles, 2), (num_neurons, 3)))
    log_weights = torch.zeros(num_neurons, device=device)
    signs = torch.ones(num_neurons, device=device)
    signs[1::2] = -1

    def gradients(points, neurons, weights):
        hidden = points @ neurons.T
        active = (hidden > 0).float()
        by_weights = RADIUS / num_neurons * hidden.relu().mean(0)
        by_neurons = RADIUS / num_neurons * weights[:, None] * (active.T @ points) / len(points)
        return active, by_weights, by_neurons

    def update(particles, neurons, log_weights):
        weights = signs * log_weights.exp()
        active, weights_model, neurons_model = gradients(particles, neurons, weights)
        _, weights_data, neurons_data = gradients(x, neurons, weights)
        noise = torch.randn_like(particles)
        force = (active * weights) @ neurons * (RADIUS / num_neurons)
        particles = particles - STEP_SIZE * force + (2 * STEP_SIZE) ** 0.5 * noise
        particles = particles / particles.norm(dim=1, keepdim=True)
        neurons = neurons + STEP_SIZE * num_neurons * (neurons_model - neurons_data)
        neurons = neurons / neurons.norm(dim=1, keepdim=True)
        log_weights = log_weights + STEP_SIZE * num_neurons * signs * (weights_model - weights_data)
        # back into the ball
        log_weights = log_weights - log_weights.exp().mean().log().clamp(min=0)
        return particles, neurons, log_weights

    if compiled:
        update = torch.compile(update)

    def work():
        state = particles, neurons, log_weights
        with torch.no_grad():
            for _ in range(num_updates):
                state = update(*state)
        state[0].sum().item()
        return num_updates

    return work


def floor(size: str):
    """Nothing but the matrix products and the random bits of an update."""
    dim, num_neurons, num, num_particles, num_updates = SIZES[size]
    x, particles, neurons = points(dim, num, 0), points(dim, num_particles, 2), points(dim, num_neurons, 3)

    @jax.jit
    def updates(key, x, particles, neurons):
        def update(_, carry):
            key, seen, particles, neurons = carry
            key, key_noise = random.split(key)
            seen = seen ^ random.bits(key_noise, particles.shape)
            active = (particles @ neurons.T > 0).astype(float)
            force = active @ neurons
            by_neurons = active.T @ particles / num_particles - (x @ neurons.T > 0).astype(float).T @ x / num
            return key, seen, particles + 1e-6 * force, neurons + 1e-6 * by_neurons

        seen = jnp.zeros(particles.shape, jnp.uint32)
        return lax.fori_loop(0, num_updates, update, (key, seen, particles, neurons))

    def work():
        jax.block_until_ready(updates(random.key(0), x, particles, neurons))
        return num_updates

    return work


CONTESTS = {
    f"dual SGDA, {size}: {dim} coordinates, {m} neurons, {n:,} observations, {particles:,} particles": Contest(
        {
            "numpyro_ebm": functools.partial(library, size, ebm.kernels.sphere.projected),
            "PyTorch, eager": functools.partial(pytorch, size, compiled=False),
            "PyTorch, compiled": functools.partial(pytorch, size, compiled=True),
            "its products and bits": functools.partial(floor, size),
            "numpyro_ebm, MALA": functools.partial(library, size, None),
        },
        "update",
        {"PyTorch, eager": 2, "its products and bits": round(1 / 1.5, 2)},
    )
    for size, (dim, m, n, particles, _) in SIZES.items()
}


def test_update(race, contest, turn, contender):
    race(CONTESTS[contest], contest, contender)
