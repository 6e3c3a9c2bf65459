"""The parts that contracts hold for: pure functions of a key and of an array."""

import contextlib
import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import random
from numpyro.distributions import constraints

import numpyro_ebm as ebm
from numpyro_ebm import kernels
from numpyro_ebm.energies import as_float
from numpyro_ebm.infer.mmd import MMDWitness
from numpyro_ebm.pool import Observations

CALLS: list = []


def counted(x):
    """Identity that counts how often Python comes by."""
    CALLS.append(1)
    return x


def counted_relu(x):
    return jax.nn.relu(counted(x))


@dataclass(frozen=True)
class Quadratic(ebm.Energy):
    """``precision * |x|**2 / 2``; its derivative in the precision is |x|**2 / 2."""

    precision: Any

    def __call__(self, x):
        return counted(self.precision) * jnp.sum(x**2, -1) / 2


jax.tree_util.register_dataclass(Quadratic, ["precision"], [])


class Part(NamedTuple):
    """A part: ``call(rng_key, x)`` returns arrays.

    Attributes
    ----------
    call
        Pure function, which jit and vmap serve.
    x
        Input, float32 values that are exact.
    is_random
        Whether it uses its key.
    """

    call: Callable
    x: jax.Array
    is_random: bool = False


def logits(x):
    return jnp.array([[1.0, 0.0, -1.0], [0.5, 1.0, 0.0]], x.dtype) @ counted(x)


R3 = dist.Normal(0, 1).expand([3]).to_event(1)
X3 = jnp.array([[0.5, -1.0, 2.0], [1.5, 0.25, -0.5], [-1.0, 0.0, 0.75], [0.125, 1.0, 1.0]])
LINE = jnp.array([0.25, 0.5, 0.875, 0.125])
ON_SPHERE = jnp.array([[0.0, 0.6, 0.8], [0.8, 0.0, -0.6], [1.0, 0.0, 0.0], [0.0, -1.0, 0.0]])
SIMPLEX = jnp.array([[0.25, 0.25, 0.5], [0.5, 0.375, 0.125], [0.125, 0.125, 0.75], [0.5, 0.25, 0.25]])
LABELS = jnp.array([0, 1, 1, 0])

F1 = ebm.F1Energy(jnp.eye(3), jnp.zeros(3), jnp.array([1.0, -1.0, 1.0]), 2.0, activation=counted_relu)
F1_BATCH = ebm.F1Energy(
    jnp.stack([jnp.eye(3)] * 4), jnp.zeros((4, 3)), jnp.array([1.0, -1.0, 1.0]), jnp.arange(1.0, 5.0)
)
F2 = ebm.F2Energy(jnp.eye(3), jnp.array([1.0, -1.0, 0.5]), 2.0, power=2)
JOINT = ebm.JointEnergy(logits, R3)
ENERGIES = {
    "F1": (F1, R3, X3),
    "F1 of a batch": (F1_BATCH, R3, X3),
    "F2": (F2, R3, X3),
    "dataclass": (Quadratic(2.0), R3, X3),
    "closure": (lambda x: counted(x)[0] ** 2 * x[1], R3, X3),
    "witness": (MMDWitness(X3[:2], X3[2:], 3.0, ebm.arc_cosine_kernel), R3, X3),
    "sphere": (F1, ebm.SphereUniform(3), ON_SPHERE),
    "interval": (lambda x: counted(x) ** 3, dist.Uniform(0, 1), LINE),
    "positive": (lambda x: counted(x) ** 3, dist.Gamma(2.0, 1.0), LINE),
    "simplex": (lambda x: counted(x)[0] * x[1], dist.Dirichlet(jnp.ones(3)), SIMPLEX),
    "flat": (lambda x: counted(x) ** 4, dist.ImproperUniform(constraints.real, (), ()), LINE),
}
DISTRIBUTIONS = {name: (ebm.EnergyBased(energy, base), x) for name, (energy, base, x) in ENERGIES.items()} | {
    "beta of a batch": (ebm.EnergyBased(F2, R3, inverse_temperature=jnp.arange(4.0)), X3),
    "known log Z": (ebm.EnergyBased(Quadratic(3.0), R3, log_normalizer=lambda d: -3 * jnp.log(2.0)), X3),
    "standardised": (ebm.standardized(Quadratic(1.0), [[1.0, 2.0, 9.0], [2.0, 4.0, -3.0], [3.0, 3.0, 0.0]]), X3),
    "marginal": (JOINT.marginal(), X3),
    "conditional": (JOINT.conditional(LABELS), X3),
    "SphereUniform": (ebm.SphereUniform(3), ON_SPHERE),
}


