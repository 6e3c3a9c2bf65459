"""What is learned."""

from numpyro_ebm.energies.arguments import as_float, check_nonnegative, check_positive, check_probability, check_size
from numpyro_ebm.energies.base import CallableEnergy, Energy, as_energy, visible
from numpyro_ebm.energies.shallow import MAX_MEAN_WEIGHT, F1Energy, F2Energy, f1_energy, f2_energy

__all__ = [
    "MAX_MEAN_WEIGHT",
    "CallableEnergy",
    "Energy",
    "F1Energy",
    "F2Energy",
    "as_energy",
    "as_float",
    "check_nonnegative",
    "check_positive",
    "check_probability",
    "check_size",
    "f1_energy",
    "f2_energy",
    "visible",
]
