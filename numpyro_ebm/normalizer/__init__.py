"""Normalisers with their errors, and draws that do not depend on chains that mix."""

from numpyro_ebm.normalizer.likelihood import LogLikelihood, LogNormalizer, log_likelihood, log_mean, log_normalizer
from numpyro_ebm.normalizer.sampler import ParticleSampler, smc_sampler

__all__ = [
    "LogLikelihood",
    "LogNormalizer",
    "ParticleSampler",
    "log_likelihood",
    "log_mean",
    "log_normalizer",
    "smc_sampler",
]
