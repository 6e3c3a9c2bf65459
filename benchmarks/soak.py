"""Train for 100,000 updates, and print memory and fit as it goes: where either drifts, it fails.

    python benchmarks/soak.py [--updates 100000]

Dual SGDA on the sphere, and contrastive divergence and the minibatch softmax on two moons, each in one process. Two
minutes on two cores.
"""

import argparse
import resource

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from flax import linen as nn
from jax import random
from numpyro.contrib.module import flax_module
from numpyro.infer import Trace_ELBO
from sklearn.datasets import make_moons

import numpyro_ebm as ebm


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.swish(nn.Dense(32)(x)))


def on_the_sphere(x):
    energy = ebm.f1_energy("energy", dim=3, num_neurons=32, radius=5.0)
    with numpyro.plate("data", x.shape[0], subsample_size=100):
        numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=numpyro.subsample(x, event_dim=1))


def classifier(x, y, stabilised):
    base = dist.Normal(0, 2).expand([2]).to_event(1)
    joint = ebm.JointEnergy(flax_module("logits", Network(), input_shape=(2,)), base)
    with numpyro.plate("data", x.shape[0], subsample_size=64):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("x", joint.conditional(yb) if stabilised else joint.marginal(), obs=xb)
        numpyro.sample("y", joint.classifier(xb), obs=yb)


def memory() -> float:
    """Largest memory so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Watch(ebm.Monitor):
    """Prints a row as the run goes, and sees that nothing goes wrong."""

    def __init__(self, name: str, every: int):
        super().__init__()
        self.name, self.every, self.rows = name, every, []

    def fault(self, state):
        num_updates = int(state.optim_state[0])
        if num_updates >= self.every * (len(self.rows) + 1):
            report = ebm.chain_report(state)["x"]
            numbers = map(float, (report.energy_gap, report.max_energy, report.acceptance_rate))
            self.rows.append((self.name, num_updates, memory(), len(jax.live_arrays()), *numbers))
            print("{:22s} {:7d} {:9.0f} {:12d} {:11.3f} {:15.1f} {:11.2f}".format(*self.rows[-1]), flush=True)
        return super().fault(state)


def trainers(every: int):
    """What is trained, each with its data."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(1_000, 3)) + np.array([0, 0, 1])
    points = (points / np.linalg.norm(points, axis=-1, keepdims=True)).astype(np.float32)
    x, y = make_moons(1_000, noise=0.1, random_state=0)
    moons = x.astype(np.float32), y.astype(np.int32)

    def svi(estimator):
        model, watch = ebm.estimate(classifier, estimator), Watch(type(estimator).__name__, every)
        return ebm.MonitoredSVI(model, lambda *args: None, optax.adam(1e-3), Trace_ELBO(), monitor=watch)

    pool = ebm.ChainPool(pool_size=256, num_steps=5)
    watch = Watch("DualSGDA", every)
    yield ebm.DualSGDA(on_the_sphere, step_size=1e-2, num_chains=500, monitor=watch), (points,)
    yield svi(ebm.ContrastiveDivergence(pool)), (*moons, False)
    yield svi(ebm.SoftmaxContrastive(pool)), (*moons, True)


def main(num_updates: int, num_looks: int = 10):
    print("trainer                updates  peak MiB  live arrays  energy gap  largest energy  acceptance")
    for trainer, args in trainers(num_updates // num_looks):
        trainer.run(random.key(0), num_updates, *args, progress_bar=False)
        _, _, peak, num_arrays, gap, *_ = zip(*trainer.monitor.rows, strict=True)
        if peak[-1] > 1.05 * peak[0] or num_arrays[-1] > num_arrays[0] or max(map(abs, gap)) > 1:
            raise SystemExit("memory grew, or chains left the data")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--updates", type=int, default=100_000)
    main(parser.parse_args().updates)
