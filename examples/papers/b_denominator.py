"""What the denominator of paper B's softmax holds, and what a sampler that fails does to training.

Digits, the same network in every row: JEM, and ST-JEM with the whole minibatch, the own class, the own observation or no
observation beside the chains, which are of p(x) or of p(x|y). Once with Langevin moves, once with a sampler that fails on purpose,
whose negatives are uniform. Accuracy, divergence (an energy over 1e4), and how many digits generated class by class another
classifier reads as such; three seeds. Writes ``b_denominator.png``. Eight minutes on two cores.
"""

from dataclasses import replace

import flax.linen as nn
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import numpyro.distributions as dist
from classifiers import SEEDS, Perceptron, accuracy, buffer, digits, generate, program, train
from common import is_small, judge, print_table, report, spread
from jax import random

import numpyro_ebm as ebm


def estimators(pool: ebm.ChainPool) -> dict:
    """By what the denominator holds: the kind of model, and its estimator."""
    few = replace(pool, pool_size=100, num_chains=8)  # for each class
    softmax = ebm.SoftmaxContrastive
    return {
        "JEM: chains, equal weights": ("JEM", ebm.ContrastiveDivergence(pool)),
        "chains alone": ("ST-JEM", softmax(pool, positives=None)),
        "and the observation": ("ST-JEM", softmax(pool, positives="own")),
        "and those of its class": ("ST-JEM", softmax(pool, positives="class")),
        "and the minibatch": ("ST-JEM", softmax(pool)),
        "minibatch, chains of p(x|y)": ("ST-JEM", softmax(few, target="conditional")),
    }


def main(small: bool):
    num_epochs, num_steps = (8, 5) if small else (60, 20)
    data, network = digits(), Perceptron(nn.swish, 10)
    (judge_of_digits,) = train(program("plain", network), None, network, data, 30, 1e-3, num_seeds=1).joints
    labels = jnp.tile(jnp.arange(10), 4)
    # nothing moves: each negative is drawn anew
    uniform = ebm.ChainPool(
        ebm.kernels.ula(1e-12), 64, reinit_prob=1.0, init=dist.Uniform(-1, 1).expand([64]).to_event(1)
    )
    samplers = {"Langevin": buffer(num_steps), "uniform": uniform}
    rows, found, pictures = [], {}, {}
    for sampler, pool in samplers.items():
        for name, (kind, estimator) in estimators(pool).items():
            if small and name in ("and those of its class", "minibatch, chains of p(x|y)"):
                continue
            runs = train(program(kind, network), estimator, network, data, num_epochs, 1e-3)
            made = [generate(joint, labels, random.key(seed)) for seed, joint in enumerate(runs.joints)]
            read = [100 * accuracy(judge_of_digits, images, labels) for images in made]
            scores = 100 * runs.scores(lambda joint: accuracy(joint, *data.held_out))
            found[sampler, name] = scores, runs.num_diverged, runs.report.max_energy
            pictures[sampler, name] = made[0][:10]
            rows.append(
                [
                    sampler,
                    name,
                    spread(scores),
                    f"{np.median(runs.report.energy_gap):.3g}",
                    f"{np.max(runs.report.max_energy):.2g}",
                    f"{runs.num_diverged} of {SEEDS}",
                    spread(read),
                ]
            )
    print_table(
        ["negatives", "denominator", "accuracy, %", "gap", "largest energy", "diverged", "generated right, %"], rows
    )

    figure, axes = plt.subplots(len(pictures) // 2, 2, figsize=(12, 7), layout="constrained")
    for ax, ((sampler, name), images) in zip(axes.T.ravel(), pictures.items(), strict=True):
        ax.imshow(np.concatenate(np.asarray(images).reshape(-1, 8, 8), 1), cmap="gray_r", vmin=-1, vmax=1)
        ax.set_title(f"{sampler}: {name}", fontsize=9)
        ax.set_axis_off()

    jem, batch, alone = "JEM: chains, equal weights", "and the minibatch", "chains alone"

    def size(sampler, name):
        return float(np.max(found[sampler, name][2]))

    anchored = [name for _, name in found if name not in (jem, alone)]
    return report(
        [
            judge(
                "with a sampler that fails JEM blows up, ST-JEM ignores its negatives",
                found["uniform", jem][1] == SEEDS and all(found["uniform", name][1] == 0 for name in anchored),
                f"uniform negatives, {num_epochs} epochs: JEM diverged {found['uniform', jem][1]} of {SEEDS}, largest energy "
                f"{size('uniform', jem):.1g}; {size('uniform', batch):.1g} with the minibatch",
                in_part=size("uniform", jem) > 10 * size("uniform", batch),
            ),
            judge(
                "the observation in the denominator is what makes it stable",
                size("uniform", alone) > 10 * size("uniform", "and the observation"),
                f"uniform negatives, largest energy {size('uniform', alone):.1g} without it, "
                f"{size('uniform', 'and the observation'):.1g} with it",
            ),
            judge(
                "the whole minibatch is better than the observation alone",
                np.mean(found["Langevin", batch][0]) > np.mean(found["Langevin", "and the observation"][0]),
                f"accuracy {np.mean(found['Langevin', batch][0]):.2f} % against "
                f"{np.mean(found['Langevin', 'and the observation'][0]):.2f} %",
            ),
        ],
        figure,
        "b_denominator",
    )


if __name__ == "__main__":
    main(is_small(__doc__))
