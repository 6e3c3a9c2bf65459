"""Kernels on the support of a distribution."""

from dataclasses import replace

from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import AffineTransform

from numpyro_ebm.distributions import is_sphere
from numpyro_ebm.kernels.langevin import EUCLIDEAN, Langevin
from numpyro_ebm.kernels.sphere import SPHERE
from numpyro_ebm.kernels.transformed import Transformed


def on_support(kernel: Langevin | Transformed, support: constraints.Constraint) -> Langevin | Transformed:
    """Return the kernel that moves as `kernel` does, on `support`.

    On R^d that is `kernel`; on the unit sphere, `kernel` with geodesics (unless it has a geometry
    of its own); anywhere else, `kernel` in the unconstrained space of NumPyro's ``biject_to``.

    Parameters
    ----------
    kernel
        From :func:`~numpyro_ebm.kernels.ula` or :func:`~numpyro_ebm.kernels.mala`.
    support
        Constraint of NumPyro, or of :class:`~numpyro_ebm.SphereUniform`.

    Returns
    -------
    kernel
        The same one on R^d and on spheres, a :class:`Transformed` one elsewhere.

    Raises
    ------
    ValueError
        If the support is discrete, NumPyro has no bijection to it, or the kernel has a `scale` and the support is not R^d.

    Examples
    --------
    >>> import jax.numpy as jnp, numpyro.distributions as dist
    >>> from numpyro_ebm import kernels
    >>> kernel = kernels.on_support(kernels.mala(0.1), dist.constraints.unit_interval)
    >>> float(kernel.init(jnp.array(0.25), dist.Beta(2, 3).log_prob).position)
    0.25
    """
    inner = support
    while isinstance(inner, constraints.independent):
        inner = inner.base_constraint
    if inner.is_discrete:
        raise ValueError(f"Langevin moves need a continuous support, got {support}")
    if inner is constraints.real:
        return kernel
    if isinstance(kernel, Transformed):
        if isinstance(kernel.transform, AffineTransform):
            raise ValueError(f"a kernel's scale is one of R^d, but the support is {support}: leave scale out")
        return kernel
    if is_sphere(inner):
        return replace(kernel, geometry=SPHERE) if kernel.geometry == EUCLIDEAN else kernel
    try:
        return Transformed(kernel, biject_to(support))
    except NotImplementedError as error:
        raise ValueError(
            f"Langevin moves need a support that NumPyro's biject_to has a map to, got {support}"
        ) from error
