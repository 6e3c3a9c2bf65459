"""The networks of the contests, the same for all contenders."""

from itertools import pairwise

import jax
import jax.numpy as jnp
from jax import random
from jax.tree_util import Partial

WIDTHS = (2, 256, 256, 1)


def _energy(weights, x):
    for kernel, bias in weights[:-1]:
        x = jax.nn.silu(x @ kernel + bias)
    kernel, bias = weights[-1]
    return jnp.squeeze(x @ kernel + bias, -1)


def jax_network() -> Partial:
    keys = random.split(random.key(3), len(WIDTHS) - 1)
    sizes = pairwise(WIDTHS)
    weights = [(random.normal(key, (i, o)) / i**0.5, jnp.zeros(o)) for key, (i, o) in zip(keys, sizes, strict=True)]
    return Partial(_energy, weights)


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
