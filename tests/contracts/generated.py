"""Generated input: a few examples in the fast tests, many in the slow ones."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays


def generated(fast, slow, **strategies):
    """Run a test over generated input, the same at every run."""

    def decorate(test):
        @pytest.mark.parametrize("num_examples", [fast, pytest.param(slow, marks=pytest.mark.slow)])
        def run(num_examples):
            profile = settings(
                max_examples=num_examples,
                derandomize=True,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            profile(given(**strategies)(test))()

        run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
        return run

    return decorate


SCALES = st.sampled_from([1e-30, 1e-12, 1e-3, 1.0, 1e3, 1e12, 1e30])


def floats(*shape, low=-4, high=4):
    """Arrays of float32 numbers in eighths, zeros and repeated ones among them; scales make them large or small."""
    eighths = st.integers(8 * low, 8 * high).map(lambda number: number / 8)
    return arrays.arrays(np.float32, shape, elements=eighths, fill=st.sampled_from([0.0, 1.0]))
