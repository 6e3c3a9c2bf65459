"""How parameters learn."""

from numpyro_ebm.estimators.contrastive import ContrastiveDivergence

__all__ = ["ContrastiveDivergence"]
