"""Paper B's eq. 21 on a finite space, exactly: where softmax weights share the optimum of the likelihood, and where not.

Twelve points, of which the data are five, and each distribution is a free vector of energies. Ascent along three gradients whose
expectations are sums: the likelihood's; eq. 20's, whose draws of the model are weighted by a softmax; and the same with as many
observations among the draws. Once each point occurs equally often, once some repeat; three random data sets and starts. Writes
``b_shared_optimum.png``. Half a minute on two cores.
"""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from common import is_small, judge, print_table, report, spread
from jax import lax

NUM_POINTS = 12


def weights(kind: str, logits, data):
    """How the gradient weights each point, in expectation over draws of the model."""
    draws = jax.nn.softmax(logits)
    if kind == "likelihood":
        return draws
    candidates = draws if kind == "softmax" else draws + data
    return jax.nn.softmax(logits + jnp.log(candidates))


def climb(kind: str, start, data, num_updates: int):
    """The model at the end of the ascent."""
    optimiser = optax.adam(optax.cosine_decay_schedule(0.1, num_updates))

    def advance(carry, _):
        logits, state = carry
        updates, state = optimiser.update(weights(kind, logits, data) - data, state)
        return (optax.apply_updates(logits, updates), state), None

    (logits, _), _ = lax.scan(advance, (start, optimiser.init(start)), length=num_updates)
    return jax.nn.softmax(logits)


KINDS = {"likelihood": "likelihood", "softmax": "eq. 20", "batch": "eq. 20, minibatch in it"}


def main(small: bool):
    num_updates = 5_000 if small else 50_000
    counts = {"once each": [1, 1, 1, 1, 1], "twice each": [2, 2, 2, 2, 2], "some repeat": [1, 1, 2, 4, 8]}
    rows, apart, roots = [], {}, []
    figure, axes = plt.subplots(1, len(counts), figsize=(14, 3.5), sharey=True, layout="constrained")
    for ax, (name, repeats) in zip(axes, counts.items(), strict=True):
        for place, (kind, label) in enumerate(KINDS.items()):
            apart[name, kind] = []
            for seed in range(3):
                rng = np.random.default_rng(seed)
                data = np.zeros(NUM_POINTS)
                data[rng.permutation(NUM_POINTS)[:5]] = np.array(repeats) / np.sum(repeats)
                found = np.asarray(
                    climb(kind, jnp.asarray(rng.normal(size=NUM_POINTS)), jnp.asarray(data), num_updates)
                )
                apart[name, kind].append(np.abs(found - data).sum() / 2)
                if (name, kind) == ("some repeat", "softmax"):
                    root = np.sqrt(data) / np.sqrt(data).sum()
                    roots.append(np.abs(found - root).sum() / 2)
            ax.bar(np.arange(NUM_POINTS) + 0.25 * place, found, 0.25, label=label)
        rows.append([name, *(spread(apart[name, kind]) for kind in KINDS)])
        ax.step(np.arange(NUM_POINTS + 1) - 0.25, np.append(data, 0), "k", where="post", linewidth=0.8, label="data")
        ax.set(title=name, xlabel="point")
    axes[0].set_ylabel("probability")
    axes[0].legend(fontsize=8)
    print_table(["data", *KINDS.values()], rows)
    print("total variation of model and data at the optimum")
    shared = max(max(apart[name, kind]) for name in ("once each", "twice each") for kind in KINDS)
    return report(
        [
            judge(
                "eq. 21: both have one optimum where each observation occurs equally often",
                shared < 1e-2,
                f"total variation to the data at most {shared:.1g}",
            ),
            judge(
                "not where observations repeat",
                min(apart["some repeat", "softmax"]) > 0.1 > 10 * max(apart["some repeat", "likelihood"]),
                f"total variation {np.mean(apart['some repeat', 'softmax']):.2g}; {np.mean(apart['some repeat', 'batch']):.2g} with the minibatch",
            ),
            judge(
                "the optimum of eq. 20 is then the square root of the data's frequencies, normalised",
                max(roots) < 1e-2,
                f"total variation to it at most {max(roots):.1g}",
            ),
        ],
        figure,
        "b_shared_optimum",
    )


if __name__ == "__main__":
    main(is_small(__doc__))
