"""NumPyro's `SVI` with a run that is watched, goes on after a crash, and stops where it goes wrong."""

import math
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from numpyro.infer import SVI
from numpyro.infer.svi import SVIRunResult, SVIState
from numpyro.util import not_jax_tracer
from tqdm.auto import tqdm

from numpyro_ebm.checkpoint import restore, save
from numpyro_ebm.energies import check_size
from numpyro_ebm.monitor import DivergenceError, Fault, Monitor, chain_holders, chain_report
from numpyro_ebm.pool import PER_CHAIN

_MAX_CHUNK = 100  # updates between two looks from the host


class MonitoredSVI(SVI):
    """NumPyro's :class:`~numpyro.infer.SVI`, whose `run` is watched by a :class:`~numpyro_ebm.Monitor`.

    `init`, `update`, `stable_update`, `get_params` and `evaluate` are those of `SVI`; so is `run`, which looks at the chains
    of an estimated model, at losses and at parameters at least every hundred updates. A second run with arguments of the same
    shapes compiles nothing. Where observations are sharded over the devices of a mesh by their rows, so are the chains.

    Parameters
    ----------
    model, guide, optim, loss
        As in `SVI`; the model is one under :func:`~numpyro_ebm.estimate`, or any other.
    monitor
        Limits, and what happens outside of them; by default ``Monitor()``, which raises.
    **static_kwargs
        As in `SVI`.

    Raises
    ------
    TypeError
        If `monitor` is not a :class:`~numpyro_ebm.Monitor`.

    Examples
    --------
    >>> import numpyro, numpyro.distributions as dist, optax, numpyro_ebm as ebm
    >>> from numpyro.infer import Trace_ELBO
    >>> def model(x):
    ...     loc = numpyro.param("loc", 0.0)
    ...     with numpyro.plate("data", x.shape[0]):
    ...         numpyro.sample("x", ebm.EnergyBased(lambda x: -loc * x, dist.Normal(0, 1)), obs=x)
    >>> estimated = ebm.estimate(model, ebm.ContrastiveDivergence(ebm.ChainPool(pool_size=100)))
    >>> svi = MonitoredSVI(estimated, lambda x: None, optax.adam(1e-2), Trace_ELBO())
    >>> result = svi.run(random.key(0), 200, random.normal(random.key(1), (100,)) + 1, progress_bar=False)
    >>> bool(result.params["loc"] > 0.5)
    True
    """

    def __init__(
        self,
        model: Callable,
        guide: Callable,
        optim: Any,
        loss: Any,
        *,
        monitor: Monitor | None = None,
        **static_kwargs: Any,
    ):
        monitor = Monitor() if monitor is None else monitor
        if not isinstance(monitor, Monitor):
            raise TypeError(f"monitor must be a Monitor, got {type(monitor).__name__}")
        super().__init__(model, guide, optim, loss, **static_kwargs)
        self.monitor = monitor
        self._compiled: dict = {}

    def init(self, rng_key: jax.Array, *args: Any, **kwargs: Any) -> SVIState:
        """Return the first state, as :meth:`numpyro.infer.SVI.init` does."""
        args, kwargs = jax.tree.map(_on_auto_mesh, (args, kwargs))
        return spread_chains(super().init(rng_key, *args, **kwargs), (args, kwargs))

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
        checkpoint: str | os.PathLike | None = None,
        checkpoint_every: int = 1_000,
        **kwargs: Any,
    ) -> SVIRunResult:
        """Run `num_steps` updates, as :meth:`numpyro.infer.SVI.run` does, in compiled chunks.

        Parameters
        ----------
        progress_bar
            Show loss, acceptance and restarts while it runs, in terminals and notebooks. Nothing is shown elsewhere.
        checkpoint
            Directory in which to save the state, by :func:`numpyro_ebm.checkpoint.save`. Where it holds one already, of a
            run that was cut off, this one goes on from there up to `num_steps` in all, with a warning that says so; its
            losses are those of its own updates.
        checkpoint_every
            Updates from a save to the next; the last state is saved too.

        Raises
        ------
        ValueError
            If `num_steps` is not positive, the data are faulty, or `init_state` or a checkpoint is of another model.
        FileExistsError
            If `checkpoint` is a file, or a directory of something else.
        DivergenceError
            If an update goes wrong, and the monitor's policy is not to stop.
        """
        check_size("num_steps", num_steps)
        check_size("checkpoint_every", checkpoint_every)
        # also where a state is given: init looks at the data
        state = self.init(rng_key, *args, init_params=init_params, **kwargs)
        if init_state is not None:
            _check_fits(init_state, state)
            state = init_state
        done = 0
        if checkpoint is not None:
            state, done = _resumed(checkpoint, state, num_steps)
        step = self.stable_update if stable_update else self.update

        def chunk(state, length, *args, **kwargs):
            def body(i, carry):
                state, losses = carry
                state, loss = step(state, *args, forward_mode_differentiation=forward_mode_differentiation, **kwargs)
                return state, losses.at[i].set(loss)

            losses = jnp.zeros(_MAX_CHUNK, jnp.result_type(float))
            state, losses = lax.fori_loop(0, length, body, (state, losses))
            finite = jnp.isfinite(losses)
            good = jnp.array(stable_update) | jnp.all(finite)  # a stable update skips what is not finite
            for leaf in jax.tree.leaves(self.get_params(state)):
                good &= jnp.all(jnp.isfinite(leaf))
            return state, losses, good

        def advance(state, length):
            key = ("run", stable_update, forward_mode_differentiation)
            state, losses, good = self._call(key, chunk, (state, np.asarray(length), *args), kwargs)
            losses = np.asarray(losses)[:length].copy()  # a view would keep every chunk's array on the device
            fault = self.monitor.fault(state)
            if not good:
                fault = Fault(f"it turned non-finite (loss {float(losses[-1])})", None)
            return state, losses, fault

        losses: list = [np.zeros(0)]
        length, num_heals, num_skipped = 1, 0, 0
        with tqdm(total=num_steps, initial=done, disable=not (progress_bar and _is_watched())) as bar:
            while done < num_steps:
                length = min(length, num_steps - done, checkpoint_every - done % checkpoint_every)
                began = time.perf_counter()
                start, (state, chunk_losses, fault) = state, advance(state, length)
                if fault is not None:
                    start, state, chunk_losses, fault = self._to_the_fault(advance, start)
                losses.append(chunk_losses)
                done += len(chunk_losses)
                bar.update(len(chunk_losses))
                num_skipped = 0 if np.any(np.isfinite(chunk_losses)) else num_skipped + len(chunk_losses)
                if num_skipped >= _MAX_CHUNK:
                    fault = Fault(f"as did the {num_skipped} before it, which were skipped as non-finite", None)
                    raise self._error(state, state, losses, done, fault)
                if fault is not None:
                    error = self._error(start, state, losses, done, fault)
                    if self.monitor.policy == "stop":
                        warnings.warn(f"training stopped: {error}", stacklevel=2)
                        return error.result
                    if self.monitor.policy == "raise" or num_heals == self.monitor.max_heals:
                        raise error
                    num_heals += 1
                    warnings.warn(
                        f"all chains start anew ({num_heals} of at most {self.monitor.max_heals} times): {error}",
                        stacklevel=2,
                    )
                    state = self._healed(start, num_heals, args, kwargs)
                if checkpoint is not None and (done % checkpoint_every == 0 or done == num_steps):
                    save(checkpoint, state)
                bar.set_postfix_str(self._progress(state, chunk_losses), refresh=False)
                # look twice a second, but not more often than every update; processes that work together can't differ in it
                pace = int(length * 0.5 / (time.perf_counter() - began)) if jax.process_count() == 1 else _MAX_CHUNK
                length = min(max(pace, 1), _MAX_CHUNK)
        acceptance = min(self._acceptances(state), default=1.0)
        if acceptance < 0.01:
            warnings.warn(
                f"particles hardly move: {acceptance:.1%} of their last moves were accepted, so that the fit is wrong. Take a "
                "smaller step_size, or more moves per update",
                stacklevel=2,
            )
        return SVIRunResult(self.get_params(state), state, jnp.concatenate(losses))

    def _to_the_fault(self, advance, state):
        """Go through a chunk again, one update at a time. Returns the states before and after the fault, losses and fault."""
        losses: list = [np.zeros(0)]
        while True:
            new, loss, fault = advance(state, 1)
            if fault is not None:
                return state, new, np.concatenate(losses), fault
            state = new
            losses.append(loss)

    def _error(self, state, faulty, losses, done, fault):
        result = SVIRunResult(self.get_params(state), state, jnp.concatenate(losses))
        message = (
            f"update {done + 1} went wrong, {fault.reason}: take a smaller step size or learning rate, more moves per update, or "
            "other limits, Monitor(...). The error's .result holds the last good state"
        )
        report = chain_report(faulty) if chain_holders(faulty) else {}
        return DivergenceError(message, done + 1, result, fault.site, report)

    def _healed(self, state, count, args, kwargs):
        """The state, with chains that start anew."""
        key, key_init = random.split(random.fold_in(state.rng_key, count))
        fresh = self.init(key_init, *args, init_params=self.get_params(state), **kwargs).mutable_state
        chains = {}
        for site, holder in chain_holders(state).items():
            name, old = f"{site}$chains", holder["state"]
            kept = {part: getattr(old, part) for part in ("num_moves", "step_size", "num_nonfinite")}
            chains[name] = holder | {"state": fresh[name]["state"]._replace(**kept)}
        return state._replace(rng_key=key, mutable_state=state.mutable_state | chains)

    def _acceptances(self, state):
        return [float(holder["state"].acceptance_rate) for holder in chain_holders(state).values()]

    def _progress(self, state, losses):
        restarts = sum(int(holder["state"].num_nonfinite) for holder in chain_holders(state).values())
        acceptance = "".join(f", acceptance {rate:.2f}" for rate in self._acceptances(state))
        loss = np.mean(losses) if len(losses) else np.nan
        return f"loss {loss:.4g}{acceptance}, non-finite restarts {restarts}"

    def _call(self, key, fn, args, kwargs):
        """Call `fn` compiled: its arrays are arguments, everything else is static."""
        leaves, treedef = jax.tree.flatten((args, kwargs))
        dynamic = [_on_auto_mesh(leaf) if _is_array(leaf) else None for leaf in leaves]
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


