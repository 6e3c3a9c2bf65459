"""How particles move."""

from numpyro_ebm.kernels import sphere
from numpyro_ebm.kernels.langevin import EUCLIDEAN, Langevin, LangevinInfo, LangevinState, mala, select, ula
from numpyro_ebm.kernels.sphere import SPHERE
from numpyro_ebm.kernels.support import Constrained, on_support

__all__ = [
    "EUCLIDEAN",
    "SPHERE",
    "Constrained",
    "Langevin",
    "LangevinInfo",
    "LangevinState",
    "mala",
    "on_support",
    "select",
    "sphere",
    "ula",
]
