"""Effect handlers that make energy-based sites trainable, and the check for the ones that are not."""

from numpyro_ebm.handlers.check import Dependencies, check_model, fitted_distribution, normalizer_dependencies
from numpyro_ebm.handlers.estimate import Estimated, WholeData, estimate, site_batch_shape
from numpyro_ebm.handlers.history import RECORDED
from numpyro_ebm.handlers.observed import Observed, observed_sites

__all__ = [
    "RECORDED",
    "Dependencies",
    "Estimated",
    "Observed",
    "WholeData",
    "check_model",
    "estimate",
    "fitted_distribution",
    "normalizer_dependencies",
    "observed_sites",
    "site_batch_shape",
]
