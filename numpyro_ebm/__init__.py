"""Energy-based models in NumPyro."""

from numpyro_ebm.versions import check_versions

check_versions()

from numpyro_ebm import checkpoint, kernels, plots
from numpyro_ebm.diagnostics import (
    block_fields,
    duality_gap,
    kl_divergence,
    posterior_log_likelihood,
    score_distance,
    to_arviz,
    total_variation,
    training_diagnostics,
)
from numpyro_ebm.distributions import EnergyBased, IntractableNormalizerError, SphereUniform, standardized
from numpyro_ebm.energies import Energy, F1Energy, F2Energy, as_energy, f1_energy, f2_energy
from numpyro_ebm.estimators import ContrastiveDivergence, Quadrature, ScoreMatching, SoftmaxContrastive
from numpyro_ebm.handlers import check_model, estimate, fitted_distribution
from numpyro_ebm.infer import (
    MALA,
    ULA,
    DualSGDA,
    Exchange,
    MeasureDynamics,
    MMDFlow,
    MonitoredSVI,
    arc_cosine_kernel,
    wasserstein_fisher_rao,
)
from numpyro_ebm.joint import JointEnergy, mutual_information
from numpyro_ebm.monitor import DivergenceError, Monitor, chain_report
from numpyro_ebm.normalizer import log_likelihood, log_normalizer, smc_sampler
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
    "Exchange",
    "F1Energy",
    "F2Energy",
    "IntractableNormalizerError",
    "JointEnergy",
    "MMDFlow",
    "MeasureDynamics",
    "Monitor",
    "MonitoredSVI",
    "Quadrature",
    "ScoreMatching",
    "SoftmaxContrastive",
    "SphereUniform",
    "arc_cosine_kernel",
    "as_energy",
    "block_fields",
    "chain_report",
    "check_model",
    "checkpoint",
    "duality_gap",
    "estimate",
    "f1_energy",
    "f2_energy",
    "fitted_distribution",
    "kernels",
    "kl_divergence",
    "log_likelihood",
    "log_normalizer",
    "mutual_information",
    "plots",
    "posterior_log_likelihood",
    "score_distance",
    "smc_sampler",
    "standardized",
    "to_arviz",
    "total_variation",
    "training_diagnostics",
    "wasserstein_fisher_rao",
]
