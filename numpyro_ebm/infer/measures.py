"""The measure dynamics behind dual SGDA, on grids of the circle: what its particles and neurons approach in numbers."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from numpyro_ebm.energies import check_positive, check_size

_SAFETY = 0.9  # of the largest step at which no mass turns negative


class MeasureState(NamedTuple):
    """Measures on the grid.

    Attributes
    ----------
    particles
        Probability of each grid point under the particles' measure nu, shape ``(n,)``.
    positive, negative
        Masses of neurons of either sign at each angle, shape ``(m,)``; all together at most the radius.
    time
        Time of the particles.
    """

    particles: jax.Array
    positive: jax.Array
    negative: jax.Array
    time: jax.Array


class MeasureHistory(NamedTuple):
    """What :meth:`~numpyro_ebm.MeasureDynamics.run` records after each step, each of shape ``(num_steps,)``.

    Attributes
    ----------
    time
        Time of the particles.
    divergence
        Kullback-Leibler divergence, in nats, of the Gibbs measure of the energy from the data.
    primal, dual
        The log-likelihood of the energy, and the value of the dual problem at the particles, in nats per observation.
    norm
        Total mass of neurons.
    """

    time: jax.Array
    divergence: jax.Array
    primal: jax.Array
    dual: jax.Array
    norm: jax.Array


class MeasureDynamics:
    r"""Coupled gradient flows of neurons and particles on the circle (paper A, eqs. 10 and 14).

    .. math::
        \partial_t \gamma^\pm &= \alpha \big( \mp \nabla \cdot (\gamma^\pm \nabla F)
            + \gamma^\pm (\pm F - K) \big), \\
        \partial_t \nu &= \nabla \cdot (\nu \nabla f) + \Delta \nu - \alpha' (\nu - \nu_n)

    with :math:`F(\theta) = \int \phi(x, \theta) \, d(\nu - \nu_n)(x)` and the energy
    :math:`f(x) = \int \phi(x, \theta) \, d(\gamma^+ - \gamma^-)(\theta)`, a ReLU's power of the cosine. K keeps the
    total variation at the radius. Finite volumes, upwind for neurons and exponentially fitted for particles, so
    that Gibbs measures are stationary exactly; explicit steps of the largest size at which masses stay positive.

    Parameters
    ----------
    data
        Probabilities of the data on an even grid of the circle, shape ``(n,)``, positive.
    radius
        Radius of the F1 ball.
    timescale
        :math:`\alpha`, of neurons over particles.
    pull
        :math:`\alpha'`, the rate of restarts at the data; large, it turns maximum likelihood into score matching.
    num_neurons
        Number of grid points `m` of neurons; as many as the data's by default.
    power
        Of the ReLU.

    Raises
    ------
    ValueError
        If the data are no positive probabilities, or a number is out of its range.

    References
    ----------
    Domingo-Enrich et al. (2022), Dual training of energy-based models with overparametrized shallow neural networks.
    Scharfetter and Gummel (1969), Large-signal analysis of a silicon Read diode oscillator.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> angle = 2 * jnp.pi * jnp.arange(32) / 32
    >>> dynamics = MeasureDynamics(jax.nn.softmax(jnp.cos(angle)), radius=2.0, timescale=10.0)
    >>> state, history = dynamics.run(1_000)
    >>> bool(history.divergence[-1] < 0.05 * history.divergence[0])
    True
    """

    def __init__(
        self,
        data: ArrayLike,
        radius: float,
        *,
        timescale: float = 1.0,
        pull: float = 0.0,
        num_neurons: int | None = None,
        power: int = 1,
    ):
        values = np.asarray(data, float)
        if values.ndim != 1 or values.size < 3 or not np.all(values > 0) or abs(values.sum() - 1) > 1e-3:
            raise ValueError(
                "data must be positive probabilities on a grid of at least three points that sum to one, got shape "
                f"{values.shape}, the least {values.min(initial=np.inf)}, of sum {values.sum()}: divide by their sum"
            )
        check_positive("radius", radius)
        check_positive("timescale", timescale)
        if not (np.ndim(pull) == 0 and np.isfinite(pull) and pull >= 0):
            raise ValueError(f"pull must be a number and not negative, got {pull!r}")
        num_neurons = values.size if num_neurons is None else num_neurons
        check_size("num_neurons", num_neurons)
        check_size("power", power)
        self.data = jnp.asarray(values / values.sum(), jnp.result_type(float))
        self.radius, self.timescale, self.pull = float(radius), float(timescale), float(pull)
        #: Angles of particles and of neurons, shapes ``(n,)`` and ``(m,)``.
        self.angles, self.neuron_angles = (
            2 * np.pi * jnp.arange(num, dtype=self.data.dtype) / num for num in (values.size, num_neurons)
        )
        cosine = jnp.cos(self.angles[:, None] - self.neuron_angles)
        #: Features, shape ``(n, m)``.
        self.features = jax.nn.relu(cosine) ** power

    def init(self) -> MeasureState:
        """The start: particles at the data, neurons spread evenly, of total mass one (or the radius), energy zero."""
        half = jnp.full(len(self.neuron_angles), min(1.0, self.radius) / 2 / len(self.neuron_angles), self.data.dtype)
        return MeasureState(self.data, half, half, jnp.zeros((), self.data.dtype))

    def energy(self, state: MeasureState) -> jax.Array:
        """The energy on the grid, shape ``(n,)``."""
        return self.features @ (state.positive - state.negative)

    def gibbs(self, energy: ArrayLike) -> jax.Array:
        """Probabilities of the Gibbs measure of an energy on the grid, shape ``(n,)``."""
        return jax.nn.softmax(-jnp.asarray(energy))

    def primal(self, neurons: ArrayLike) -> jax.Array:
        """Log-likelihood per observation, over uniform, of signed masses of neurons of shape ``(m,)``."""
        energy = self.features @ jnp.asarray(neurons)
        log_z = jax.nn.logsumexp(-energy) - jnp.log(len(self.data))
        return -jnp.dot(self.data, energy) - log_z

    def dual(self, particles: ArrayLike) -> jax.Array:
        """Dual value of particles: their divergence from uniform, and the radius times the largest moment that differs."""
        particles = jnp.asarray(particles)
        entropy = jnp.sum(jax.scipy.special.xlogy(particles, particles * len(self.data)))
        return entropy + self.radius * jnp.max(jnp.abs(self.features.T @ (particles - self.data)))

    def step(self, state: MeasureState) -> MeasureState:
        """One step, of the largest size at which all masses stay positive."""
        difference = self.features.T @ (state.particles - self.data)
        excess = jnp.dot(state.positive - state.negative, difference) / self.radius
        norm = jnp.sum(state.positive + state.negative)
        bound = jnp.where(norm >= self.radius * (1 - 1e-6), jnp.maximum(excess, 0), 0)
        rates, exits = zip(
            _diffusion(state.particles, self.energy(state), self.angles),
            *(_transport(mass, sign * difference, self.neuron_angles) for mass, sign in self._signed(state)),
            strict=True,
        )
        changes, fastest = [rates[0] - self.pull * (state.particles - self.data)], [jnp.max(exits[0]) + self.pull]
        for (mass, sign), rate, leaving in zip(self._signed(state), rates[1:], exits[1:], strict=True):
            growth = sign * difference - bound
            changes.append(self.timescale * (rate + mass * growth))
            fastest.append(self.timescale * jnp.max(leaving + jnp.abs(growth)))
        size = _SAFETY / jnp.max(jnp.stack(fastest))
        particles, positive, negative = (mass + size * change for mass, change in zip(state[:3], changes, strict=True))
        shrink = jnp.minimum(1, self.radius / jnp.sum(positive + negative))
        return MeasureState(particles, positive * shrink, negative * shrink, state.time + size)

    def _signed(self, state):
        return (state.positive, 1.0), (state.negative, -1.0)

    def run(self, num_steps: int, state: MeasureState | None = None) -> tuple[MeasureState, MeasureHistory]:
        """Take `num_steps` steps from `state`, or from the start.

        Raises
        ------
        ValueError
            If `num_steps` is no positive integer.
        """
        check_size("num_steps", num_steps)
        return _run(self, self.init() if state is None else state, num_steps)

    def _record(self, state):
        neurons = state.positive - state.negative
        divergence = jnp.dot(self.data, jnp.log(self.data) - jnp.log(self.gibbs(self.energy(state))))
        norm = jnp.sum(state.positive + state.negative)
        return MeasureHistory(state.time, divergence, self.primal(neurons), self.dual(state.particles), norm)


def _unflatten(names, values):
    dynamics = object.__new__(MeasureDynamics)
    vars(dynamics).update(zip(names, values, strict=True))
    return dynamics


jax.tree_util.register_pytree_node(MeasureDynamics, lambda d: (tuple(vars(d).values()), tuple(vars(d))), _unflatten)


@partial(jax.jit, static_argnames="num_steps")
def _run(dynamics, state, num_steps):
    def advance(state, _):
        state = dynamics.step(state)
        return state, dynamics._record(state)

    return lax.scan(advance, state, None, length=num_steps)


def _diffusion(mass, energy, angles):
    """Rates of mass under Langevin's dynamics of an energy, and the rates at which each cell is left."""
    width = 2 * np.pi / len(angles)
    rise = jnp.roll(energy, -1) - energy
    forward, backward = _bernoulli(rise) / width**2, _bernoulli(-rise) / width**2
    flux = forward * mass - backward * jnp.roll(mass, -1)
    return jnp.roll(flux, 1) - flux, forward + jnp.roll(backward, 1)


def _bernoulli(z):
    """z / (exp(z) - 1)."""
    small = jnp.abs(z) < 1e-4
    safe = jnp.where(small, 1.0, z)
    return jnp.where(small, 1 - z / 2, safe / jnp.expm1(safe))


def _transport(mass, potential, angles):
    """Rates of mass that climbs a potential, and the rates at which each cell is left."""
    width = 2 * np.pi / len(angles)
    speed = (jnp.roll(potential, -1) - potential) / width
    forward, backward = jax.nn.relu(speed) / width, jax.nn.relu(-speed) / width
    flux = forward * mass - backward * jnp.roll(mass, -1)
    return jnp.roll(flux, 1) - flux, forward + jnp.roll(backward, 1)
