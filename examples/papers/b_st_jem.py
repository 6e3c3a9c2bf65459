"""Paper B's main claim: joint energy-based models that diverge train stably with the minibatch in the denominator.

A perceptron and a convolutional network on digits, and a perceptron on a table of thirty measures of tumours, each in an easy setting
(swish, rate 1e-3) and a hard one (ReLU, rate 5e-3). Cross-entropy, JEM, JEM with a penalty on the energy gap of data and chains
(the usual stabiliser), and ST-JEM; three seeds. Divergence is an energy over 1e4, or one that is not finite. Writes ``b_st_jem.png``.
Twelve minutes on two cores.
"""

import flax.linen as nn
import jax
import matplotlib.pyplot as plt
import numpy as np
from classifiers import SEEDS, Convolutional, Perceptron, accuracy, buffer, digits, program, train, tumours
from common import is_small, judge, print_table, report, spread

import numpyro_ebm as ebm

PENALTY = 0.1
HARD = (nn.relu, 5e-3)
EASY = (nn.swish, 1e-3)


def methods(num_steps: int) -> dict:
    pool = buffer(num_steps)
    return {
        "cross-entropy": None,
        "JEM": ebm.ContrastiveDivergence(pool),
        "JEM, gap penalty": ebm.ContrastiveDivergence(pool, gap_penalty=PENALTY),
        "ST-JEM": ebm.SoftmaxContrastive(pool),
    }


def main(small: bool):
    cells = {
        "digits, perceptron": (digits(), Perceptron, 5 if small else 20, 10 if small else 60),
        "digits, convolutional": (digits(), Convolutional, 5, 40),
        "tumours, perceptron": (tumours(), Perceptron, 5 if small else 20, 15 if small else 100),
    }
    settings = {"swish, 1e-3": EASY, "ReLU, 5e-3": HARD}
    if small:
        del cells["digits, convolutional"], settings["swish, 1e-3"]
    rows, found = [], {}
    figure, axes = plt.subplots(
        len(settings), len(cells), figsize=(5 * len(cells), 7), sharey=True, squeeze=False, layout="constrained"
    )
    for column, (cell, (data, network_type, num_steps, num_epochs)) in enumerate(cells.items()):
        num_classes = int(data.y.max()) + 1
        for ax, (setting, (activation, rate)) in zip(axes[:, column], settings.items(), strict=True):
            network = network_type(activation, num_classes)
            for method, estimator in methods(num_steps).items():
                runs = train(program(method, network), estimator, network, data, num_epochs, rate)
                scores = 100 * runs.scores(lambda joint, data=data: accuracy(joint, *data.held_out))
                found[cell, setting, method] = scores, runs.num_diverged
                largest, gap = "", ""
                if estimator is not None:
                    largest, gap = f"{np.max(runs.report.max_energy):.2g}", f"{np.median(runs.report.energy_gap):.3g}"
                    first = jax.tree.map(lambda leaf: leaf[0], runs.states)
                    history = ebm.training_diagnostics(first)["max_energy"].isel(site=0)
                    ax.loglog(history["update"] + 1, history, label=method)
                rows.append([cell, setting, method, spread(scores), gap, largest, f"{runs.num_diverged} of {SEEDS}"])
            ax.axhline(1e4, color="black", linewidth=0.8)
            ax.set(title=f"{cell}, {setting}", xlabel="update")
        axes[0, 0].legend()
    for ax in axes[:, 0]:
        ax.set_ylabel("largest energy so far")
    print_table(["data, network", "setting", "method", "accuracy, %", "gap", "largest energy", "diverged"], rows)

    def diverged(method):
        return sum(count for (*_, own), (_, count) in found.items() if own == method)

    total = SEEDS * len(cells) * len(settings)
    lost = np.concatenate(
        [
            found[cell, setting, "cross-entropy"][0] - found[cell, setting, "ST-JEM"][0]
            for cell in cells
            for setting in settings
        ]
    )
    hard = list(settings)[-1]
    return report(
        [
            judge(
                "ST-JEM trains where JEM diverges",
                diverged("ST-JEM") == 0 and all(found[cell, hard, "JEM"][1] for cell in cells),
                f"diverged: ST-JEM {diverged('ST-JEM')} of {total}, JEM {diverged('JEM')}, JEM with the penalty "
                f"{diverged('JEM, gap penalty')}; JEM in the hard setting "
                + ", ".join(f"{found[cell, hard, 'JEM'][1]} of {SEEDS} ({cell})" for cell in cells),
                in_part=diverged("ST-JEM") == 0 < diverged("JEM"),
            ),
            judge(
                "it is no worse a classifier than cross-entropy",
                float(np.mean(lost)) < 0.5,
                f"paired by seed, cross-entropy less ST-JEM {spread(lost)} points",
            ),
            judge(
                "on other modalities and architectures too",
                all(
                    found[cell, setting, "ST-JEM"][1] == 0
                    for cell in cells
                    for setting in settings
                    if cell != "digits, perceptron"
                ),
                ", ".join(cell for cell in cells if cell != "digits, perceptron"),
            ),
            judge(
                "a penalty on the energy gap, the usual stabiliser, is enough",
                diverged("JEM, gap penalty") == 0,
                f"weight {PENALTY:g}: diverged {diverged('JEM, gap penalty')} of {total}",
                in_part=diverged("JEM, gap penalty") < diverged("JEM"),
            ),
        ],
        figure,
        "b_st_jem",
    )


if __name__ == "__main__":
    main(is_small(__doc__))
