"""The unit sphere: its constraint, a bijection that covers it up to a point, its uniform distribution."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.scipy.special import gammaln
from numpyro.distributions import biject_to, constraints
from numpyro.distributions.transforms import ParameterFreeTransform
from numpyro.distributions.util import validate_sample
from numpyro.primitives import Messenger

from numpyro_ebm.energies import check_size


class _Sphere(constraints.ParameterFreeConstraint):
    """Unit vectors. NumPyro's own sphere has no bijection; this one has one up to a point."""

    event_dim = 1
    tolerance = 1e-4

    def __call__(self, x):
        xp = np if isinstance(x, np.ndarray) else jnp
        return xp.abs(xp.linalg.norm(x, axis=-1) - 1) < self.tolerance

    def feasible_like(self, prototype):
        return jnp.full_like(prototype, prototype.shape[-1] ** -0.5)


sphere = _Sphere()
"""Constraint: unit vectors of R^d."""


def is_sphere(support: constraints.Constraint) -> bool:
    """Whether a support is the unit sphere: this library's constraint, or NumPyro's."""
    return isinstance(support, _Sphere | type(constraints.sphere))


class StereographicTransform(ParameterFreeTransform):
    r"""Stereographic map of :math:`R^{d-1}` onto the unit sphere of :math:`R^d`, less its last pole.

    .. math:: x = \left(\frac{2 y}{1 + |y|^2}, 1 - \frac{2}{1 + |y|^2}\right), \quad
        \left|\frac{d\mu}{dy}\right| = \frac{1}{A_d} \left(\frac{2}{1 + |y|^2}\right)^{d-1}

    with respect to the uniform measure :math:`\mu` on the sphere, whose area is :math:`A_d`.
    """

    domain = constraints.real_vector
    codomain = sphere

    def __call__(self, x):
        scale = 2 / (1 + jnp.sum(x**2, -1, keepdims=True))
        return jnp.concatenate([scale * x, 1 - scale], -1)

    def _inverse(self, y):
        gap = jnp.maximum(1 - y[..., -1:], jnp.finfo(y.dtype).eps)
        return y[..., :-1] / gap

    def log_abs_det_jacobian(self, x, y, intermediates=None):
        dim = jnp.shape(y)[-1]
        log_area = jnp.log(2) + dim / 2 * jnp.log(jnp.pi) - gammaln(dim / 2)
        return (dim - 1) * (jnp.log(2) - jnp.log1p(jnp.sum(x**2, -1))) - log_area

    def forward_shape(self, shape):
        return (*shape[:-1], shape[-1] + 1)

    def inverse_shape(self, shape):
        return (*shape[:-1], shape[-1] - 1)


@biject_to.register(_Sphere)
def _biject_to_sphere(constraint):
    return StereographicTransform()


class SphereUniform(dist.Distribution):
    """Uniform distribution on the unit sphere of R^dim; its density is 1 with respect to itself.

    Densities on the sphere are taken with respect to the uniform probability measure, so that
    `log_prob` is 0 and log-likelihoods are in nats over uniform.

    Parameters
    ----------
    dim
        Dimension of the space around the sphere, at least 2.
    validate_args
        As in every NumPyro distribution: whether values are held to the support.

    Examples
    --------
    >>> from jax import random
    >>> x = SphereUniform(3).sample(random.key(0), (4,))
    >>> x.shape
    (4, 3)
    """

    arg_constraints: dict = {}
    support = sphere
    pytree_aux_fields = ("dim",)

    def __init__(self, dim: int, *, validate_args: bool | None = None):
        check_size("dim", dim)
        if dim < 2:
            raise ValueError(f"dim must be at least 2, got {dim!r}")
        self.dim = int(dim)
        super().__init__((), (self.dim,), validate_args=validate_args)

    @property
    def has_rsample(self) -> bool:
        return False

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        draws = jax.random.normal(key, self.shape(sample_shape))
        return draws / jnp.linalg.norm(draws, axis=-1, keepdims=True)

    @validate_sample
    def log_prob(self, value: jax.Array) -> jax.Array:
        return jnp.zeros(jnp.shape(value)[:-1], jnp.result_type(value, float))

    @property
    def mean(self):
        return jnp.zeros(self.event_shape)

    @property
    def variance(self):
        return jnp.full(self.event_shape, 1 / self.dim)


class Ambient(dist.Distribution):
    """A distribution on a sphere, as one on the space around it: geodesic moves stay on the sphere."""

    arg_constraints: dict = {}
    pytree_data_fields = ("base_dist",)

    def __init__(self, base_dist: dist.Distribution):
        self.base_dist = base_dist
        super().__init__(base_dist.batch_shape, base_dist.event_shape)

    @property
    def support(self):
        return constraints.independent(constraints.real_vector, self.event_dim - 1)

    @property
    def has_rsample(self) -> bool:
        return False

    def sample(self, key: Any, sample_shape: tuple[int, ...] = ()) -> jax.Array:
        return self.base_dist.sample(key, sample_shape)

    def log_prob(self, value: jax.Array) -> jax.Array:
        return self.base_dist.log_prob(value / jnp.linalg.norm(value, axis=-1, keepdims=True))


class ambient(Messenger):
    """Put `Ambient` in the place of latent sites on a sphere, for kernels that know its geodesics."""

    def process_message(self, msg):
        if msg["type"] != "sample" or msg["is_observed"]:
            return
        support = msg["fn"].support
        while isinstance(support, constraints.independent):
            support = support.base_constraint
        if is_sphere(support):
            msg["fn"] = Ambient(msg["fn"])