def _is_watched():
    """Whether somebody sees a progress bar: stderr is a terminal's, or a notebook's."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return "IPKernelApp" in getattr(shell, "config", ()) or (sys.stderr is not None and sys.stderr.isatty())


def _on_auto_mesh(leaf):
    """An array on a mesh of explicit axes, `jax.make_mesh`'s default, on the same one where XLA finds intermediate shardings."""
    if not_jax_tracer(leaf) and isinstance(leaf, jax.Array) and isinstance(leaf.sharding, NamedSharding):
        mesh = leaf.sharding.mesh
        if any(kind != AxisType.Auto for kind in mesh.axis_types):
            mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))
            return jax.device_put(leaf, NamedSharding(mesh, leaf.sharding.spec))
    return leaf


def spread_chains(state, data):
    """The state, with chains on the devices of the first array of the data that is sharded by rows, where they divide evenly."""
    for leaf in jax.tree.leaves(data):
        sharding = getattr(_on_auto_mesh(leaf), "sharding", None) if not_jax_tracer(leaf) else None
        if isinstance(sharding, NamedSharding) and sharding.spec and sharding.spec[0] is not None:
            break
    else:
        return state
    rows = NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0]))
    axes = rows.spec[0] if isinstance(rows.spec[0], tuple) else (rows.spec[0],)
    num_parts = math.prod(rows.mesh.shape[axis] for axis in axes)
    chains = {}
    for site, holder in chain_holders(state).items():
        pool = holder["state"]
        if len(pool.age) % num_parts == 0:
            placed = {part: jax.device_put(getattr(pool, part), rows) for part in PER_CHAIN}
            chains[f"{site}$chains"] = holder | {"state": pool._replace(**placed)}
    return state._replace(mutable_state=state.mutable_state | chains) if chains else state


def _resumed(path, state, num_steps):
    """The state at `path` and how many updates it is after `state`; `state`, saved there, where there is none."""
    try:
        saved = restore(path, like=state)
    except FileNotFoundError:
        save(path, state)  # what can't be saved is said before the work starts
        return state, 0
    done = int(saved.optim_state[0]) - int(state.optim_state[0])
    if not 0 <= done <= num_steps:
        raise ValueError(
            f"checkpoint {os.fspath(path)!r} is {done} updates from where this run starts, which is to make num_steps={num_steps}: "
            "give another directory, or more steps"
        )
    if done:
        warnings.warn(f"run goes on after update {done} of {num_steps}, from {os.fspath(path)!r}", stacklevel=3)
    return saved, done


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
