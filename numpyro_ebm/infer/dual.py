"""Dual training by stochastic gradient descent-ascent: particles and neurons move together."""

import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.gibbs import prototype_trace
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.svi import SVIRunResult, SVIState
from tqdm.auto import tqdm

from numpyro_ebm import kernels
from numpyro_ebm.distributions import ambient, refuse_faults
from numpyro_ebm.energies import check_positive, check_size
from numpyro_ebm.estimators import ContrastiveDivergence
from numpyro_ebm.handlers import estimate, normalizer_dependencies
from numpyro_ebm.infer.optim import DualOptim, Links, Record, wasserstein_fisher_rao
from numpyro_ebm.joint import check_labels
from numpyro_ebm.pool import ChainPool

_MAX_CHUNK = 100  # updates between two looks from the host


class DivergenceError(RuntimeError):
    """Training turned non-finite.

    Attributes
    ----------
    step
        The update, from 1, that turned non-finite.
    result
        `SVIRunResult` of the last finite state: params, state and the losses before `step`.
    """

    def __init__(self, message: str, step: int, result: SVIRunResult):
        super().__init__(message)
        self.step = step
        self.result = result

    def __reduce__(self):
        return DivergenceError, (*self.args, self.step, self.result)


def _no_guide(*args, **kwargs):
    pass


