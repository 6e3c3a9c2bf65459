"""What the scripts of this folder share: arguments, tables with error bars, verdicts, teachers and students."""

import argparse
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpyro
from jax import random

import numpyro_ebm as ebm

BATCH = 10_000


class Verdict(NamedTuple):
    """What the numbers say of a claim: "holds", "holds in part" or "not here", and in which setting."""

    claim: str
    outcome: str
    setting: str


def judge(claim: str, holds: bool, setting: str, in_part: bool = False) -> Verdict:
    return Verdict(claim, "holds" if holds else "holds in part" if in_part else "not here", setting)


def is_small(doc: str) -> bool:
    """Whether the command line asks for the small setting."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a small setting, in under two minutes")
    return parser.parse_args().small


def spread(values) -> str:
    """Mean and standard error over seeds."""
    values = np.asarray(values, float)
    return f"{np.mean(values):.3g} +- {np.std(values, ddof=1) / np.sqrt(len(values)):.1g}"


def print_table(header: list[str], rows: list[list]) -> None:
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def report(verdicts: list[Verdict], figure, name: str) -> list[Verdict]:
    """Print verdicts and write the figure."""
    print()
    for verdict in verdicts:
        print(f"{verdict.outcome.upper()}: {verdict.claim} ({verdict.setting})")
    figure.savefig(f"{name}.png", dpi=120)
    print(f"wrote {name}.png")
    return verdicts


def teacher(dim: int, kind: str, radius: float = 10.0, seed: int = 0) -> ebm.EnergyBased:
    """Density of an F1 energy on the sphere of R^dim: "mono", one neuron that attracts, or "multi", two that face away."""
    direction = np.random.default_rng(seed).normal(size=(2, dim))
    first = direction[0] / np.linalg.norm(direction[0])
    second = direction[1] - direction[1] @ first * first
    second = second / np.linalg.norm(second)
    angle = np.deg2rad(120)
    neurons = {"mono": [first], "multi": [first, np.cos(angle) * first + np.sin(angle) * second]}[kind]
    log_weights = jnp.zeros(len(neurons))
    energy = ebm.F1Energy(jnp.asarray(neurons, jnp.float32), log_weights, -jnp.ones(len(neurons)), radius=radius)
    return ebm.EnergyBased(energy, ebm.SphereUniform(dim))


def draws(distribution: ebm.EnergyBased, num: int, seed: int):
    """Draws by tempered SMC, shape ``(num, d)``."""
    particles = ebm.smc_sampler(distribution, random.key(seed), max(num, 8_000)).particles
    return random.permutation(random.key(seed), particles)[:num]


def student(dim: int, num_neurons: int = 64, radius: float = 10.0, power: int = 1):
    """Model of an F1 energy on the sphere; of more than `BATCH` observations each update sees as many."""

    def model(x):
        energy = ebm.f1_energy("energy", dim, num_neurons, radius=radius, power=power)
        with numpyro.plate("data", x.shape[0], subsample_size=min(x.shape[0], BATCH)):
            batch = numpyro.subsample(x, event_dim=1)
            numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(dim)), obs=batch)

    return model
