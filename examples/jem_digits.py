"""One network that classifies digits, generates them, cleans them and knows what is none.

Trains scikit-learn's handwritten digits three ways, each a NumPyro model of a few lines: by cross-entropy; as a joint
energy-based model (JEM); and as a stabilised one (ST-JEM: Sustek et al. 2023, arXiv:2303.04187). The grid of
activations, learning rates, Langevin steps and seeds shows where JEM diverges (an energy over 1e4, as `chain_report`
says) and that ST-JEM does not. Then one ST-JEM classifies, generates, denoises, in-paints and scores what it has not
been trained on.

Prints its tables, writes ``jem_digits.png``. The whole grid takes 15 minutes on two cores, ``--small`` two.

Data: scikit-learn's digits (E. Alpaydin and C. Kaynak, UCI), and its photograph of a flower as what is no digit.
"""

import argparse
import itertools
import warnings

warnings.filterwarnings("ignore", message=".*ArviZ is undergoing", category=FutureWarning)

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
import optax
from flax import nnx
from jax import random
from numpyro.contrib.module import nnx_module
from numpyro.infer import MCMC, SVI, Trace_ELBO
from sklearn.datasets import load_digits, load_sample_image
from sklearn.metrics import roc_auc_score

import numpyro_ebm as ebm

BASE = dist.Normal(0, 1).expand([64]).to_event(1)
BATCH, POOL, TEMPERATURE = 64, 1_000, 0.1
ACTIVATIONS = {"swish": nnx.swish, "relu": nnx.relu}


