"""How good a fit is, and how its training and chains went."""

from numpyro_ebm.diagnostics.arviz import block_fields, to_arviz
from numpyro_ebm.diagnostics.distance import Distance, kl_divergence, score_distance, total_variation
from numpyro_ebm.diagnostics.gap import DualityGap, duality_gap
from numpyro_ebm.diagnostics.posterior import SiteLogLikelihood, posterior_log_likelihood
from numpyro_ebm.diagnostics.training import training_diagnostics

__all__ = [
    "Distance",
    "DualityGap",
    "SiteLogLikelihood",
    "block_fields",
    "duality_gap",
    "kl_divergence",
    "posterior_log_likelihood",
    "score_distance",
    "to_arviz",
    "total_variation",
    "training_diagnostics",
]
