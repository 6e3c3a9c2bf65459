"""How particles move."""

from numpyro_ebm.kernels import sphere
from numpyro_ebm.kernels.euclidean import mala, ula
from numpyro_ebm.kernels.langevin import EUCLIDEAN, Langevin, LangevinInfo, LangevinState, select
from numpyro_ebm.kernels.sphere import SPHERE
from numpyro_ebm.kernels.support import on_support
from numpyro_ebm.kernels.transformed import Transformed

__all__ = [
    "EUCLIDEAN",
    "SPHERE",
    "Langevin",
    "LangevinInfo",
    "LangevinState",
    "Transformed",
    "mala",
    "on_support",
    "select",
    "sphere",
    "ula",
]
