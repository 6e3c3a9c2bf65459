"""What a joint energy-based classifier is good for beside classifying (paper B, section 5), on digits.

Cross-entropy, JEM and ST-JEM of the same network; the logits of the first make a joint energy too, which nobody trained.
Class-conditional generation; denoising by a few Langevin steps, against the noise, and as a posterior; in-painting; scores of what is no
digit; calibration; accuracy under corruption and under small adversarial steps; three seeds. Writes ``b_applications.png``. Ten minutes
on two cores.
"""

from functools import cache

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from classifiers import (
    SEEDS,
    TEMPERATURE,
    Perceptron,
    accuracy,
    buffer,
    digits,
    generate,
    program,
    train,
)
from common import is_small, judge, print_table, report, spread
from jax import random
from numpyro.infer import MCMC
from sklearn.calibration import calibration_curve
from sklearn.datasets import load_sample_image
from sklearn.metrics import roc_auc_score

import numpyro_ebm as ebm

NOISES = (0.25, 0.5, 1.0)
SHIFTS = (0.05, 0.1, 0.2)
LOWER = np.arange(64) >= 32
GENERATED = "generated, to the nearest digit of the class: MSE"


def seen_with_noise(joint, observed, scale):
    """The model as the prior of digits that are seen with noise, and where `scale` is large not at all."""
    # training at a temperature has learned the density to that power
    base = dist.Normal(0, TEMPERATURE**0.5).expand([64]).to_event(1)
    with numpyro.plate("digits", observed.shape[0]):
        x = numpyro.sample("x", ebm.EnergyBased(joint.marginal().energy, base, 1 / TEMPERATURE))
        numpyro.sample("observed", dist.Normal(x, scale).to_event(1), obs=observed)


@cache
def sampler(num_samples: int) -> MCMC:
    """Compiled once for all models."""
    kernel = ebm.MALA(seen_with_noise, step_size=1e-3)
    return MCMC(kernel, num_warmup=num_samples, num_samples=num_samples, progress_bar=False, jit_model_args=True)


def posterior_mean(joint, observed, scale, num_samples: int):
    observed, mcmc = jnp.asarray(observed), sampler(num_samples)
    mcmc.run(random.key(0), joint, observed, scale, init_params={"x": observed})
    return mcmc.get_samples()["x"].mean(0)


@jax.jit
def denoised(joint, noisy):
    """Ten Langevin moves, all but without noise."""
    kernel = ebm.kernels.ula(0.02, temperature=1e-6)
    pool = ebm.ChainPool(kernel, len(noisy), num_steps=10, init=lambda rng_key, shape: noisy)
    return pool.sample(random.key(0), joint.marginal())


@jax.jit
def attacked(joint, x, y, size: float, num_steps: int = 10):
    """Ten signed gradient steps against the classifier, no pixel further than `size`."""

    def loss(z):
        return -jnp.sum(joint.classifier(z).log_prob(y))

    z = x
    for _ in range(num_steps):
        z = jnp.clip(z + 2.5 * size / num_steps * jnp.sign(jax.grad(loss)(z)), x - size, x + size)
    return z


def corrupted(x, rng) -> dict:
    images = x.reshape(-1, 8, 8)
    hidden = images.copy()
    hidden[:, 2:5, 2:5] = -1
    return {
        "noise, sd 0.5": x + 0.5 * rng.normal(size=x.shape).astype(np.float32),
        "one pixel to the right": np.roll(images, 1, -1).reshape(x.shape),
        "3 x 3 pixels hidden": hidden.reshape(x.shape),
        "half the contrast": x / 2,
    }


def no_digits(x, rng) -> dict:
    """Patches of a photograph of scikit-learn's, digits upside down, and uniform noise."""
    photo = load_sample_image("flower.jpg").mean(-1) / 127.5 - 1
    rows, columns = (rng.integers(0, size - 16, len(x)) for size in photo.shape)
    patches = [photo[r : r + 16 : 2, c : c + 16 : 2].ravel() for r, c in zip(rows, columns, strict=True)]
    return {
        "patches of a photograph": np.stack(patches).astype(np.float32),
        "digits upside down": x[:, ::-1],
        "uniform noise": rng.uniform(-1, 1, x.shape).astype(np.float32),
    }


