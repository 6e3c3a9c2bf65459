"""The mutual-information term of joint energies (paper B, eq. 13), with its exact gradient."""

import jax
import jax.numpy as jnp
from jax import lax

from numpyro_ebm.distributions import EnergyBased
from numpyro_ebm.joint import MarginalEnergy, divergence_from_mean


def information(chains: EnergyBased, position: jax.Array) -> jax.Array:
    r"""Mutual information at chains of p(x), with the gradient of the model's own.

    .. math:: \nabla I = E[\nabla k(X)] + \mathrm{Cov}(k(X), \nabla \log \tilde p(X)), \quad
        k(x) = \mathrm{KL}(p(y|x) \| p(y))

    The covariance is that the model's draws move with its parameters.

    Raises
    ------
    ValueError
        If the chains do not sample the marginal of a joint energy.
    """
    if not isinstance(chains.energy, MarginalEnergy):
        raise ValueError(
            "mutual_information needs chains of the marginal of a JointEnergy: at a site of joint.marginal(), or of "
            "joint.conditional(y) with target='marginal'"
        )
    divergence = divergence_from_mean(chains.energy.logits(position))
    density = chains.unnormalized_log_prob(position)
    advantage = lax.stop_gradient(divergence - jnp.mean(divergence))
    return jnp.mean(divergence + advantage * (density - lax.stop_gradient(density)))
