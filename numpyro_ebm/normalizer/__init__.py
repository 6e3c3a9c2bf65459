"""Normalisers with their errors, and draws that do not depend on chains that mix."""

from numpyro_ebm.normalizer.likelihood import LogLikelihood, LogNormalizer, log_likelihood, log_mean, log_normalizer
from numpyro_ebm.normalizer.sampler import ParticleSampler, smc_sampler
from numpyro_ebm.normalizer.tail import pareto_k

__all__ = [
    "LogLikelihood",
    "LogNormalizer",
    "ParticleSampler",
    "log_likelihood",
    "log_mean",
    "log_normalizer",
    "pareto_k",
    "smc_sampler",
]