def digits():
    """Pixels in [-1, 1] and labels: 1,400 digits to train on, the others held out."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x, y = (data.data[order] / 8 - 1).astype(np.float32), data.target[order].astype(np.int32)
    return (x[:1400], y[:1400]), (x[1400:], y[1400:])


class Network(nnx.Module):
    def __init__(self, activation, rngs):
        sizes = (64, 256, 256, 10)
        self.layers = nnx.List([nnx.Linear(i, o, rngs=rngs) for i, o in itertools.pairwise(sizes)])
        self.activation = activation

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = self.activation(layer(x))
        return self.layers[-1](x)


def program(kind, network):
    """The NumPyro model: log p(y|x), and before it log p(x) for JEM, log p(x|y) for ST-JEM."""

    def model(x, y):
        joint = ebm.JointEnergy(nnx_module("logits", network), BASE)
        with numpyro.plate("data", x.shape[0], subsample_size=BATCH):
            xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
            if kind == "JEM":
                numpyro.sample("x", joint.marginal(), obs=xb)
            if kind == "ST-JEM":
                numpyro.sample("x", joint.conditional(yb), obs=xb)
            numpyro.sample("y", joint.classifier(xb), obs=yb)

    return model


def train(kind, activation, learning_rate, num_steps, seeds, x, y, num_epochs=60):
    """Train with several seeds at once. Returns the joint energies, and whether each run diverged."""
    kernel = ebm.kernels.ula(0.05, temperature=TEMPERATURE)
    pool = ebm.ChainPool(kernel, POOL, num_chains=BATCH, num_steps=num_steps, reinit_prob=0.05)
    estimator = ebm.SoftmaxContrastive(pool) if kind == "ST-JEM" else ebm.ContrastiveDivergence(pool)
    results = []
    for seed in seeds:
        model = program(kind, Network(ACTIVATIONS[activation], nnx.Rngs(seed)))
        model = model if kind == "cross-entropy" else ebm.estimate(model, estimator)
        svi = SVI(model, lambda x, y: None, optax.adam(learning_rate), Trace_ELBO())
        num_updates = num_epochs * -(-len(x) // BATCH)
        result = svi.run(random.key(seed), num_updates, x, y, progress_bar=False)
        diverged = kind != "cross-entropy" and ebm.chain_report(result.state)["x"].diverged
        network = nnx.merge(nnx.graphdef(Network(ACTIVATIONS[activation], nnx.Rngs(seed))), _state(result.params))
        results.append((ebm.JointEnergy(network, BASE), diverged, result.state))
    return results


def _state(params):
    return nnx.State(params["logits$params"])


def accuracy(joint, x, y):
    return float(jnp.mean(jnp.argmax(joint.classifier(x).logits, -1) == y))


def grid(cells, seeds, train_set, held_out):
    """Train all cells, print who diverged, and the accuracy paired by seed."""
    print(
        f"{'activation':10} {'rate':>6} {'steps':>5}   accuracy, %: cross-entropy  ST-JEM    JEM   diverged: ST-JEM  JEM"
    )
    counts, differences, plain = {"ST-JEM": 0, "JEM": 0}, [], {}
    for activation, rate, steps in cells:
        row = {}
        for kind in ("cross-entropy", "ST-JEM", "JEM"):
            key = kind, activation, rate
            if kind == "cross-entropy" and key in plain:
                row[kind] = plain[key]
                continue
            runs = train(kind, activation, rate, steps, seeds, *train_set)
            row[kind] = [accuracy(joint, *held_out) for joint, _, _ in runs], sum(d for _, d, _ in runs)
            plain[key] = row[kind]
        mean = {kind: 100 * np.mean(scores) for kind, (scores, _) in row.items()}
        print(
            f"{activation:10} {rate:6g} {steps:5}   {mean['cross-entropy']:26.1f}  {mean['ST-JEM']:6.1f} {mean['JEM']:6.1f}"
            f"   {row['ST-JEM'][1]:8} of {len(seeds)} {row['JEM'][1]:2} of {len(seeds)}",
            flush=True,
        )
        for kind in counts:
            counts[kind] += row[kind][1]
        differences += list(np.subtract(row["ST-JEM"][0], row["cross-entropy"][0]))
    total = len(cells) * len(seeds)
    print(f"diverged: ST-JEM {counts['ST-JEM']} of {total}, JEM {counts['JEM']} of {total}")
    print(f"accuracy of ST-JEM less cross-entropy's, paired: {100 * np.mean(differences):+.2f} points")


def generate(joint, labels, rng_key, num_steps=500):
    """Digits of given classes, by Langevin moves of p(x|y) from the base."""
    pool = ebm.ChainPool(ebm.kernels.ula(0.05, temperature=TEMPERATURE), 1, num_steps=num_steps)
    return pool.sample(rng_key, joint.conditional(labels))[0]


def clean(joint, noisy, rng_key):
    """Noisy digits, brought closer to the model by ten Langevin moves, all but without noise."""
    kernel = ebm.kernels.ula(0.02, temperature=1e-6)
    pool = ebm.ChainPool(kernel, len(noisy), num_steps=10, init=lambda rng_key, shape: noisy)
    return pool.sample(rng_key, joint.marginal())


def posterior_mean(joint, observed, scale, rng_key, num_samples=500):
    """The model as the prior of digits that are seen with noise, and where `scale` is large not at all."""
    # training at a temperature has learned the density to that power
    prior = ebm.EnergyBased(
        joint.marginal().energy, dist.Normal(0, TEMPERATURE**0.5).expand([64]).to_event(1), 1 / TEMPERATURE
    )

    def model():
        with numpyro.plate("digits", observed.shape[0]):
            x = numpyro.sample("x", prior)
            numpyro.sample("observed", dist.Normal(x, scale).to_event(1), obs=observed)

    mcmc = MCMC(ebm.MALA(model, step_size=1e-3), num_warmup=num_samples, num_samples=num_samples, progress_bar=False)
    mcmc.run(rng_key, init_params={"x": jnp.asarray(observed)})
    return mcmc.get_samples()["x"].mean(0)


def reliability(joint, x, y, num_bins=10):
    """Confidence, accuracy and share of each bin, and the expected calibration error."""
    probs = joint.classifier(x).probs
    confidence, right = np.asarray(probs.max(-1)), np.asarray(probs.argmax(-1) == y)
    bins = np.minimum((confidence * num_bins).astype(int), num_bins - 1)
    rows = [(confidence[bins == b].mean(), right[bins == b].mean(), np.mean(bins == b)) for b in np.unique(bins)]
    return rows, sum(share * abs(c - a) for c, a, share in rows)


def no_digits(num, seed=0):
    """Patches of 8 x 8 pixels of a photograph, in [-1, 1]."""
    photo = load_sample_image("flower.jpg").mean(-1) / 127.5 - 1
    rng = np.random.default_rng(seed)
    rows, columns = (rng.integers(0, size - 16, num) for size in photo.shape)
    return np.stack([photo[r : r + 16 : 2, c : c + 16 : 2].ravel() for r, c in zip(rows, columns, strict=True)]).astype(
        np.float32
    )


def applications(joint, plain, held_out):
    x, y = held_out
    noise = 0.5 * np.random.default_rng(1).normal(size=x.shape).astype(np.float32)
    noisy = x[:40] + noise[:40]
    cleaned = clean(joint, noisy, random.key(0))
    restored = posterior_mean(joint, noisy, 0.5, random.key(1))
    half = jnp.where(jnp.arange(64) < 32, 0.1, 1e3)
    covered = np.where(np.arange(64) < 32, x[:40], 0.0)
    painted = posterior_mean(joint, covered, half, random.key(2))
    print("\nmean squared error per pixel of 40 held-out digits")
    errors = {
        "noisy, sd 0.5": noisy,
        "ten Langevin moves": cleaned,
        "posterior mean": restored,
    }
    for name, image in errors.items():
        print(f"  {name:28} {float(np.mean((image - x[:40]) ** 2)):.3f}")
    below = np.arange(64) >= 32
    print(f"  {'lower half, mean digit':28} {float(np.mean((x.mean(0) - x[:40])[:, below] ** 2)):.3f}")
    print(f"  {'lower half, in-painted':28} {float(np.mean((painted - x[:40])[:, below] ** 2)):.3f}")
    scores = {
        name: np.asarray(joint.marginal().unnormalized_log_prob(z))
        for name, z in {
            "held-out digits": x,
            "patches of a photograph": no_digits(len(x)),
            "digits upside down": x[:, ::-1],
        }.items()
    }
    print("\narea under the ROC curve, held-out digits against")
    for name in list(scores)[1:]:
        both = np.concatenate([scores["held-out digits"], scores[name]])
        print(f"  {name:28} {roc_auc_score(np.arange(len(both)) < len(x), both):.3f}")
    calibration = {"ST-JEM": reliability(joint, x, y), "cross-entropy": reliability(plain, x, y)}
    print("\nexpected calibration error")
    for name, (_, error) in calibration.items():
        print(f"  {name:28} {error:.4f}")
    information = float(ebm.mutual_information(joint, x))
    print(f"\nmutual information of digit and class, held out: {information:.3f} nats of {np.log(10):.3f}")
    made = generate(joint, jnp.tile(jnp.arange(10), 4), random.key(3))
    right = float(jnp.mean(jnp.argmax(plain.classifier(made).logits, -1) == jnp.tile(jnp.arange(10), 4)))
    print(f"generated digits that the cross-entropy classifier reads as their class: {100 * right:.0f} %")
    draw(made, x, noisy, cleaned, restored, covered, painted, scores, calibration)


def draw(made, x, noisy, cleaned, restored, covered, painted, scores, calibration):
    figure = plt.figure(figsize=(12, 8), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.2, 1])
    left, right = top.subfigures(1, 2)

    def show(axes, images, title):
        axes.imshow(np.concatenate(np.asarray(images).reshape(-1, 8, 8), 1), cmap="gray_r", vmin=-1, vmax=1)
        axes.set_title(title, fontsize=9)
        axes.set_axis_off()

    left.suptitle("Generated, class by class")
    for row, axes in enumerate(left.subplots(4, 1)):
        show(axes, made[10 * row : 10 * row + 10], "")
    right.suptitle("Held-out digits")
    rows = {
        "clean": x,
        "noisy": noisy,
        "ten Langevin moves": cleaned,
        "posterior mean": restored,
        "lower half hidden": covered,
        "in-painted": painted,
    }
    for (title, images), axes in zip(rows.items(), right.subplots(6, 1), strict=True):
        show(axes, images[:10], title)
    density, diagram = bottom.subplots(1, 2)
    for name, values in scores.items():
        density.hist(np.clip(values, -150, None), bins=40, alpha=0.6, density=True, label=name)
    density.set_xlabel("log-density, up to a constant")
    density.legend()
    density.set_title("What is no digit")
    for name, (points, error) in calibration.items():
        confidence, right_share, _ = np.transpose(points)
        diagram.plot(confidence, right_share, "o-", label=f"{name}, error {error:.3f}")
    diagram.plot([0, 1], [0, 1], color="gray", linewidth=0.8)
    diagram.set(xlabel="confidence", ylabel="accuracy", title="Reliability", xlim=(0, 1.02), ylim=(0, 1.02))
    diagram.legend()
    figure.savefig("jem_digits.png", dpi=150)
    print("wrote jem_digits.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="one seed in two cells of the grid")
    parser.add_argument("--no-grid", action="store_true", help="the applications alone")
    options = parser.parse_args()
    train_set, held_out = digits()
    cells = list(itertools.product(ACTIVATIONS, (1e-3, 5e-3), (5, 20)))
    seeds = range(3)
    if options.small:
        cells, seeds = [("swish", 1e-3, 5), ("relu", 5e-3, 5)], range(1)
    if not options.no_grid:
        grid(cells, seeds, train_set, held_out)
    ((joint, _, _),) = train("ST-JEM", "swish", 1e-3, 20, [0], *train_set)
    ((plain, _, _),) = train("cross-entropy", "swish", 1e-3, 20, [0], *train_set)
    applications(joint, plain, held_out)


if __name__ == "__main__":
    main()
