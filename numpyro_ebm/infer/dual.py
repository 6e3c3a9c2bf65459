"""Dual training by stochastic gradient descent-ascent: particles and neurons move together."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import random
from numpyro import handlers
from numpyro.infer import Trace_ELBO
from numpyro.infer.gibbs import prototype_trace
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.svi import SVIState
from numpyro.util import not_jax_tracer

from numpyro_ebm import kernels
from numpyro_ebm.distributions import ambient, refuse_faults
from numpyro_ebm.energies import check_positive, check_size
from numpyro_ebm.estimators import ContrastiveDivergence
from numpyro_ebm.handlers import estimate, normalizer_dependencies
from numpyro_ebm.infer.monitored import MonitoredSVI, spread_chains
from numpyro_ebm.infer.optim import DualOptim, Links, Record, wasserstein_fisher_rao
from numpyro_ebm.joint import check_labels
from numpyro_ebm.monitor import Monitor
from numpyro_ebm.pool import ChainPool


def _no_guide(*args, **kwargs):
    pass


class DualSGDA(MonitoredSVI):
    r"""Train energy-based models by dual stochastic gradient descent-ascent (paper A, Algorithm 1).

    Maximum likelihood over an F1 ball is a min-max problem over particles and neurons
    (Theorem 1), and both move at once. An update

    1. takes the gradient of parameters at the particles' positions,
    2. restarts each particle at a random observation with probability `restart_prob`,
    3. moves the particles `num_substeps` times by Langevin moves of ``step_size / num_substeps``,
    4. moves neurons and log-weights by ``timescale * step_size`` per observation (a
       Wasserstein-Fisher-Rao step), and all other parameters by `optim`.

    It is a :class:`~numpyro_ebm.MonitoredSVI`, and so a :class:`numpyro.infer.SVI`: `init`, `update`, `stable_update`,
    `run`, `get_params` and `evaluate` are as there.

    Parameters
    ----------
    model
        NumPyro model with one or more sites of :class:`~numpyro_ebm.EnergyBased` distributions,
        observed; :func:`~numpyro_ebm.f1_energy` declares neurons.
    guide
        Guide of the other latent variables, if there are any.
    step_size
        Step of the particles; a positive number or an optax schedule of the update.
    timescale
        Step of the parameters over that of the particles.
    num_chains
        Number of particles, per site. They start at the observations.
    num_substeps
        Moves per update; smaller moves are less biased (unadjusted) or more often accepted.
    restart_prob
        Probability that a particle restarts at a random observation before it moves. Between
        maximum likelihood at 0 and score matching at 1. Restarts slow the parameters down, by about
        ``step_size / (2 * restart_prob)``: raise `timescale` to compensate.
    kernel
        Function of the step size that returns a kernel: :func:`numpyro_ebm.kernels.mala` (default),
        :func:`numpyro_ebm.kernels.ula`, ``kernels.sphere.projected`` (the published move); or a kernel,
        whose own step size is then used.
    optim
        An optax optimiser of all parameters but those of F1 energies, on SVI's loss. By default
        they descend the loss per observation by ``timescale * step_size``, as neurons do; a deep
        network wants an optimiser of its own, such as ``optax.adam(1e-3)``.
    monitor
        What `run` watches, and what happens where it goes wrong: a :class:`~numpyro_ebm.Monitor`.

    Raises
    ------
    ValueError
        If a number is out of its range; at `init`, if the data are not finite or off the support,
        or an energy depends on a latent variable.
    DivergenceError
        From `run`, if an update goes wrong; it carries the last good state.

    Notes
    -----
    The cost of an update with MALA is `num_substeps` + 1 gradients in x per particle, and one in the
    parameters. Losses are contrasts between data and particles, not likelihoods.

    References
    ----------
    Domingo-Enrich et al. (2022), Dual training of energy-based models with overparametrized shallow neural networks.

    Examples
    --------
    >>> import numpyro, numpyro_ebm as ebm
    >>> from jax import random
    >>> def model(x):
    ...     energy = ebm.f1_energy("energy", dim=3, num_neurons=16, radius=5.0)
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("x", ebm.EnergyBased(energy, ebm.SphereUniform(3)), obs=x)
    >>> x = ebm.SphereUniform(3).sample(random.key(0), (100,))
    >>> dual = DualSGDA(model, step_size=1e-2, num_chains=200)
    >>> result = dual.run(random.key(1), 10, x, progress_bar=False)
    >>> result.losses.shape
    (10,)
    """

    def __init__(
        self,
        model: Callable,
        guide: Callable | None = None,
        *,
        step_size: Any,
        timescale: float = 1.0,
        num_chains: int,
        num_substeps: int = 1,
        restart_prob: float = 0.0,
        kernel: Any = None,
        optim: optax.GradientTransformation | None = None,
        monitor: Monitor | None = None,
    ):
        for label, program in (("model", model), ("guide", _no_guide if guide is None else guide)):
            if not callable(program):
                raise TypeError(f"{label} must be callable, got {type(program).__name__}")
            if isinstance(program, estimate):
                raise TypeError(f"DualSGDA estimates by itself: give it the bare {label}, without estimate")
        if not callable(step_size):
            check_positive("step_size", step_size)
        check_positive("timescale", timescale)
        check_size("num_chains", num_chains)
        check_size("num_substeps", num_substeps)
        if isinstance(kernel, MCMCKernel) or (isinstance(kernel, type) and issubclass(kernel, MCMCKernel)):
            raise TypeError("kernel is one of MCMC's: give a kernel of particles, such as numpyro_ebm.kernels.mala")
        if kernel is not None and not (hasattr(kernel, "step") or callable(kernel)):
            raise TypeError(f"kernel must be a kernel or a function of the step size, got {kernel!r}")
        if optim is not None and not isinstance(optim, optax.GradientTransformation):
            raise TypeError(f"optim must be an optax.GradientTransformation, got {type(optim).__name__}")
        self.step_size, self.timescale, self._user_optim = step_size, timescale, optim
        self._links = Links()
        if not hasattr(kernel, "step"):
            kernel = (kernels.mala if kernel is None else kernel)(self._move_size(num_substeps))
        pool = ChainPool(kernel, num_chains, num_steps=num_substeps, restart_prob=restart_prob, init="data")
        estimated = estimate(model, ContrastiveDivergence(pool, simultaneous=True))
        guide = _no_guide if guide is None else guide
        super().__init__(estimated, guide, self._make_optim(), Trace_ELBO(), monitor=monitor)

    def _move_size(self, num_substeps):
        if callable(self.step_size):
            return lambda num_moves: self.step_size(num_moves // num_substeps) / num_substeps
        return self.step_size / num_substeps

    def _make_optim(self):
        step_size, timescale = self.step_size, self.timescale
        rate = (lambda count: timescale * step_size(count)) if callable(step_size) else timescale * step_size
        return DualOptim(wasserstein_fisher_rao(rate), self._user_optim, optax.sgd(rate), self._links)

    def init(self, rng_key: jax.Array, *args: Any, init_params: dict | None = None, **kwargs: Any) -> SVIState:
        """Return the first state, as :meth:`numpyro.infer.SVI.init` does.

        Raises
        ------
        ValueError
            If observations are not finite, off the support or of the wrong shape, or an energy
            depends on a latent variable.
        """

        def traced_init(rng_key, init_params, *args, **kwargs):
            self._inspect(args, kwargs)
            with Record() as record:
                state = super(DualSGDA, self).init(rng_key, *args, init_params=init_params, **kwargs)
            self._supports = {name: str(site.distribution.support) for name, site in record.sites.items()}
            observed = {
                name: (site.value, site.distribution.support(jnp.asarray(site.value)))
                for name, site in record.sites.items()
            }
            self._num_classes = {name: num_classes for name, (_, num_classes) in record.joint_labels.items()}
            return state, observed, {name: labels for name, (labels, _) in record.joint_labels.items()}

        state, observed, labels = self._call("init", traced_init, (rng_key, init_params, *args), kwargs)
        for name, values in labels.items():
            check_labels(f"site {name!r}", values, self._num_classes[name])
        for name, (value, inside) in observed.items():
            if not_jax_tracer(value):  # under jit they can't be looked at
                refuse_faults(name, value, inside, self._supports[name])
        if not jax.tree.leaves(self.optim.get_params(state.optim_state)):
            raise ValueError(
                f"sites {sorted(observed)} have nothing to train: declare parameters by f1_energy, numpyro.param, or NumPyro's "
                "flax_module, nnx_module or eqx_module around a network"
            )
        return spread_chains(state, (args, kwargs))

    def _inspect(self, args, kwargs):
        """Find what the optimiser treats how; refuse what particles moved once can't serve."""
        with handlers.block(), Record() as record:
            sites = prototype_trace(ambient(self.model.fn), random.key(0), args, kwargs)
        if not record.sites:
            raise ValueError("the model has no site with an EnergyBased distribution")
        self._links.neurons = frozenset(record.radii)
        self._links.sites = {}
        for name, depends in normalizer_dependencies(self.model.fn, args, kwargs).items():
            if depends.latents or not sites[name]["is_observed"]:
                why = (
                    f"an energy that depends on latent {sorted(depends.latents)}"
                    if depends.latents
                    else "a latent site"
                )
                raise ValueError(
                    f"site {name!r}: DualSGDA moves particles once per update, which is wrong for {why}: use "
                    "SVI(estimate(model, ContrastiveDivergence(pool)), guide, ...) with many moves per update"
                )
            for param in depends.names:
                self._links.sites[param] = (*self._links.sites.get(param, ()), name)

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["optim"]
        return state | {"_compiled": {}}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.optim = self._make_optim()
