"""What can be kept: as a pytree, and in pickle."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI, Trace_ELBO

import numpyro_ebm as ebm
from numpyro_ebm import kernels
from tests.contracts.estimators import BASE, CASES, X, Y, no_guide, plain
from tests.contracts.parts import DISTRIBUTIONS, JOINT, LABELS, SIMPLEX, X3, Quadratic, quartic

ANONYMOUS = {
    "closure",
    "interval",
    "positive",
    "simplex",
    "flat",
    "known log Z",
}  # functions without a name do not pickle


def same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_are_pytrees(name):
    d, x = DISTRIBUTIONS[name]
    leaves, treedef = jax.tree.flatten(d)
    assert all(isinstance(leaf, jax.Array | np.ndarray | float | int) for leaf in leaves)
    copy = jax.tree.unflatten(treedef, leaves)
    assert (copy.batch_shape, copy.event_shape) == (d.batch_shape, d.event_shape)
    same(copy.log_prob(x), d.log_prob(x))
    assert treedef == jax.tree.structure(copy)


@pytest.mark.case("A14")
@pytest.mark.parametrize("name", [name for name in DISTRIBUTIONS if name not in ANONYMOUS])
def test_distributions_pickle(name):
    d, x = DISTRIBUTIONS[name]
    same(pickle.loads(pickle.dumps(d)).log_prob(x), d.log_prob(x))


def test_a_joint_energy_is_a_pytree_and_pickles():
    copies = jax.tree.unflatten(jax.tree.structure(JOINT), jax.tree.leaves(JOINT)), pickle.loads(pickle.dumps(JOINT))
    for copy in copies:
        same(copy.conditional(LABELS).log_prob(X3), JOINT.conditional(LABELS).log_prob(X3))
        same(copy.classifier(X3).logits, JOINT.classifier(X3).logits)


@pytest.mark.case("A14")
@pytest.mark.parametrize("support", [dist.constraints.real_vector, dist.constraints.simplex], ids=str)
def test_kernels_and_states_of_chains_pickle(support):
    kernel = kernels.on_support(kernels.mala(0.1), support)
    state = kernel.init(SIMPLEX, quartic)
    other, copied = pickle.loads(pickle.dumps((kernel, state)))
    same(other.step(random.key(0), copied, quartic), kernel.step(random.key(0), state, quartic))


@pytest.mark.parametrize("name", CASES)
def test_estimators_pickle(name):
    _, estimator = CASES[name]
    assert pickle.loads(pickle.dumps(estimator)) == estimator


@pytest.mark.case("A14")
@pytest.mark.slow
def test_training_goes_on_from_a_pickle():
    """15 s."""
    svi = SVI(ebm.estimate(plain, CASES["contrastive"][1]), no_guide, optax.sgd(1e-2), Trace_ELBO())
    state, _ = svi.update(svi.init(random.PRNGKey(0), X, Y), X, Y)
    same(svi.update(pickle.loads(pickle.dumps(state)), X, Y), svi.update(state, X, Y))


def plain_x(x):
    plain(x, None)


RESULTS = {
    "MMDFlow": lambda: ebm.MMDFlow(BASE, radius=1.0, step_size=1e-2, num_chains=5),
    "Exchange": lambda: ebm.Exchange(plain_x),
    "MALA": lambda: ebm.MALA(plain_x),
    "ULA": lambda: ebm.ULA(plain_x),
    "DualSGDA": lambda: ebm.DualSGDA(plain_x, step_size=1e-2, num_chains=5),
    "pool": lambda: ebm.ChainPool(init="data"),
    "normaliser": lambda: ebm.log_normalizer(ebm.EnergyBased(Quadratic(2.0), BASE), random.key(0), "importance"),
    "likelihood": lambda: ebm.log_likelihood(
        ebm.EnergyBased(Quadratic(2.0), BASE), X, random.key(0), method="importance", num_draws=1000
    ),
}


@pytest.mark.parametrize("name", RESULTS)
def test_trainers_and_results_pickle(name):
    made = RESULTS[name]()
    copy = pickle.loads(pickle.dumps(made))
    assert type(copy) is type(made)
    if isinstance(made, tuple):
        same(copy, made)


def test_particles_pickle():
    sampler = ebm.normalizer.ParticleSampler(jnp.arange(12.0).reshape(6, 2), jnp.zeros(()), 3, 0.5)
    d = ebm.EnergyBased(Quadratic(2.0), BASE)
    same(pickle.loads(pickle.dumps(sampler))(random.key(0), d, (4,)), sampler(random.key(0), d, (4,)))
