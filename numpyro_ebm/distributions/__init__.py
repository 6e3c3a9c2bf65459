"""Unnormalised densities as NumPyro distributions."""

from numpyro_ebm.distributions.energy_based import (
    EnergyBased,
    IntractableNormalizerError,
    caller_variables,
    components,
    detached,
    guard,
    site_name,
    unmasked,
    unwrap,
)
from numpyro_ebm.distributions.observations import refuse_faults, validate_observations
from numpyro_ebm.distributions.sphere import Ambient, SphereUniform, StereographicTransform, ambient, is_sphere, sphere
from numpyro_ebm.distributions.standardized import StandardizedEnergy, standardized

__all__ = [
    "Ambient",
    "EnergyBased",
    "IntractableNormalizerError",
    "SphereUniform",
    "StandardizedEnergy",
    "StereographicTransform",
    "ambient",
    "caller_variables",
    "components",
    "detached",
    "guard",
    "is_sphere",
    "refuse_faults",
    "site_name",
    "sphere",
    "standardized",
    "unmasked",
    "unwrap",
    "validate_observations",
]
