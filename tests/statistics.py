"""How statistical claims are tested.

A run of the whole suite fails by chance, without a fault, once in 1 / `FAILURE_RATE` runs at most: the rate is
shared out evenly (Bonferroni) to the numbers that are compared with a truth, fewer than `COMPARISONS`. Means are
compared by z-scores whose standard errors come from the effective sample size over four chains or more; samples
of z-scores and ranks by their uniformity. Keys are fixed, so that chance has its say when a release of JAX draws
other numbers, not from run to run.
"""

import numpy as np
from numpyro.diagnostics import effective_sample_size
from scipy import stats

FAILURE_RATE = 0.01
COMPARISONS = 4_000
LEVEL = FAILURE_RATE / COMPARISONS

#: What a z-score may be.
BOUND = stats.norm.isf(LEVEL / 2)


def z_scores(draws, truth):
    """z-scores of means of `draws`, shape (chains, draws, ...), against `truth`, shape (...)."""
    draws = np.asarray(draws, np.float64)
    assert draws.ndim >= 2
    assert draws.shape[0] >= 4, "four chains or more"
    ess = np.minimum(effective_sample_size(draws), draws.shape[0] * draws.shape[1])
    error = draws.std((0, 1)) / np.sqrt(ess)
    return (draws.mean((0, 1)) - truth) / error


def assert_mean(draws, truth):
    z = z_scores(draws, truth)
    assert np.all(np.abs(z) < BOUND), f"z = {z}: mean {np.asarray(draws).mean((0, 1))}, truth {truth}"


def assert_uniform(values):
    """Hold `values`, independent of one another, to the uniform distribution on (0, 1)."""
    p = stats.kstest(values, "uniform").pvalue
    assert p > LEVEL, f"not uniform, p = {p:.1e}: {np.histogram(values, 10, (0, 1))[0]} in tenths"


def assert_uniform_ranks(ranks, num_ranks):
    """Hold `ranks`, integers in [0, num_ranks), independent of one another, to be equally likely."""
    counts = np.bincount(ranks, minlength=num_ranks)
    p = stats.chisquare(counts).pvalue
    assert p > LEVEL, f"not uniform, p = {p:.1e}: {counts}"


def assert_coverage(covered, confidence):
    """Hold intervals, of which `covered` says whether they hold the truth, to their confidence."""
    p = stats.binomtest(int(np.sum(covered)), len(covered), confidence).pvalue
    assert p > LEVEL, (
        f"{np.sum(covered)} of {len(covered)} cover the truth at a confidence of {confidence}, p = {p:.1e}"
    )
