"""The observed energy-based sites of a model at given values of its variables."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import random
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_ebm.distributions import EnergyBased, ambient, unmasked, unwrap
from numpyro_ebm.handlers.estimate import site_batch_shape


class Observed(NamedTuple):
    """An observed energy-based site: its distribution, its value over its whole batch, and what masks leave."""

    distribution: EnergyBased
    value: jax.Array
    mask: jax.Array | None


def observed_sites(model: Callable, values: dict, args: tuple, kwargs: dict) -> dict[str, Observed]:
    """The observed energy-based sites of a model, where its latent variables and parameters have these values."""
    found: dict = {}

    class Find(Messenger):
        def process_message(self, msg):
            distribution = unwrap(msg["fn"]) if msg["type"] == "sample" and msg["is_observed"] else None
            if distribution is None:
                return
            batch_shape = site_batch_shape(msg)
            value = jnp.broadcast_to(msg["value"], batch_shape + distribution.event_shape)
            found[msg["name"]] = Observed(distribution, value, unmasked(msg["fn"], batch_shape))

    with handlers.block(), Find():
        handlers.substitute(handlers.seed(ambient(model), random.key(0)), data=values)(*args, **kwargs)
    return found