def moved(kernel, support, logdensity_fn):
    """Two moves of chains on a support."""

    def call(rng_key, x):
        on = kernels.on_support(kernel, support)
        state = on.init(x, logdensity_fn)
        for key in random.split(rng_key):
            state, info = on.step(key, state, logdensity_fn)
        return state, info

    return call


def quartic(x):
    return -jnp.sum(counted(x - 0.25) ** 4, -1)


VECTORS = constraints.real_vector
KERNELS = {
    "mala": Part(moved(kernels.mala(0.1), VECTORS, quartic), X3, True),
    "ula": Part(moved(kernels.ula(0.1, temperature=0.5), VECTORS, quartic), X3, True),
    "mala, scaled": Part(moved(kernels.mala(0.1, scale=jnp.array([1.0, 2.0, 3.0])), VECTORS, quartic), X3, True),
    "mala, schedule": Part(moved(kernels.mala(lambda i: 0.1 / (1 + i)), VECTORS, quartic), X3, True),
    "sphere": Part(moved(kernels.mala(0.1), ebm.SphereUniform(3).support, quartic), ON_SPHERE, True),
    "projected": Part(moved(kernels.sphere.projected(0.1), ebm.SphereUniform(3).support, quartic), ON_SPHERE, True),
    "positive": Part(
        moved(kernels.mala(0.1), constraints.independent(constraints.positive, 1), quartic), X3**2 + 1, True
    ),
}


def pooled(**options):
    pool = ebm.ChainPool(pool_size=6, num_steps=2, **options)
    d = ebm.EnergyBased(Quadratic(2.0), R3)

    def call(rng_key, x):
        observations = Observations(x)
        keys = random.split(rng_key, 3)
        state = pool.start(keys[0], d, observations)
        index, _ = pool.draw(keys[1], state)
        state, position = pool.advance(keys[2], state, index, d, observations)
        return pool.watch(state, d, position, observations)

    return Part(call, X3, True)


POOLS = {
    "pool": pooled(),
    "pool, drawn and restarted": pooled(num_chains=3, restart_prob=0.5, reinit_prob=0.5, init="data"),
}


def functions():
    """All parts by name."""
    parts = {}
    for name, (d, x) in DISTRIBUTIONS.items():
        score = d.score if isinstance(d, ebm.EnergyBased) else d.log_prob
        parts[f"density, {name}"] = Part(lambda rng_key, x, d=d, score=score: (d.log_prob(x), score(x)), x)
    parts["classifier"] = Part(lambda rng_key, x: JOINT.classifier(x).log_prob(LABELS), X3)
    parts["mutual information"] = Part(lambda rng_key, x: ebm.mutual_information(JOINT, x), X3)
    parts["quadrature"] = Part(lambda rng_key, x: log_z(x), LINE)
    return parts | KERNELS | POOLS


def log_z(precision):
    rule = ebm.Quadrature(100)
    return jax.vmap(lambda p: rule.log_normalizer(ebm.EnergyBased(lambda x: counted(p) * x**2 / 2, dist.Normal(0, 1))))(
        as_float(precision)
    )


@contextlib.contextmanager
def checking_leaks():
    """`jax.checking_leaks`, which collects garbage at each trace, without what was there before."""
    gc.collect()
    gc.freeze()
    try:
        with jax.checking_leaks():
            yield
    finally:
        gc.unfreeze()
