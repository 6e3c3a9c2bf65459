"""Does training stay put? Two moons, 20,000 updates, ten seeds.

Trains a 2-128-128-1 network by `ContrastiveDivergence` with its defaults (a pool of MALA chains), and prints for each
seed the held-out log-likelihood by quadrature and the widest energy gap between chains and data. Training by
unadjusted moves of a fixed step runs away on this problem within a few thousand updates.

    python benchmarks/two_moons.py --seeds 10 --steps 20000

takes two to four minutes a seed on one core.
"""

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from flax import nnx
from jax import random
from numpyro.contrib.module import nnx_module
from numpyro.infer import SVI, Trace_ELBO
from sklearn.datasets import make_moons

import numpyro_ebm as ebm


class Network(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in zip((2, 128, 128), (128, 128, 1), strict=True)])

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = nnx.swish(layer(x))
        return self.layers[-1](x)


def moons(num: int, seed: int) -> np.ndarray:
    x, _ = make_moons(num, noise=0.1, random_state=seed)
    return (x - np.array([0.5, 0.25])).astype(np.float32)


def train(seed: int, num_steps: int, num_looks: int = 40):
    """Return the fitted distribution, and the energy gap and largest energy as they went."""
    x, held_out = moons(20_000, 0), moons(5_000, 1)
    network = Network(nnx.Rngs(seed))

    def model(x):
        energy = nnx_module("energy", network)
        with numpyro.plate("data", x.shape[0], subsample_size=256):
            batch = numpyro.subsample(x, event_dim=1)
            numpyro.sample("x", ebm.EnergyBased(energy, dist.Normal(0, 2).expand([2]).to_event(1)), obs=batch)

    estimated = ebm.estimate(model, ebm.ContrastiveDivergence())
    svi = SVI(estimated, lambda x: None, optax.adam(optax.cosine_decay_schedule(1e-3, num_steps, 0.01)), Trace_ELBO())

    def body(state, _):
        state, _ = svi.update(state, x)
        return state, state.mutable_state["x$chains"]["state"].energy_gap

    run = jax.jit(lambda state: jax.lax.scan(body, state, None, length=num_steps // num_looks))
    state, gaps = svi.init(random.key(seed), x), []
    for _ in range(num_looks):
        state, gap = run(state)
        gaps.append(np.asarray(gap))
    fitted = ebm.fitted_distribution(model, svi.get_params(state), x)
    return fitted, np.concatenate(gaps), state.mutable_state["x$chains"]["state"], held_out


def log_likelihood(fitted, x, bound: float = 8.0, num: int = 800) -> float:
    """Held-out log-likelihood, nats per point, its normaliser on a grid."""
    grid = np.linspace(-bound, bound, num, dtype=np.float32)
    points = jnp.asarray(np.stack(np.meshgrid(grid, grid), -1).reshape(-1, 2))
    log_z = jax.nn.logsumexp(jax.jit(fitted.unnormalized_log_prob)(points)) + 2 * np.log(grid[1] - grid[0])
    return float(jnp.mean(fitted.unnormalized_log_prob(x)) - log_z)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=20_000)
    options = parser.parse_args()
    print("seed  held-out nats  widest gap  largest energy  acceptance  step size  lost chains  seconds")
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        began = time.perf_counter()
        fitted, gaps, pool, held_out = train(seed, options.steps)
        print(
            f"{seed:4}  {log_likelihood(fitted, held_out):13.3f}  {np.abs(gaps).max():10.3f}  {float(pool.max_energy):14.2f}  "
            f"{float(pool.acceptance_rate):10.2f}  {float(pool.step_size):9.4f}  {int(pool.num_nonfinite):11}  "
            f"{time.perf_counter() - began:7.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
