"""NumPyro's inference interface."""

from numpyro_ebm.infer.dual import DivergenceError, DualSGDA
from numpyro_ebm.infer.exchange import Exchange
from numpyro_ebm.infer.mcmc import MALA, ULA
from numpyro_ebm.infer.optim import wasserstein_fisher_rao

__all__ = ["MALA", "ULA", "DivergenceError", "DualSGDA", "Exchange", "wasserstein_fisher_rao"]
