"""What Langevin kernels of NumPyro's `MCMC` share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from numpyro.infer.hmc_util import dual_averaging
from numpyro.util import is_prng_key, not_jax_tracer

from numpyro_ebm.energies import check_positive
from numpyro_ebm.infer.model_kernel import ModelKernel
from numpyro_ebm.kernels import LangevinState


class AdaptState(NamedTuple):
    """Step size; the state of its adaptation and each element's recent acceptance (None where it is fixed)."""

    step_size: jax.Array
    dual_averaging: Any
    recent_acceptance: Any


class LangevinMCMCState(NamedTuple):
    """State of :class:`ULA` and :class:`MALA`.

    Attributes
    ----------
    i
        Iteration, warm-up included.
    z
        Values of the latent sites: on a sphere as they are, elsewhere unconstrained.
    potential_energy
        Minus the log-density of `z`.
    logdensity, z_grad
        Log-density of `z`, per element where elements are accepted on their own, and its gradient.
    accept_prob
        Probability of the last acceptance; the mean over elements.
    mean_accept_prob
        Its mean since the start, or since warm-up.
    diverging
        Whether a proposal was not finite, or had an energy error over 1000.
    num_nonfinite
        Proposals that were not finite, in this iteration.
    adapt_state
        :class:`AdaptState`, with the step size.
    rng_key
        Key of the next iteration.
    """

    i: jax.Array
    z: Any
    potential_energy: jax.Array
    logdensity: jax.Array
    z_grad: Any
    accept_prob: jax.Array
    mean_accept_prob: jax.Array
    diverging: jax.Array
    num_nonfinite: jax.Array
    adapt_state: AdaptState
    rng_key: jax.Array


class LangevinMCMC(ModelKernel):
    """What :class:`ULA` and :class:`MALA` share."""

    def __init__(self, model, potential_fn, step_size, init_strategy):
        super().__init__(model, potential_fn, init_strategy)
        check_positive("step_size", step_size)
        self._step_size = step_size

    @property
    def default_fields(self):
        return ("z", "potential_energy", "accept_prob", "diverging", "num_nonfinite", "adapt_state.step_size")

    def get_diagnostics_str(self, state):
        return f"step size {state.adapt_state.step_size:.2e}. acc. prob={state.mean_accept_prob:.2f}"

    def init(self, rng_key, num_warmup, init_params, model_args, model_kwargs):
        """Return the first state, or a batch of states for a batch of keys.

        Raises
        ------
        ValueError
            If `init_params` are missing where there is no model, or density or gradient are not
            finite there.
        IntractableNormalizerError
            If the model has an energy-based site whose normaliser depends on a latent variable.
        """
        self._num_warmup = num_warmup
        model_kwargs = {} if model_kwargs is None else model_kwargs
        vectorized = not is_prng_key(rng_key)
        keys = jax.vmap(random.split, out_axes=1)(rng_key) if vectorized else random.split(rng_key)
        rng_key, key_model = keys[0], keys[1]
        if self._model is not None:
            init_params = self._init_model(key_model, init_params, model_args, model_kwargs)
        elif init_params is None:
            raise ValueError(
                "init_params are needed with potential_fn, which doesn't say where to start: mcmc.run(rng_key, init_params=...)"
            )

        def start(rng_key, z):
            state = self._kernel(self._step_size).init(z, self._logdensity_fn(model_args, model_kwargs))
            dtype = state.logdensity.dtype
            step_size = jnp.asarray(self._step_size, dtype)
            adapt_state = AdaptState(step_size, None, None)
            if self._adapts:
                averaging = dual_averaging()[0](jnp.log(10 * step_size))
                adapt_state = AdaptState(step_size, averaging, jnp.ones_like(state.logdensity))
            zero = jnp.zeros((), dtype)
            return LangevinMCMCState(
                jnp.zeros((), jnp.int32),
                state.position,
                -jnp.sum(state.logdensity),
                state.logdensity,
                state.logdensity_grad,
                zero,
                zero,
                jnp.array(False),
                jnp.zeros((), jnp.int32),
                adapt_state,
                rng_key,
            )

        state = jax.vmap(start)(rng_key, init_params) if vectorized else start(rng_key, init_params)
        self._check_start(state, vectorized)
        return state

    def _check_start(self, state, vectorized):
        if not not_jax_tracer(state.potential_energy):
            return
        energies = np.atleast_1d(np.asarray(state.potential_energy))
        count = len(energies)
        gradients = [np.asarray(g).reshape(count, -1) for g in jax.tree.leaves(state.z_grad) if np.size(g)]
        for chain in range(count):
            finite = np.isfinite(energies[chain]), all(np.isfinite(g[chain]).all() for g in gradients)
            if not all(finite):
                z = jax.tree.map(lambda z, c=chain: np.asarray(z)[c] if vectorized else np.asarray(z), state.z)
                what = "gradient" if finite[0] else "log-density"
                raise ValueError(
                    f"chain {chain if vectorized else ''}{' ' if vectorized else ''}can't start: its {what} is not finite at "
                    f"{z} (potential energy {energies[chain]:.6g}). Start elsewhere by init_params or init_strategy"
                )

    def sample(self, state, model_args, model_kwargs):
        """Move once."""

        def step(state):
            rng_key, key_step = random.split(state.rng_key)
            chain = LangevinState(state.z, state.logdensity, state.z_grad, state.i)
            kernel = self._kernel(state.adapt_state.step_size)
            chain, info = kernel.step(key_step, chain, self._logdensity_fn(model_args, model_kwargs))
            accept_prob = jnp.mean(info.acceptance_rate).astype(state.accept_prob.dtype)
            i = state.i + 1
            n = jnp.where(i <= self._num_warmup, i, i - self._num_warmup)
            return LangevinMCMCState(
                i,
                chain.position,
                -jnp.sum(chain.logdensity),
                chain.logdensity,
                chain.logdensity_grad,
                accept_prob,
                state.mean_accept_prob + (accept_prob - state.mean_accept_prob) / n,
                jnp.any(info.is_divergent),
                jnp.sum(info.is_nonfinite, dtype=jnp.int32),
                self._adapt(state.i, info.acceptance_rate, state.adapt_state),
                rng_key,
            )

        return step(state) if is_prng_key(state.rng_key) else jax.vmap(step)(state)

    def _adapt(self, i, acceptance_rate, state):
        return state

    def refresh(self, state, model_args, model_kwargs):
        """Recompute log-density and gradient of `state.z` for new arguments."""
        chain = self._kernel(self._step_size).init(state.z, self._logdensity_fn(model_args, model_kwargs))
        return state._replace(
            potential_energy=-jnp.sum(chain.logdensity), logdensity=chain.logdensity, z_grad=chain.logdensity_grad
        )
