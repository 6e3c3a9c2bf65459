"""Energy-based models in NumPyro."""

from numpyro_ebm import kernels
from numpyro_ebm.distributions import EnergyBased, IntractableNormalizerError, SphereUniform
from numpyro_ebm.energies import Energy, F1Energy, as_energy, f1_energy
from numpyro_ebm.estimators import ContrastiveDivergence
from numpyro_ebm.handlers import check_model, estimate, fitted_distribution
from numpyro_ebm.infer import MALA, ULA, DivergenceError, DualSGDA, wasserstein_fisher_rao
from numpyro_ebm.pool import ChainPool

__all__ = [
    "MALA",
    "ULA",
    "ChainPool",
    "ContrastiveDivergence",
    "DivergenceError",
    "DualSGDA",
    "Energy",
    "EnergyBased",
    "F1Energy",
    "IntractableNormalizerError",
    "SphereUniform",
    "as_energy",
    "check_model",
    "estimate",
    "f1_energy",
    "fitted_distribution",
    "kernels",
    "wasserstein_fisher_rao",
]
