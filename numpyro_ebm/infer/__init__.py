"""NumPyro's inference interface."""

from numpyro_ebm.infer.dual import DualSGDA
from numpyro_ebm.infer.exchange import Exchange
from numpyro_ebm.infer.mcmc import MALA, ULA
from numpyro_ebm.infer.measures import MeasureDynamics, MeasureHistory, MeasureState
from numpyro_ebm.infer.mmd import MMDFlow, MMDFlowResult, MMDWitness, arc_cosine_kernel
from numpyro_ebm.infer.monitored import MonitoredSVI
from numpyro_ebm.infer.optim import wasserstein_fisher_rao

__all__ = [
    "MALA",
    "ULA",
    "DualSGDA",
    "Exchange",
    "MMDFlow",
    "MMDFlowResult",
    "MMDWitness",
    "MeasureDynamics",
    "MeasureHistory",
    "MeasureState",
    "MonitoredSVI",
    "arc_cosine_kernel",
    "wasserstein_fisher_rao",
]
