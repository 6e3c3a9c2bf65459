"""NumPyro's inference interface."""

from numpyro_ebm.infer.dual import DivergenceError, DualSGDA
from numpyro_ebm.infer.exchange import Exchange
from numpyro_ebm.infer.mcmc import MALA, ULA
from numpyro_ebm.infer.measures import MeasureDynamics, MeasureHistory, MeasureState
from numpyro_ebm.infer.mmd import MMDFlow, MMDFlowResult, MMDWitness, arc_cosine_kernel
from numpyro_ebm.infer.optim import wasserstein_fisher_rao

__all__ = [
    "MALA",
    "ULA",
    "DivergenceError",
    "DualSGDA",
    "Exchange",
    "MMDFlow",
    "MMDFlowResult",
    "MMDWitness",
    "MeasureDynamics",
    "MeasureHistory",
    "MeasureState",
    "arc_cosine_kernel",
    "wasserstein_fisher_rao",
]
