"""The Wasserstein-Fisher-Rao optimiser of neurons and weights, and what `DualSGDA` makes of it."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import optax
from jax.scipy.special import logsumexp
from jax.typing import ArrayLike
from numpyro.optim import _NumPyroOptim

from numpyro_ebm.distributions import EnergyBased, unmasked, unwrap
from numpyro_ebm.energies import MAX_MEAN_WEIGHT
from numpyro_ebm.handlers import Estimated, WholeData, site_batch_shape


def wasserstein_fisher_rao(learning_rate: ArrayLike | Callable) -> optax.GradientTransformationExtraArgs:
    r"""Wasserstein-Fisher-Rao descent on the neurons of an F1 energy, as an optax transformation.

    .. math::
        \theta_j \leftarrow \mathrm{retract}(\theta_j - s \, g_{\theta_j}), \quad
        \omega_j \leftarrow \omega_j - s \, g_{\omega_j}, \quad
        e^{\omega} \leftarrow e^{\omega} / \max(1, \mathrm{mean}_j \, e^{\omega_j})

    with the mean-field gradient :math:`g_j = m / (\beta R e^{\omega_j}) \cdot \partial L` of the
    loss per observation. Features move on the unit sphere, weights by their logarithms.

    Parameters
    ----------
    learning_rate
        Positive number, or an optax schedule.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        For parameters ``{"features": (m, d), "log_weights": (m,)}``, as the site of
        :func:`~numpyro_ebm.f1_energy` holds them. ``update(gradients, state, params, *, scale)``
        takes gradients of a loss and its `scale`, the number of observations that it sums over
        times :math:`\beta R`.

    References
    ----------
    Domingo-Enrich et al. (2022), Dual training of energy-based models with overparametrized
    shallow neural networks, Algorithm 1.
    Chizat et al. (2018), An interpolating distance between optimal transport and Fisher-Rao metrics.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> params = {"features": jnp.eye(2), "log_weights": jnp.full(2, -1.0)}
    >>> optimiser = wasserstein_fisher_rao(0.1)
    >>> state = optimiser.init(params)
    >>> updates, state = optimiser.update(params, state, params, scale=100.0)
    """

    def init(params):
        return optax.ScaleByScheduleState(count=jnp.zeros((), jnp.int32))

    def update(updates, state, params=None, *, scale, **extra_args):
        if params is None:
            raise ValueError(
                "wasserstein_fisher_rao needs the parameters that it moves, got None: update(updates, state, params)"
            )
        rate = learning_rate(state.count) if callable(learning_rate) else learning_rate
        features, log_weights = params["features"], params["log_weights"]
        mean_field = rate * log_weights.shape[-1] / (scale * jnp.exp(log_weights))
        # the gradient is tangent already: features are normalised as they are read
        moved = features - mean_field[..., None] * updates["features"]
        moved = moved / jnp.linalg.norm(moved, axis=-1, keepdims=True)
        weighed = log_weights - mean_field * updates["log_weights"]
        log_mean = logsumexp(weighed, axis=-1) - jnp.log(log_weights.shape[-1] * MAX_MEAN_WEIGHT)
        weighed = weighed - jnp.maximum(log_mean, 0)
        updates = {"features": moved - features, "log_weights": weighed - log_weights}
        updates = jax.tree.map(lambda u, p: u.astype(p.dtype), updates, params)
        return updates, optax.ScaleByScheduleState(count=state.count + 1)

    return optax.GradientTransformationExtraArgs(init, update)


class Links:
    """Which parameters are neurons, and the sites whose density a parameter enters."""

    neurons: frozenset = frozenset()
    sites: dict = {}


class Site(NamedTuple):
    distribution: EnergyBased
    value: Any
    count: Any
    inverse_temperature: Any


class Record(WholeData):
    """Keeps of a model's run what the optimiser needs: radii, counts of observations, temperatures."""

    def __enter__(self):
        self.sites: dict = {}
        self.radii: dict = {}
        self.joint_labels: dict = {}
        return super().__enter__()

    def process_message(self, msg):
        super().process_message(msg)
        if msg["type"] == "param" and "f1_radius" in msg["kwargs"]:
            self.radii[msg["name"]] = jnp.asarray(msg["kwargs"]["f1_radius"], jnp.result_type(float))
        if msg["type"] != "sample":
            return
        fn = _estimated(msg["fn"])
        labels = self.labels(msg | {"fn": fn})
        if labels is not None:
            self.joint_labels[msg["name"]] = labels
        distribution = unwrap(fn)
        if distribution is None:
            return
        batch_shape = site_batch_shape(msg | {"fn": fn})
        scale = jnp.asarray(1.0 if msg["scale"] is None else msg["scale"], jnp.result_type(float))
        scale = jnp.reshape(scale, scale.shape + (1,) * (fn.event_dim - distribution.event_dim))
        mask = unmasked(fn, batch_shape)
        weight = jnp.broadcast_to(scale if mask is None else scale * mask, batch_shape)
        beta = jnp.mean(jnp.asarray(distribution.inverse_temperature, jnp.result_type(float)))
        self.sites[msg["name"]] = Site(
            distribution, self.to_check(msg | {"fn": fn}, distribution), jnp.sum(weight), beta
        )


