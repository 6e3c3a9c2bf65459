"""Gradients that an estimator gives a parameter that is held fixed."""

import jax
import jax.numpy as jnp
import optax
from jax import random
from numpyro.infer import SVI, Trace_ELBO

import numpyro_ebm as ebm


def keep_gradients():
    """An optax optimiser that keeps parameters, and puts the gradients into its state."""
    return optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
    )


def gradients(model, estimator, *args, num_updates=300, burn_in=100, loss=None, num_series=4):
    """Series (num_series, num_updates, ...) of the loss's gradient in the parameter theta, held fixed."""
    svi = SVI(ebm.estimate(model, estimator), lambda *args: None, keep_gradients(), loss or Trace_ELBO())

    def series(key):
        state = svi.init(key, *args)

        def update(state, _):
            state, _ = svi.update(state, *args)
            return state, state.optim_state[1][1]["theta"]

        return jax.lax.scan(update, state, None, length=burn_in + num_updates)[1][burn_in:]

    return jax.jit(jax.vmap(series))(random.split(random.key(0), num_series))
