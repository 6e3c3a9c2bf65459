"""How good a fit is, and how its training and chains went."""

from numpyro_ebm.diagnostics.distance import ScoreDistance, score_distance
from numpyro_ebm.diagnostics.gap import DualityGap, duality_gap
from numpyro_ebm.diagnostics.training import training_diagnostics

__all__ = ["DualityGap", "ScoreDistance", "duality_gap", "score_distance", "training_diagnostics"]
