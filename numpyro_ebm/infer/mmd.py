"""The lazy regime's dual: an entropy-regularised flow of the maximum mean discrepancy (paper A, appendix C)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax, random
from jax.typing import ArrayLike
from numpyro.distributions import constraints

from numpyro_ebm.distributions import EnergyBased, is_sphere, validate_observations
from numpyro_ebm.energies import Energy, as_float, check_positive, check_size
from numpyro_ebm.kernels import EUCLIDEAN, SPHERE

_LEAST_DISCREPANCY = 1e-6


@jax.custom_jvp
def _arc_cosine(cosine):
    angle = jnp.arccos(jnp.clip(cosine, -1, 1))
    return (jnp.sin(angle) + (np.pi - angle) * jnp.cos(angle)) / (2 * np.pi)


@_arc_cosine.defjvp
def _arc_cosine_jvp(primals, tangents):
    # where x = y the arc cosine alone has no derivative, the whole has
    (cosine,), (change,) = primals, tangents
    return _arc_cosine(cosine), (np.pi - jnp.arccos(jnp.clip(cosine, -1, 1))) / (2 * np.pi) * change


def arc_cosine_kernel(x: jax.Array, y: jax.Array) -> jax.Array:
    r"""Kernel of ReLU features that are uniform on the unit sphere, :math:`E \max(\langle x, \theta \rangle, 0) \max(\langle y, \theta \rangle, 0)`.

    Parameters
    ----------
    x, y
        Vectors of shape ``(d,)``.

    Returns
    -------
    jax.Array
        A number.

    References
    ----------
    Cho and Saul (2009), Kernel methods for deep learning.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> float(arc_cosine_kernel(jnp.array([1.0, 0.0]), jnp.array([1.0, 0.0])))       # E max(cos, 0)**2 = 1 / 4
    0.25
    """
    norms = jnp.linalg.norm(x) * jnp.linalg.norm(y)
    safe = jnp.where(norms > 0, norms, 1)
    return norms * _arc_cosine(jnp.vdot(x, y) / safe) / x.shape[-1]


@dataclass(frozen=True)
class MMDWitness(Energy):
    r"""Energy in a ball of a kernel's Hilbert space: the scaled difference of two samples' mean embeddings.

    .. math:: f(x) = c \Big( \frac{1}{N} \sum_i k(x, X_i) - \frac{1}{n} \sum_j k(x, x_j) \Big)

    Parameters
    ----------
    particles, x
        The samples, shapes ``(N, d)`` and ``(n, d)``.
    scale
        :math:`c`.
    kernel
        Function of two vectors.
    """

    particles: ArrayLike
    x: ArrayLike
    scale: ArrayLike
    kernel: Callable

    def __call__(self, x: jax.Array) -> jax.Array:
        flat = jnp.reshape(x, (-1, x.shape[-1]))
        mean = [jnp.mean(_gram(self.kernel, flat, jnp.asarray(sample)), 1) for sample in (self.particles, self.x)]
        return jnp.reshape(jnp.asarray(self.scale) * (mean[0] - mean[1]), x.shape[:-1])


jax.tree_util.register_dataclass(MMDWitness, ["particles", "x", "scale"], ["kernel"])


class MMDFlowResult(NamedTuple):
    """What :meth:`~numpyro_ebm.MMDFlow.run` returns.

    Attributes
    ----------
    particles
        Shape ``(num_chains, d)``.
    discrepancies
        MMD of particles and data before each step, shape ``(num_steps,)``.
    inverse_temperatures
        b at each step, shape ``(num_steps,)``; at a fixed radius it comes to rest at the noise that matches the ball.
    energy
        The energy whose Gibbs measure the particles sample, :class:`MMDWitness`, at the last particles.
    """

    particles: jax.Array
    discrepancies: jax.Array
    inverse_temperatures: jax.Array
    energy: MMDWitness


class MMDFlow:
    r"""Entropy-regularised flow of the maximum mean discrepancy to the data (paper A, appendix C).

    .. math:: dX = \Big( -\nabla h(X) + \frac{1}{b} \nabla \log \tau(X) \Big) dt + \sqrt{2 / b} \, dW, \quad
        h(x) = E_{Y \sim \nu} k(x, Y) - E_{y \sim \nu_n} k(x, y)

    It minimises :math:`\mathrm{MMD}(\nu, \nu_n)^2 / 2 + \mathrm{KL}(\nu, \tau) / b`. With ``b = radius / MMD(nu, nu_n)`` it is
    the dual of maximum likelihood over the ball of that radius of the kernel's Hilbert space
    (of :class:`~numpyro_ebm.F2Energy` with infinitely many neurons): its particles sample the fitted model.

    Parameters
    ----------
    base
        Base distribution :math:`\tau` over vectors, on R^d or the unit sphere; particles start at its draws.
    kernel
        Function of two vectors of shape ``(d,)``; :func:`arc_cosine_kernel` is that of ReLU features.
    radius
        Radius of the ball: b follows the particles.
    inverse_temperature
        b instead, positive or infinite: no noise then, the unregularised flow.
    step_size
        Step in units of the Langevin dynamics of the energy, ``t / b`` above; of t itself where there is no noise.
    num_chains
        Number of particles.

    Raises
    ------
    ValueError
        If an argument is out of its range, or not one of `radius` and `inverse_temperature` is given. From `run`: if the
        data are faulty, or particles turn non-finite.

    Notes
    -----
    A step costs ``num_chains * (num_chains + n)`` kernels and their gradients. The MMD is that of the particles, with
    their noise: it does not fall below about ``sqrt(k(x, x) / num_chains)``.

    References
    ----------
    Domingo-Enrich et al. (2022), Dual training of energy-based models with overparametrized shallow neural networks.
    Arbel et al. (2019), Maximum mean discrepancy gradient flow.

    Examples
    --------
    >>> import numpyro_ebm as ebm
    >>> x = random.normal(random.key(0), (200, 3)) + jnp.array([2.0, 0.0, 0.0])
    >>> x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    >>> flow = MMDFlow(ebm.SphereUniform(3), radius=10.0, step_size=1e-2, num_chains=200)
    >>> result = flow.run(random.key(1), 200, x)
    >>> bool(result.discrepancies[-1] < 0.5 * result.discrepancies[0])
    True
    """

    def __init__(
        self,
        base: dist.Distribution,
        kernel: Callable = arc_cosine_kernel,
        *,
        radius: float | None = None,
        inverse_temperature: float | None = None,
        step_size: float,
        num_chains: int,
    ):
        if not isinstance(base, dist.Distribution) or base.batch_shape or len(base.event_shape) != 1:
            raise ValueError(f"base must be a distribution over vectors, without batch shape, got {base!r}")
        if not callable(kernel):
            raise ValueError(f"kernel must be a function of two vectors, got {kernel!r}")
        if (radius is None) == (inverse_temperature is None):
            raise ValueError(
                f"give either radius or inverse_temperature, got radius={radius!r} and {inverse_temperature=!r}"
            )
        if radius is not None:
            check_positive("radius", radius)
        if inverse_temperature is not None and not (np.ndim(inverse_temperature) == 0 and inverse_temperature > 0):
            raise ValueError(f"inverse_temperature must be positive, got {inverse_temperature!r}")
        check_positive("step_size", step_size)
        check_size("num_chains", num_chains)
        support = base.support
        while isinstance(support, constraints.independent):
            support = support.base_constraint
        if not (support is constraints.real or is_sphere(support)):
            raise ValueError(f"MMDFlow is for R^d and the unit sphere, got a base of support {base.support}")
        self.base, self.kernel, self.radius, self.inverse_temperature = base, kernel, radius, inverse_temperature
        self.step_size, self.num_chains = step_size, num_chains
        self._manifold = SPHERE if is_sphere(support) else EUCLIDEAN

    def run(self, rng_key: jax.Array, num_steps: int, x: ArrayLike) -> MMDFlowResult:
        """Take `num_steps` steps towards the data `x`, shape ``(n, d)``."""
        check_size("num_steps", num_steps)
        x = as_float(x)
        validate_observations("x", EnergyBased(lambda x: 0.0 * jnp.sum(x), self.base), x)
        key_base, key_steps = random.split(rng_key)
        start = self.base.sample(key_base, (self.num_chains,)).astype(x.dtype)

        particles, (discrepancies, temperatures) = self._steps(random.split(key_steps, num_steps), start, x)
        if not bool(jnp.all(jnp.isfinite(particles))):
            step = int(jnp.argmin(jnp.isfinite(discrepancies)))
            raise ValueError(f"particles turned non-finite at step {step or num_steps}: take a smaller step_size")
        energy = MMDWitness(particles, x, temperatures[-1], self.kernel)
        return MMDFlowResult(particles, discrepancies, temperatures, energy)

    @partial(jax.jit, static_argnums=0)
    def _steps(self, rng_keys, start, x):
        within = jnp.mean(_gram(self.kernel, x, x))
        return lax.scan(lambda particles, rng_key: self._step(particles, rng_key, x, within), start, rng_keys)

    def _step(self, particles, rng_key, x, within):
        def witness(points):
            own, data = _gram(self.kernel, points, particles), _gram(self.kernel, points, x)
            return jnp.mean(own, 1) - jnp.mean(data, 1), (jnp.mean(own), jnp.mean(data))

        _, pullback, (own, data) = jax.vjp(witness, particles, has_aux=True)
        gradient = pullback(jnp.ones(len(particles), particles.dtype))[0]
        discrepancy = jnp.sqrt(jnp.maximum(own - 2 * data + within, _LEAST_DISCREPANCY**2))
        b = jnp.asarray(self.inverse_temperature if self.radius is None else self.radius / discrepancy, x.dtype)
        drift, noise = -gradient, jnp.zeros_like(particles)
        if self.inverse_temperature != np.inf:
            pull = jax.vmap(jax.grad(self.base.log_prob))(particles)
            drift = b * drift + pull
            noise = jnp.sqrt(2 * self.step_size) * random.normal(rng_key, particles.shape, particles.dtype)
        move = self._manifold.project(particles, self.step_size * drift + noise)
        return self._manifold.retract(particles, particles + move)[0], (discrepancy, b)


def _gram(kernel, x, y):
    """Kernel of each x with each y, shape ``(n, m)``."""
    return jax.vmap(lambda x: jax.vmap(lambda y: kernel(x, y))(y))(x)
