"""A table, as it comes: no step size, no scale, no base to choose."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import pytest
from flax import nnx
from jax import random
from numpyro.contrib.module import nnx_module
from numpyro.infer import SVI, Trace_ELBO

import numpyro_ebm as ebm

RNG = np.random.default_rng(0)
SIZES, SHIFTS = np.array([1e-3, 1e4]), np.array([0.5, -3e4])


def table(num):
    """A ring: its columns are uncorrelated and not normal."""
    angle, radius = RNG.uniform(0, 2 * np.pi, num), 1 + 0.1 * RNG.normal(size=num)
    return SHIFTS + SIZES * radius[:, None] * np.stack([np.cos(angle), np.sin(angle)], -1)


X, HELD_OUT = table(2000).astype(np.float32), table(1000).astype(np.float32)


class Network(nnx.Module):
    def __init__(self, rngs):
        self.first, self.last = nnx.Linear(2, 64, rngs=rngs), nnx.Linear(64, 1, rngs=rngs)
        self.middle = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        return self.last(nnx.swish(self.middle(nnx.swish(self.first(x)))))


@pytest.mark.slow
def test_a_table_fits_without_a_step_size():  # 15 s
    network = Network(nnx.Rngs(0))

    def model(x):
        d = ebm.standardized(nnx_module("energy", network), x)
        with numpyro.plate("data", x.shape[0], subsample_size=256):
            numpyro.sample("x", d, obs=numpyro.subsample(x, event_dim=1))

    estimated = ebm.estimate(model, ebm.ContrastiveDivergence(ebm.ChainPool(pool_size=256, num_steps=5)))
    svi = SVI(estimated, lambda x: None, optax.adam(3e-3), Trace_ELBO())
    result = svi.run(random.key(0), 1000, X, progress_bar=False)
    fitted = ebm.fitted_distribution(model, result.params, X)
    log_z = ebm.Quadrature().log_normalizer(fitted)
    held_out = float(jnp.mean(fitted.unnormalized_log_prob(HELD_OUT) - log_z))
    # densities are in the units of the table: of a normal with its moments, and of the ring itself
    normal = float(jnp.mean(fitted.base.log_prob(HELD_OUT)))
    z = (HELD_OUT - SHIFTS) / SIZES
    radius = np.linalg.norm(z, axis=-1)
    truth = -np.log(2 * np.pi * radius) - np.log(0.1 * np.sqrt(2 * np.pi)) - (radius - 1) ** 2 / 0.02
    truth = float(np.mean(truth) - np.log(SIZES).sum())
    assert normal + 0.6 < held_out < truth + 0.05
    assert truth - held_out < 0.25
    report = ebm.chain_report(result.state)["x"]
    assert abs(report.acceptance_rate - 0.574) < 0.1
    assert not report.diverged


def test_the_units_of_the_table_are_those_of_its_distribution():
    def energy(z):
        return jnp.sum(z**4)

    d, unit = ebm.standardized(energy, X), ebm.standardized(energy, (X - SHIFTS) / SIZES)
    z = ((HELD_OUT - SHIFTS) / SIZES).astype(np.float32)
    np.testing.assert_allclose(
        d.unnormalized_log_prob(HELD_OUT) + np.log(SIZES).sum(), unit.unnormalized_log_prob(z), rtol=1e-2, atol=2e-2
    )
    np.testing.assert_allclose(d.base.mean, X.mean(0), rtol=1e-4)
    assert d.event_shape == (2,)
    assert ebm.standardized(lambda z: z**2, X[:, 0]).event_shape == ()
    assert jax.jit(lambda x: ebm.standardized(energy, x).unnormalized_log_prob(x[0]))(X).shape == ()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (np.array([[1.0, 2.0], [np.nan, 3.0]]), "got nan at row 1, column 0"),
        (np.array([[1.0, 2.0], [2.0, 2.0]]), "column 1 of x is constant"),
        (np.full((5, 1), 0.1, np.float32), "column 0 of x is constant"),
        (np.array([1.7e9, 1.7e9 + 10, 1.7e9 - 10]), "subtract an offset"),
        (np.ones((3, 0)), "must have shape"),
        (np.ones((2, 2, 2)), "must have shape"),
        (np.ones((1, 2)), "two rows or more"),
        (np.array([["a", "b"], ["c", "d"]]), "table of numbers"),
    ],
)
def test_faulty_tables_are_named(x, message):
    with pytest.raises(ValueError, match=message):
        ebm.standardized(lambda z: jnp.sum(z**2), x)