def calibration_error(joint, x, y, num_bins: int = 10) -> float:
    """Expected calibration error, in per cent."""
    probs = np.asarray(joint.classifier(x).probs)
    confidence, right = probs.max(-1), probs.argmax(-1) == y
    edges = np.linspace(0, 1, num_bins + 1)
    counts, _ = np.histogram(confidence, edges)
    accuracies, confidences = calibration_curve(right, confidence, n_bins=num_bins)
    return float(100 * np.sum(counts[counts > 0] / len(y) * np.abs(accuracies - confidences)))


def nearest(images, labels, held_out) -> float:
    """Mean squared difference per pixel to the nearest held-out digit of the class."""
    x, y = held_out
    return float(
        np.mean(
            [np.min(np.mean((x[y == label] - image) ** 2, -1)) for image, label in zip(images, labels, strict=True)]
        )
    )


def measure(joint, held_out, seed: int, small: bool):
    """All numbers of one model, and its pictures."""
    x, y = held_out
    rng = np.random.default_rng(seed)
    labels = jnp.tile(jnp.arange(10), 4)
    made = generate(joint, labels, random.key(seed))
    numbers = {
        "accuracy, %": 100 * accuracy(joint, x, y),
        "calibration error, %": calibration_error(joint, x, y),
        GENERATED: nearest(np.asarray(made), np.asarray(labels), held_out),
    }
    clean = x[: 20 if small else 40]
    pictures = {"generated": made, "clean": clean}
    for noise in NOISES:
        noisy = clean + noise * rng.normal(size=clean.shape).astype(np.float32)
        images = {"Langevin steps": denoised(joint, noisy)}
        if noise == 0.5 or not small:
            images["posterior"] = posterior_mean(joint, noisy, noise, 200 if small else 500)
        for name, image in images.items():
            numbers[f"denoised by {name}, sd {noise:g}: MSE"] = float(np.mean((image - clean) ** 2))
        if noise == 0.5:
            pictures |= {"noisy": noisy, **images}
    if not small:
        scale = jnp.where(LOWER, 1e3, 0.1)
        painted = posterior_mean(joint, np.where(LOWER, 0, clean), scale, 1_000)
        numbers["lower half in-painted: MSE"] = float(np.mean((painted - clean)[:, LOWER] ** 2))
        pictures["in-painted"] = painted
    score = joint.marginal().unnormalized_log_prob
    for name, others in no_digits(x, rng).items():
        scores = np.nan_to_num(np.concatenate([score(x), score(others)]))
        numbers[f"AUROC against {name}"] = roc_auc_score(np.arange(len(scores)) < len(x), scores)
    for name, worse in corrupted(x, rng).items():
        numbers[f"accuracy, {name}, %"] = 100 * accuracy(joint, worse, y)
    for size in SHIFTS:
        numbers[f"accuracy, adversarial steps of {size:g}, %"] = 100 * accuracy(joint, attacked(joint, x, y, size), y)
    return numbers, pictures


