"""How good a fit is, and how its training and chains went."""

from numpyro_ebm.diagnostics.arviz import block_fields, to_arviz
from numpyro_ebm.diagnostics.distance import ScoreDistance, score_distance
from numpyro_ebm.diagnostics.gap import DualityGap, duality_gap
from numpyro_ebm.diagnostics.posterior import SiteLogLikelihood, posterior_log_likelihood
from numpyro_ebm.diagnostics.training import training_diagnostics

__all__ = [
    "DualityGap",
    "ScoreDistance",
    "SiteLogLikelihood",
    "block_fields",
    "duality_gap",
    "posterior_log_likelihood",
    "score_distance",
    "to_arviz",
    "training_diagnostics",
]
