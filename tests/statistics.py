"""How statistical claims are tested.

Every comparison of a mean with its truth is a z-score whose standard error comes from the effective
sample size over four chains or more. The bound of 5 makes a chance failure of one comparison a matter
of 6e-7; with some 300 comparisons in the suite, the declared failure rate is below one in 5,000 runs,
and keys are fixed.
"""

import numpy as np
from numpyro.diagnostics import effective_sample_size

BOUND = 5.0


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
