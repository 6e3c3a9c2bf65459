"""How parameters learn."""

from numpyro_ebm.estimators.contrastive import ContrastiveDivergence
from numpyro_ebm.estimators.quadrature import Quadrature
from numpyro_ebm.estimators.score import ScoreMatching
from numpyro_ebm.estimators.softmax import SoftmaxContrastive

__all__ = ["ContrastiveDivergence", "Quadrature", "ScoreMatching", "SoftmaxContrastive"]