class DualSGDA(SVI):
    r"""Train energy-based models by dual stochastic gradient descent-ascent (paper A, Algorithm 1).

    Maximum likelihood over an F1 ball is a min-max problem over particles and neurons
    (Theorem 1), and both move at once. An update

    1. takes the gradient of parameters at the particles' positions,
    2. restarts each particle at a random observation with probability `restart_prob`,
    3. moves the particles `num_substeps` times by Langevin moves of ``step_size / num_substeps``,
    4. moves neurons and log-weights by ``timescale * step_size`` per observation (a
       Wasserstein-Fisher-Rao step), and all other parameters by `optim`.

    It is a :class:`numpyro.infer.SVI`: `init`, `update`, `stable_update`, `run`, `get_params` and
    `evaluate` are as there.

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

    Raises
    ------
    ValueError
        If a number is out of its range; at `init`, if the data are not finite or off the support,
        or an energy depends on a latent variable.
    DivergenceError
        From `run`, if an update turns non-finite; it carries the last finite state.

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
        super().__init__(estimated, _no_guide if guide is None else guide, self._make_optim(), Trace_ELBO())
        self._compiled: dict = {}

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
            refuse_faults(name, value, inside, self._supports[name])
        if not jax.tree.leaves(self.optim.get_params(state.optim_state)):
            raise ValueError(
                f"sites {sorted(observed)} have nothing to train: declare parameters by f1_energy, numpyro.param, or NumPyro's "
                "flax_module, nnx_module or eqx_module around a network"
            )
        return state

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

    def run(
        self,
        rng_key: jax.Array,
        num_steps: int,
        *args: Any,
        progress_bar: bool = True,
        stable_update: bool = False,
        forward_mode_differentiation: bool = False,
        init_state: SVIState | None = None,
        init_params: dict | None = None,
        **kwargs: Any,
    ) -> SVIRunResult:
        """Run `num_steps` updates, as :meth:`numpyro.infer.SVI.run` does, in compiled chunks.

        A second run with arguments of the same shapes compiles nothing.

        Raises
        ------
        ValueError
            If `num_steps` is not positive, or the data are faulty.
        DivergenceError
            If an update turns non-finite and `stable_update` is off.
        """
        check_size("num_steps", num_steps)
        # also where a state is given: init looks at the data
        state = self.init(rng_key, *args, init_params=init_params, **kwargs)
        if init_state is not None:
            _check_fits(init_state, state)
            state = init_state
        step = self.stable_update if stable_update else self.update

        def chunk(state, length, *args, **kwargs):
            def body(i, carry):
                state, losses = carry
                state, loss = step(state, *args, forward_mode_differentiation=forward_mode_differentiation, **kwargs)
                return state, losses.at[i].set(loss)

            losses = jnp.zeros(_MAX_CHUNK, jnp.result_type(float))
            state, losses = lax.fori_loop(0, length, body, (state, losses))
            params = jax.tree.leaves(self.get_params(state))
            finite = jnp.all(jnp.isfinite(losses)) & jnp.array([jnp.all(jnp.isfinite(p)) for p in params]).all()
            return state, losses, finite

        def advance(state, length):
            key = ("run", stable_update, forward_mode_differentiation)
            state, losses, finite = self._call(key, chunk, (state, np.asarray(length), *args), kwargs)
            return state, np.asarray(losses)[:length], bool(finite)

        losses: list = []
        done, length = 0, 1
        with tqdm(total=num_steps, disable=not progress_bar) as bar:
            while done < num_steps:
                length = min(length, num_steps - done)
                began = time.perf_counter()
                start, (state, chunk_losses, finite) = state, advance(state, length)
                if not (finite or stable_update):
                    self._raise_divergence(advance, start, done, losses)
                losses.append(chunk_losses)
                done += length
                bar.update(length)
                bar.set_postfix_str(self._progress(state, chunk_losses), refresh=False)
                # look twice a second, but not more often than every update
                length = min(max(int(length * 0.5 / (time.perf_counter() - began)), 1), _MAX_CHUNK)
        acceptance = self._acceptance(state)
        if acceptance < 0.01:
            warnings.warn(
                f"particles hardly move: {acceptance:.1%} of their last moves were accepted, so that the fit is wrong. Take a "
                "smaller step_size, or more num_substeps",
                stacklevel=2,
            )
        return SVIRunResult(self.get_params(state), state, jnp.concatenate(losses))

    def _raise_divergence(self, advance, state, done, losses):
        """Go through a chunk again one update at a time, to the one that turned non-finite."""
        new, loss, finite = advance(state, 1)
        while finite:
            state, done = new, done + 1
            losses.append(loss)
            new, loss, finite = advance(state, 1)
        result = SVIRunResult(self.get_params(state), state, jnp.concatenate([jnp.zeros(0), *losses]))
        raise DivergenceError(
            f"update {done + 1} turned non-finite (loss {float(loss[0])}): take a smaller step_size or timescale. The "
            "error's .result holds the last finite state",
            done + 1,
            result,
        )

    def _pools(self, state):
        return [holder["state"] for name, holder in state.mutable_state.items() if name.endswith("$chains")]

    def _acceptance(self, state):
        return min(float(pool.acceptance_rate) for pool in self._pools(state))

    def _progress(self, state, losses):
        restarts = sum(int(pool.num_nonfinite) for pool in self._pools(state))
        return f"loss {np.mean(losses):.4g}, acceptance {self._acceptance(state):.2f}, non-finite restarts {restarts}"

    def _call(self, key, fn, args, kwargs):
        """Call `fn` compiled: its arrays are arguments, everything else is static."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        dynamic = [leaf if _is_array(leaf) else None for leaf in leaves]
        static = tuple(None if _is_array(leaf) else leaf for leaf in leaves)
        # 1, 1.0 and True are equal, but not the same argument
        key = (key, treedef, static, tuple(map(type, static)))
        try:
            compiled = self._compiled.get(key)
        except TypeError:
            compiled, key = None, None
        if compiled is None:

            def call(dynamic):
                merged = [d if s is None else s for d, s in zip(dynamic, static, strict=True)]
                args, kwargs = jax.tree.unflatten(treedef, merged)
                return fn(*args, **kwargs)

            compiled = jax.jit(call)
            if key is not None:
                self._compiled[key] = compiled
        return compiled(dynamic)

    def __getstate__(self):
        state = self.__dict__.copy()
        del state["optim"]
        return state | {"_compiled": {}}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.optim = self._make_optim()


def _check_fits(init_state, state):
    """Raise unless a state to go on from is one of this trainer, for these data."""
    if not isinstance(init_state, SVIState):
        raise TypeError(f"init_state must be an SVIState, such as result.state, got {type(init_state).__name__}")
    found, expected = (
        [(jax.tree_util.keystr(path), jnp.shape(leaf)) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)]
        for tree in (init_state[:2], state[:2])
    )
    differences = [f"{e[0]} of shape {e[1]}" for e in expected if e not in found]
    differences = differences or [f"{f[0]} of shape {f[1]}" for f in found if f not in expected]
    if differences:
        raise ValueError(
            f"init_state is of another model, optim, step_size schedule or num_chains: it differs at {differences[0]}"
        )


def _is_array(leaf):
    return isinstance(leaf, jax.Array | np.ndarray)
