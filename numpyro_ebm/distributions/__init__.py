"""Unnormalised densities as NumPyro distributions."""

from numpyro_ebm.distributions.energy_based import (
    EnergyBased,
    IntractableNormalizerError,
    caller_variables,
    detached,
    site_name,
    unwrap,
)
from numpyro_ebm.distributions.observations import refuse_faults, validate_observations
from numpyro_ebm.distributions.sphere import SphereUniform, StereographicTransform, is_sphere, sphere

__all__ = [
    "EnergyBased",
    "IntractableNormalizerError",
    "SphereUniform",
    "StereographicTransform",
    "caller_variables",
    "detached",
    "is_sphere",
    "refuse_faults",
    "site_name",
    "sphere",
    "unwrap",
    "validate_observations",
]
