"""Score matching against exact gradients, and against restarted Langevin moves."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
import pytest
from jax import random
from numpyro.infer import SVI, Trace_ELBO

import numpyro_ebm as ebm
from numpyro_ebm import kernels
from numpyro_ebm.pool import Observations
from tests.estimators.gradients import gradients
from tests.statistics import assert_mean

THETA = 0.7
DIM = 4
X = random.normal(random.key(5), (12, DIM)) + 0.3
MU = jnp.array([0.6, 0.0, -0.8, 0.0])
ON_SPHERE = X / jnp.linalg.norm(X, axis=-1, keepdims=True)


def gaussian(x):
    """Energy theta |x|^2 / 2 on N(0, 1): the score is -(1 + theta) x, its divergence -(1 + theta) d."""
    theta = numpyro.param("theta", THETA)
    base = dist.Normal(0, 1).expand([DIM]).to_event(1)
    with numpyro.plate("data", 12):
        numpyro.sample("x", ebm.EnergyBased(lambda x: theta * jnp.sum(x**2) / 2, base), obs=x)


def fisher_bingham(x):
    """Energy -theta (<mu, x> + x_0^2) on S^3, skewed and curved."""
    theta = numpyro.param("theta", THETA)
    with numpyro.plate("data", 12):
        numpyro.sample("x", ebm.EnergyBased(lambda x: -theta * (MU @ x + x[0] ** 2), ebm.SphereUniform(DIM)), obs=x)


def fisher_bingham_terms(x):
    """|score|^2 / 2 = theta^2 (|g|^2 - <x, g>^2) / 2 and div = theta (2 (1 - x_0^2) - 3 <x, g>), g = mu + 2 x_0 e_0."""
    g = MU + 2 * x[..., :1] * jnp.eye(DIM)[0]
    radial = jnp.sum(x * g, -1)
    return THETA * (jnp.sum(g**2, -1) - radial**2) + 2 * (1 - x[..., 0] ** 2) - (DIM - 1) * radial


GAUSSIAN = jnp.sum((1 + THETA) * jnp.sum(X**2, -1) - DIM)
SPHERE = jnp.sum(fisher_bingham_terms(ON_SPHERE))


@pytest.mark.parametrize(("model", "x", "exact"), [(gaussian, X, GAUSSIAN), (fisher_bingham, ON_SPHERE, SPHERE)])
def test_explicit_is_exact(model, x, exact):
    series = gradients(model, ebm.ScoreMatching(), x, num_updates=2, burn_in=0)
    np.testing.assert_allclose(series, exact, rtol=1e-4)


@pytest.mark.parametrize("num_slices", [1, 3])
@pytest.mark.parametrize(("model", "x", "exact"), [(gaussian, X, GAUSSIAN), (fisher_bingham, ON_SPHERE, SPHERE)])
def test_sliced_is_unbiased(model, x, exact, num_slices):
    assert_mean(gradients(model, ebm.ScoreMatching("sliced", num_slices), x, burn_in=0), exact)


@pytest.mark.parametrize("noise_scale", [0.1, 1.0])
def test_denoising_is_that_of_the_smoothed_data(noise_scale):
    """E |x + noise|^2 = |x|^2 + d scale^2: the documented bias is d (1 + theta) scale^2 for each observation."""
    estimator = ebm.ScoreMatching("denoising", noise_scale=noise_scale)
    series = gradients(gaussian, estimator, X, burn_in=0, num_updates=1000)
    assert_mean(series, GAUSSIAN + 12 * DIM * (1 + THETA) * noise_scale**2)


@pytest.mark.slow
@pytest.mark.parametrize("noise_scale", [0.05, 0.5])
def test_denoising_on_a_sphere_is_that_of_the_smoothed_data(noise_scale):  # 10 s
    """Of the explicit loss at points moved by the noise, drawn here by themselves."""
    estimator = ebm.ScoreMatching("denoising", noise_scale=noise_scale, num_slices=20)
    series = gradients(fisher_bingham, estimator, ON_SPHERE, burn_in=0, num_updates=2000)
    noise = random.normal(random.key(1), (200_000, 12, DIM)) * noise_scale
    velocity = kernels.SPHERE.project(ON_SPHERE, noise)
    moved = kernels.SPHERE.retract(ON_SPHERE, ON_SPHERE + velocity)[0]
    assert_mean(series, jnp.sum(jnp.mean(fisher_bingham_terms(moved), 0)))


def f1(power, seed=0, num=8):
    features = random.normal(random.key(seed), (num, DIM))
    features = features / jnp.linalg.norm(features, axis=-1, keepdims=True)
    signs = jnp.where(jnp.arange(num) % 2 == 0, 1.0, -1.0)
    return lambda theta: ebm.F1Energy(features, jnp.full(num, -1.0) + theta, signs, radius=2.0, power=power)


@pytest.mark.slow
@pytest.mark.parametrize(
    "base", [dist.Normal(0, 1).expand([DIM]).to_event(1), ebm.SphereUniform(DIM)], ids=["R^d", "sphere"]
)
def test_one_langevin_move_from_the_data_is_score_matching(base):  # 10 s
    """(2 / s) (data - chains) is the gradient of |grad f|^2 - 2 (Lap f + <grad log tau, grad f>), as s goes to 0.

    Each chain starts at its own datum, and the move is averaged over the noise and its negative.
    """
    make = f1(3)
    x = ON_SPHERE if isinstance(base, ebm.SphereUniform) else X

    def energy(theta, x):
        return make(theta)(x)

    def score_matching(theta):
        d = ebm.EnergyBased(make(theta), base)
        objective, _ = ebm.ScoreMatching().update(random.key(0), (), d, Observations(x))
        return -2 * jnp.sum(objective(x))

    exact = jax.grad(score_matching)(0.2)
    d = ebm.EnergyBased(make(0.2), base)
    geometry = kernels.SPHERE if isinstance(base, ebm.SphereUniform) else kernels.EUCLIDEAN

    def series(step_size):
        kernel = kernels.on_support(kernels.ula(step_size), d.support)
        start = kernel.init(x, d.unnormalized_log_prob)

        def drift_and_noise(key):
            moved = kernel.step(key, start, d.unnormalized_log_prob)[0].position
            if geometry is kernels.EUCLIDEAN:
                return moved, 2 * (x + step_size * start.logdensity_grad) - moved
            # the geodesic's initial velocity, back from its end
            along = geometry.project(x, moved)
            angle = jnp.arctan2(jnp.linalg.norm(along, axis=-1), jnp.sum(x * moved, -1))
            velocity = along / jnp.linalg.norm(along, axis=-1, keepdims=True) * angle[:, None]
            mirrored = 2 * step_size * start.logdensity_grad - velocity
            return moved, geometry.retract(x, x + mirrored)[0]

        def gradient(key):
            ahead, back = drift_and_noise(key)
            slope = jax.grad(lambda t, z: jnp.sum(energy(t, z)))
            chains = (slope(0.2, ahead) + slope(0.2, back)) / 2
            return 2 / step_size * (slope(0.2, x) - chains)

        return jax.jit(jax.vmap(jax.vmap(gradient)))(random.split(random.key(3), (4, 5000)))

    with jax.enable_x64(True):
        x = jnp.asarray(x, jnp.float64)
        base_error = abs(float(series(0.1).mean() - exact))
        small = series(3e-4)
        assert_mean(small, exact)
        assert abs(float(small.mean() - exact)) < base_error / 5


@pytest.mark.slow
@pytest.mark.parametrize("restart_prob", [0.2, 0.6])  # 12 s each
def test_restarts_are_score_matching_times_the_age_of_chains(restart_prob):
    """E_data - E_chains = s / (2 p_R) times the gradient of score matching, for small s."""
    make, step_size = f1(3), 2e-3
    base = dist.Normal(0, 1).expand([DIM]).to_event(1)

    def model(x):
        theta = numpyro.param("theta", 0.2)
        with numpyro.plate("data", 12):
            numpyro.sample("x", ebm.EnergyBased(make(theta), base), obs=x)

    pool = ebm.ChainPool(kernels.ula(step_size), 6000, restart_prob=restart_prob, init="data")
    chains = gradients(model, ebm.ContrastiveDivergence(pool), X, num_updates=400, burn_in=100)
    score = gradients(model, ebm.ScoreMatching(), X, num_updates=1, burn_in=0)[0, 0]
    # ScoreMatching's objective is half of the loss: its gradient s / p_R times
    assert_mean(np.asarray(chains) * restart_prob / step_size, score)


def network(power, learned=True, kind="f1"):
    def model(x):
        if kind == "f2":
            energy = ebm.f2_energy("energy", DIM, 16, radius=2.0, power=power)
        else:
            energy = ebm.f1_energy("energy", DIM, 16, radius=2.0, power=power)
            if not learned:
                features = jnp.eye(DIM)[jnp.arange(16) % DIM]
                energy = ebm.F1Energy(features, energy.log_weights, energy.signs, 2.0, power)
        with numpyro.plate("data", 12):
            numpyro.sample("x", ebm.EnergyBased(energy, dist.Normal(0, 1).expand([DIM]).to_event(1)), obs=x)

    return model


SLICED, DENOISING = ebm.ScoreMatching("sliced"), ebm.ScoreMatching("denoising", noise_scale=0.1)


@pytest.mark.parametrize(
    ("estimator", "model", "refused"),
    [
        (ebm.ScoreMatching(), network(1), True),
        (ebm.ScoreMatching(), network(2), True),
        (ebm.ScoreMatching(), network(3), False),
        (ebm.ScoreMatching(), network(2, learned=False), False),
        (ebm.ScoreMatching(), network(1, learned=False), True),
        (SLICED, network(1), True),
        (SLICED, network(2), True),
        (SLICED, network(3), False),
        (SLICED, network(2, kind="f2"), False),
        (SLICED, network(1, kind="f2"), True),
        (DENOISING, network(1), True),
        (DENOISING, network(2), False),
        (DENOISING, network(1, learned=False), False),
    ],
)
def test_kinks_that_differentiation_drops_are_refused(estimator, model, refused):
    svi = SVI(ebm.estimate(model, estimator), lambda x: None, optax.sgd(0.1), Trace_ELBO())
    if not refused:
        _, loss = svi.update(svi.init(random.key(0), X), X)
        assert jnp.isfinite(loss)
        return
    with pytest.raises(ValueError, match=r"needs a power of at least.*use (power|a smooth)|; use power"):
        svi.update(svi.init(random.key(0), X), X)


def test_noise_around_a_sphere_is_refused():
    svi = SVI(
        ebm.estimate(fisher_bingham, ebm.ScoreMatching("denoising", noise_scale=1.0)),
        lambda x: None,
        optax.sgd(0.1),
        Trace_ELBO(),
    )
    with pytest.raises(ValueError, match=r"at most 0\.5 radians"):
        svi.init(random.key(0), ON_SPHERE)


def test_score_matching_recovers_a_gaussian():
    """The minimiser is the inverse of the mean square, less the base's precision."""
    svi = SVI(ebm.estimate(gaussian, ebm.ScoreMatching()), lambda x: None, optax.adam(5e-2), Trace_ELBO())
    params = svi.run(random.key(0), 500, X, progress_bar=False).params
    assert float(params["theta"]) == pytest.approx(float(1 / jnp.mean(X**2) - 1), abs=1e-3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ebm.ScoreMatching("implicit"), "kind must be"),
        (lambda: ebm.ScoreMatching("denoising"), "needs a noise_scale"),
        (lambda: ebm.ScoreMatching("explicit", noise_scale=0.1), "noise_scale is for"),
        (lambda: ebm.ScoreMatching("denoising", noise_scale=-1), "noise_scale must be positive"),
        (lambda: ebm.ScoreMatching("sliced", num_slices=0), "num_slices"),
    ],
)
def test_arguments_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def bounded(x):
    theta = numpyro.param("theta", 1.0)
    numpyro.sample("x", ebm.EnergyBased(lambda x: theta * x, dist.Uniform(0, 1)), obs=jnp.full(3, 0.5))


def latent(x):
    theta = numpyro.param("theta", 1.0)
    z = numpyro.sample("z", ebm.EnergyBased(lambda z: theta * z**2, dist.Normal(0, 1)))
    numpyro.sample("x", dist.Normal(z, 1), obs=0.3)


@pytest.mark.parametrize(("model", "message"), [(bounded, "needs R\\^d or the unit sphere"), (latent, "is latent")])
def test_sites_that_it_does_not_serve_are_refused(model, message):
    guide = (lambda x: None) if model is bounded else (lambda x: numpyro.sample("z", dist.Normal(0, 1)))
    svi = SVI(ebm.estimate(model, ebm.ScoreMatching()), guide, optax.sgd(0.1), Trace_ELBO())
    with pytest.raises(ValueError, match=message):
        svi.init(random.key(0), X)
