"""Paper B's mutual-information term: off, as the sum of eq. 15, and of the model itself, as in eq. 13.

Digits 0 to 3 in their first two principal components, where a grid gives p(y) and p(x) exactly: all of them, and with classes
thinned to 1, 1/2, 1/4 and 1/8. Held-out log-likelihood of x, accuracy, mutual information and p(y) of the model, three seeds.
Writes ``b_mutual_information.png``. Four minutes on two cores.
"""

import flax.linen as nn
import matplotlib.pyplot as plt
import numpy as np
import optax
from classifiers import BATCH, SEEDS, Data, Perceptron, accuracy, digits, program, train
from common import is_small, judge, print_table, report, spread
from jax import random

import numpyro_ebm as ebm

NUM_CLASSES = 4
TERMS = {  # which model, and how much of eq. 13's term
    "off": ("JEM", 0.0),
    "eq. 15": ("ST-JEM", 0.0),
    "eq. 13": ("JEM", 1.0),
}


def in_the_plane(thinned: bool) -> Data:
    """Two principal components, standardised; of class k the first half to the power k, where thinned."""
    data = digits()
    x, y = np.concatenate([data.x, data.held_out[0]]), np.concatenate([data.y, data.held_out[1]])
    x, y = x[y < NUM_CLASSES], y[y < NUM_CLASSES]
    _, _, axes = np.linalg.svd(x - x.mean(0), full_matrices=False)
    x = (x - x.mean(0)) @ axes[:2].T
    x = (x / x.std(0)).astype(np.float32)
    share = 0.5**y if thinned else np.ones(len(y))
    rank = np.array([np.sum(y[:i] == y[i]) for i in range(len(y))])
    kept = rank < share * np.bincount(y)[y]
    x, y = x[kept], y[kept]
    num = int(0.75 * len(y))
    return Data(x[:num], y[:num], (x[num:], y[num:]))


def model_draws(joint: ebm.JointEnergy, num: int = 20_000) -> np.ndarray:
    """Draws of p(x) by its values on a grid, whose modes have their weights whatever chains do."""
    axis = np.linspace(-8, 8, 401, dtype=np.float32)
    points = np.stack(np.meshgrid(axis, axis), -1).reshape(-1, 2)
    log_density = np.asarray(joint.marginal().unnormalized_log_prob(points), float)
    density = np.exp(log_density - log_density.max())
    return points[np.random.default_rng(0).choice(len(points), num, p=density / density.sum())]


def main(small: bool):
    num_epochs = 45 if small else 300
    network = Perceptron(nn.swish, NUM_CLASSES, width=64)
    rows, found = [], {}
    figure, axes = plt.subplots(2, len(TERMS), figsize=(12, 7), layout="constrained")
    for row, name in enumerate(("balanced", "unbalanced")):
        data = in_the_plane(name == "unbalanced")
        # a rate that falls to zero, as p(y) is else that of the last few updates
        rate = optax.cosine_decay_schedule(3e-3, num_epochs * -(-len(data.x) // BATCH))
        frequencies = np.bincount(data.y) / len(data.y)
        for ax, (term, (kind, weight)) in zip(axes[row], TERMS.items(), strict=True):
            estimator = ebm.ContrastiveDivergence(
                ebm.ChainPool(pool_size=256, num_steps=20, reinit_prob=0.1), mutual_information=weight
            )
            runs = train(program(kind, network), estimator, network, data, num_epochs, rate)
            x, y = data.held_out
            draws = [model_draws(joint) for joint in runs.joints]
            shares = np.array(
                [joint.classifier(own).probs.mean(0) for joint, own in zip(runs.joints, draws, strict=True)]
            )
            likelihoods = runs.scores(
                lambda joint, x=x: ebm.log_likelihood(joint.marginal(), x, random.key(0), method="quadrature").mean
            )
            information = np.array(
                [float(ebm.mutual_information(j, d)) for j, d in zip(runs.joints, draws, strict=True)]
            )
            entropy = -np.sum(shares * np.log(shares), -1)
            found[name, term] = {
                "likelihood": likelihoods,
                "accuracy": runs.scores(lambda joint, x=x, y=y: 100 * accuracy(joint, x, y)),
                "information": information,
                "entropy": entropy,
                "apart": np.abs(shares - frequencies).sum(-1) / 2,
            }
            values = found[name, term]
            rows.append(
                [
                    name,
                    term,
                    *(spread(values[key]) for key in ("likelihood", "accuracy", "information", "entropy", "apart")),
                    f"{runs.num_diverged} of {SEEDS}",
                ]
            )
            ebm.plots.plot_density(runs.joints[0].marginal(), ax, bounds=((-3, -3), (3, 3)))
            ax.scatter(*data.x.T, c=data.y, s=3, cmap="tab10")
            ax.set_title(f"{name}, {term}: p(y) {' '.join(f'{share:.2f}' for share in shares[0])}", fontsize=9)
        print(
            f"{name}: data's p(y) {np.round(frequencies, 3).tolist()}, entropy {-np.sum(frequencies * np.log(frequencies)):.3f}"
        )
    print_table(
        ["classes", "term", "log p(x)", "accuracy, %", "information", "entropy of p(y)", "TV of p(y)", "diverged"], rows
    )

    def mean(name, term, key):
        return float(np.mean(found[name, term][key]))

    both = ("balanced", "unbalanced")
    return report(
        [
            judge(
                "the term raises the mutual information of the model",
                all(mean(n, "eq. 13", "information") > mean(n, "off", "information") for n in both),
                "eq. 13 against off: "
                + ", ".join(
                    f"{mean(n, 'off', 'information'):.2f} to {mean(n, 'eq. 13', 'information'):.2f} {n}" for n in both
                ),
            ),
            judge(
                "with balanced classes eq. 15 has the optimum of the likelihood",
                mean("balanced", "eq. 15", "apart") < 2 * mean("balanced", "off", "apart"),
                f"it leaves p(y) to chance: total variation to the data's {mean('balanced', 'eq. 15', 'apart'):.2g}, "
                f"{mean('balanced', 'off', 'apart'):.2g} with the term off; unbalanced "
                f"{mean('unbalanced', 'eq. 15', 'apart'):.2g} and {mean('unbalanced', 'off', 'apart'):.2g}",
                in_part=mean("balanced", "eq. 15", "likelihood") > mean("balanced", "off", "likelihood") - 0.2,
            ),
            judge(
                "eq. 13 pushes p(y) towards uniform where classes are unbalanced",
                mean("unbalanced", "eq. 13", "entropy") > mean("unbalanced", "off", "entropy") + 0.02,
                f"entropy {mean('unbalanced', 'eq. 13', 'entropy'):.2f}, {mean('unbalanced', 'off', 'entropy'):.2f} with the term off",
            ),
        ],
        figure,
        "b_mutual_information",
    )


if __name__ == "__main__":
    main(is_small(__doc__))
