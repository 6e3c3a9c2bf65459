"""The networks of the contests, the same for all contenders."""

from collections.abc import Callable
from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import lax, random
from jax.tree_util import Partial

WIDTHS = (2, 256, 256, 1)


def _energy(weights, x):
    for kernel, bias in weights[:-1]:
        x = jax.nn.silu(x @ kernel + bias)
    kernel, bias = weights[-1]
    return jnp.squeeze(x @ kernel + bias, -1)


def jax_weights(widths: tuple[int, ...] = WIDTHS) -> list[tuple[jax.Array, jax.Array]]:
    keys = random.split(random.key(3), len(widths) - 1)
    sizes = pairwise(widths)
    return [(random.normal(key, (i, o)) / i**0.5, jnp.zeros(o)) for key, (i, o) in zip(keys, sizes, strict=True)]


def jax_network() -> Partial:
    return Partial(_energy, jax_weights())


def floor_of_moves(widths: tuple[int, ...], num_chains: int, num_moves: int) -> Callable[[], int]:
    """Nothing but the matrix products of `num_moves` gradients in x."""
    kernels = [kernel for kernel, _ in jax_weights(widths)]
    moved = jax.jit(lambda x: _moved(kernels, x, num_moves))
    x = random.normal(random.key(0), (num_chains, widths[0]))

    def work():
        jax.block_until_ready(moved(x))
        return num_moves

    return work


def floor_of_updates(widths: tuple[int, ...], batch: int, num_moves: int, num_updates: int) -> Callable[[], int]:
    """Nothing but the matrix products of updates: those of the chains' moves, and of the loss of data and chains."""
    x = random.normal(random.key(0), (batch, widths[0]))

    @jax.jit
    def updates(kernels, chains):
        def update(_, carry):
            kernels, chains = carry
            chains = _moved(kernels, chains, num_moves)
            _, slopes = _products(kernels, jnp.concatenate([x, chains]))
            return [kernel + 1e-6 * slope for kernel, slope in zip(kernels, slopes, strict=True)], chains

        return lax.fori_loop(0, num_updates, update, (kernels, chains))

    kernels = [kernel for kernel, _ in jax_weights(widths)]

    def work():
        jax.block_until_ready(updates(kernels, x))
        return num_updates

    return work


def _moved(kernels, x, num_moves):
    return lax.fori_loop(0, num_moves, lambda _, x: x + 1e-6 * _products(kernels, x)[0], x)


def _products(kernels, x):
    """Forwards and back, and those of the kernels' gradients."""
    inputs, slopes = [], []
    for kernel in kernels:
        inputs.append(x)
        x = x @ kernel
    for kernel, seen in zip(kernels[::-1], inputs[::-1], strict=True):
        slopes.insert(0, seen.T @ x)
        x = x @ kernel.T
    return x, slopes


def torch_network(widths: tuple[int, ...] = WIDTHS):
    import torch

    layers: list = []
    for i, o in pairwise(widths):
        layers += [torch.nn.Linear(i, o), torch.nn.SiLU()]
    return torch.nn.Sequential(*layers[:-1])


def torch_energy():
    """The network and a standard normal base, as a module."""
    import torch

    class Energy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.network = torch_network()

        def forward(self, x):
            return self.network(x).squeeze(-1) + x.square().sum(-1) / 2

    return Energy()


def torchebm_energy():
    """The same as torchebm wants it."""
    from torchebm.core import BaseModel

    class Model(BaseModel):
        def __init__(self):
            super().__init__()
            self.energy = torch_energy()

        def forward(self, x):
            return self.energy(x)

    return Model()