def _estimated(fn):
    """A site's distribution, with the `EnergyBased` back in the place of its estimate."""
    if isinstance(fn, Estimated):
        return fn.distribution
    if isinstance(fn, dist.ExpandedDistribution | dist.MaskedDistribution | dist.Independent):
        fn = copy.copy(fn)
        fn.base_dist = _estimated(fn.base_dist)
    return fn


class DualOptim(_NumPyroOptim):
    """Neurons by Wasserstein-Fisher-Rao steps, everything else by `others`."""

    def __init__(self, neurons, others, default, links):
        self.neurons, self.others, self.links = neurons, others or default, links
        self.per_observation = others is None
        super().__init__(lambda: (self._init, None, lambda state: state[0]))

    def _init(self, params):
        neurons, others = self._split(params)
        return params, ({name: self.neurons.init(p) for name, p in neurons.items()}, self.others.init(others))

    def _split(self, tree):
        neurons = {name: p for name, p in tree.items() if name in self.links.neurons}
        return neurons, {name: p for name, p in tree.items() if name not in neurons}

    def eval_and_update(self, fn, state, forward_mode_differentiation=False):
        loss, mutable_state, _, new = self._step(fn, state, forward_mode_differentiation)
        return (loss, mutable_state), new

    def eval_and_stable_update(self, fn, state, forward_mode_differentiation=False):
        loss, mutable_state, finite, new = self._step(fn, state, forward_mode_differentiation)
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
        return (jnp.where(finite, loss, jnp.nan), mutable_state), new

    def _step(self, fn, state, forward_mode):
        count, (params, (neuron_states, other_state)) = state

        def recorded(params):
            with Record() as record:
                loss, mutable_state = fn(params)
            sizes = {name: (site.count, site.count * site.inverse_temperature) for name, site in record.sites.items()}
            return loss, (loss, mutable_state, sizes, record.radii)

        gradient = jax.jacfwd if forward_mode else jax.grad
        grads, (loss, mutable_state, sizes, radii) = gradient(recorded, has_aux=True)(params)
        neurons, others = self._split(params)
        neuron_grads, other_grads = self._split(grads)
        updates = {}
        for name in neurons:
            # where all is masked there is nothing to learn from: no step, instead of 0 / 0
            scale = radii[name] * sum(sizes[site][1] for site in self.links.sites[name])
            scale = jnp.where(scale > 0, scale, jnp.inf)
            updates[name], neuron_states[name] = self.neurons.update(
                neuron_grads[name], neuron_states[name], neurons[name], scale=scale
            )
        if self.per_observation:
            for name in others:
                observations = sum(sizes[site][0] for site in self.links.sites.get(name, sizes))
                observations = jnp.where(observations > 0, observations, jnp.inf)
                other_grads[name] = jax.tree.map(lambda g, n=observations: g / n, other_grads[name])
        other_updates, other_state = self.others.update(other_grads, other_state, others)
        params = optax.apply_updates(params, updates | other_updates)
        finite = jnp.isfinite(loss)
        for leaf in jax.tree.leaves((grads, params)):
            finite &= jnp.all(jnp.isfinite(leaf))
        return loss, mutable_state, finite, (count + 1, (params, (neuron_states, other_state)))