def main(small: bool):
    num_epochs, num_steps = (12, 5) if small else (60, 20)
    data, network = digits(), Perceptron(nn.swish, 10)
    pool = buffer(num_steps)
    methods = {
        "cross-entropy": None,
        "JEM": ebm.ContrastiveDivergence(pool),
        "ST-JEM": ebm.SoftmaxContrastive(pool),
    }
    found, pictures = {}, {}
    for method, estimator in methods.items():
        runs = train(program(method, network), estimator, network, data, num_epochs, 1e-3)
        print(f"{method}: diverged {runs.num_diverged} of {SEEDS}")
        for seed, joint in enumerate(runs.joints):
            numbers, images = measure(joint, data.held_out, seed, small)
            pictures.setdefault(method, images)
            for name, value in numbers.items():
                found.setdefault(name, {}).setdefault(method, []).append(value)
    print_table(["", *methods], [[name, *(spread(values[m]) for m in methods)] for name, values in found.items()])
    mean_digit = float(np.mean((data.x.mean(0) - data.held_out[0])[:, LOWER] ** 2))
    real = nearest(data.x[:200], data.y[:200], data.held_out)
    print(
        f"MSE of the mean digit in the lower half {mean_digit:.3f}; of a training digit to the nearest of its class {real:.3f}"
    )

    figure = plt.figure(figsize=(13, 7), layout="constrained")
    for sub, (method, images) in zip(figure.subfigures(1, len(methods)), pictures.items(), strict=True):
        sub.suptitle(method)
        axes = sub.subplots(len(images) + 1, 1)
        rows = {"generated": images["generated"][:10], "generated ": images["generated"][10:20]}
        rows |= {name: image[:10] for name, image in images.items() if name != "generated"}
        for ax, (name, image) in zip(axes, rows.items(), strict=True):
            ax.imshow(np.concatenate(np.asarray(image).reshape(-1, 8, 8), 1), cmap="gray_r", vmin=-1, vmax=1)
            ax.set_title(name, fontsize=8)
            ax.set_axis_off()

    def mean(name, method="ST-JEM"):
        return float(np.mean(found[name][method]))

    def best(name, larger=True):
        return (max if larger else min)(methods, key=lambda method: mean(name, method))

    robust = [name for name in found if name.startswith("accuracy, ") and name != "accuracy, %"]
    denoising = [name for name in found if name.startswith("denoised by posterior")]
    outside = [name for name in found if name.startswith("AUROC")]
    calibration = "calibration error, %"
    return report(
        [
            judge(
                "ST-JEM generates digits of a given class",
                mean(GENERATED) < 0.5 * mean(GENERATED, "cross-entropy"),
                f"mean squared difference to the nearest held-out digit of the class {mean(GENERATED):.2g}; {real:.2g} for real "
                f"digits, {mean(GENERATED, 'JEM'):.2g} JEM, {mean(GENERATED, 'cross-entropy'):.2g} cross-entropy",
                in_part=mean(GENERATED) < mean(GENERATED, "cross-entropy"),
            ),
            judge(
                "it denoises",
                all(mean(name) < 0.9 * float(name.split("sd ")[1].split(":")[0]) ** 2 for name in denoising),
                ", ".join(f"{name.removesuffix(': MSE')} to {mean(name):.3f}" for name in denoising),
                in_part=any(mean(name) < 0.5 * float(name.split("sd ")[1].split(":")[0]) ** 2 for name in denoising),
            ),
            judge(
                "it tells what is no digit better than the cross-entropy classifier's logits",
                all(mean(name) > mean(name, "cross-entropy") for name in outside),
                "; ".join(f"{name} {mean(name):.2f} for {mean(name, 'cross-entropy'):.2f}" for name in outside),
                in_part=any(mean(name) > mean(name, "cross-entropy") for name in outside),
            ),
            judge(
                "it is better calibrated than cross-entropy",
                best(calibration, larger=False) == "ST-JEM",
                f"{mean(calibration):.2f} % for {mean(calibration, 'cross-entropy'):.2f} %",
                in_part=mean(calibration) < mean(calibration, "cross-entropy"),
            ),
            judge(
                "it is more robust to corruption and adversarial steps than cross-entropy",
                all(mean(name) > mean(name, "cross-entropy") for name in robust),
                f"better in {sum(mean(name) > mean(name, 'cross-entropy') for name in robust)} of {len(robust)} settings",
                in_part=sum(mean(name) > mean(name, "cross-entropy") for name in robust) > len(robust) / 2,
            ),
            judge(
                "JEM, where it does not diverge, has the better density",
                mean(GENERATED, "JEM") < mean(GENERATED)
                and all(mean(name, "JEM") > mean(name) for name in outside)
                and all(mean(name, "JEM") < mean(name) for name in denoising if name.endswith("sd 0.5: MSE")),
                "digits nearer to real ones, better scores of what is no digit, less error at noise of 0.5",
            ),
        ],
        figure,
        "b_applications",
    )


if __name__ == "__main__":
    main(is_small(__doc__))
