"""Checkpoints: a training's state on disk, whole or not at all, and never taken for another's."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

_FORMAT = 1
_PREFIX = "numpyro_ebm_checkpoint"  # each directory <prefix>_<n> is a whole checkpoint; the highest n counts


def save(path: str | os.PathLike, state: Any) -> None:
    """Save a pytree, in the place of what was saved at `path` before.

    The checkpoint is complete when this returns. A process killed at any moment leaves the checkpoint
    before or the new one, whole; what else it leaves, the next save clears away.

    Parameters
    ----------
    path
        Directory to save in: new, empty, or one that `save` made.
    state
        Any pytree of arrays, PRNG keys (typed or raw) and Python numbers, such as the `SVIState` of a
        trainer. Functions in it, which equinox modules have for leaves, are not saved.

    Raises
    ------
    FileExistsError
        If `path` is a file, or a directory of something else, which is left as it is.
    TypeError
        If a leaf is something else, such as a string.
    ImportError
        If orbax-checkpoint is not installed.

    Notes
    -----
    The disk holds the checkpoint before and the new one until the new one is complete. One process
    saves to a path at a time; or, under `jax.distributed`, all processes together, to a disk that they
    share. Whether a checkpoint outlives a power cut is up to the file system.

    Examples
    --------
    >>> import tempfile
    >>> path = tempfile.mkdtemp()
    >>> save(path, {"loc": jnp.arange(3.0), "rng_key": random.key(0)})
    >>> restore(path, like={"loc": jnp.zeros(3), "rng_key": random.key(1)})["loc"]
    Array([0., 1., 2.], dtype=float32)
    """
    args = _orbax().args
    leaves, _ = _named_leaves(state)
    structure = {"format": _FORMAT, "x64": _has_x64(), "leaves": _kinds(leaves)}
    stored = {str(i): _encode(name, leaf) for i, (name, leaf) in enumerate(leaves.items()) if _is_stored(leaf)}
    directory = _directory(path)
    _refuse_others(directory)
    items = {"structure": args.JsonSave(structure)} | ({"arrays": args.PyTreeSave(stored)} if stored else {})
    with _manager(directory, writes=True) as manager:
        manager.save((manager.latest_step() or 0) + 1, args=args.Composite(**items))


def restore(path: str | os.PathLike, like: Any) -> Any:
    """Return the state that was saved at `path`.

    Parameters
    ----------
    path
        Directory that :func:`save` was given.
    like
        State of the same structure, shapes and dtypes, such as ``dual.init(rng_key, x)``; in the place
        of arrays it may have `jax.ShapeDtypeStruct`, as from `jax.eval_shape`. Its values are not looked at,
        but it says where values go: into NumPy arrays, or arrays of its leaves' sharding. What is
        not saved, such as functions, comes from it.

    Returns
    -------
    Any
        The values saved, in the structure of `like`.

    Raises
    ------
    FileNotFoundError
        If there is no complete checkpoint at `path`.
    ValueError
        If the checkpoint is of another version of the format, or differs from `like` in the paths, shapes
        or dtypes of leaves. Nothing is cast.
    ImportError
        If orbax-checkpoint is not installed.

    Examples
    --------
    >>> import tempfile
    >>> path = tempfile.mkdtemp()
    >>> save(path, {"loc": jnp.zeros(3)})
    >>> restore(path, like={"loc": jnp.zeros(2)})
    Traceback (most recent call last):
    ValueError: ...state['loc']: expected float32[2], found float32[3]...
    """
    args = _orbax().args
    directory = _directory(path)
    leaves, treedef = _named_leaves(like)
    missing = f"path {directory} has no complete checkpoint: correct the path, or save there first"
    if not directory.is_dir():
        raise FileNotFoundError(missing)
    with _manager(directory, writes=False) as manager:
        step = manager.latest_step()
        if step is None:
            raise FileNotFoundError(missing)
        structure = manager.restore(step, args=args.Composite(structure=args.JsonRestore()))["structure"]
        _check_fits(directory, structure, _kinds(leaves))
        index = {name: str(i) for i, name in enumerate(structure["leaves"])}
        wanted = {index[name]: _restore_args(leaf) for name, leaf in leaves.items() if _is_stored(leaf)}
        stored = {}
        if wanted:
            arrays = args.PyTreeRestore(restore_args=wanted)
            stored = manager.restore(step, args=args.Composite(arrays=arrays))["arrays"]
    values = [_decode(name, leaf, stored.get(index[name])) for name, leaf in leaves.items()]
    return jax.tree.unflatten(treedef, values)


def _orbax():
    try:
        import orbax.checkpoint
    except ImportError as error:
        raise ImportError("checkpoints need orbax-checkpoint: pip install 'numpyro_ebm[checkpoint]'") from error
    return orbax.checkpoint


def _manager(directory, writes):
    orbax = _orbax()
    # a new checkpoint is written beside the last, renamed when complete, and only then is the last deleted
    options = orbax.CheckpointManagerOptions(
        step_prefix=_PREFIX,
        preservation_policy=orbax.checkpoint_managers.LatestN(1),
        enable_async_checkpointing=False,
        cleanup_tmp_directories=writes,
        create=writes,
        save_root_metadata=False,
        lightweight_initialize=True,
    )
    return orbax.CheckpointManager(directory, options=options)


def _directory(path):
    from etils import epath  # orbax's own paths

    return epath.Path(os.getcwd()) / epath.Path(path).expanduser()


def _refuse_others(directory):
    if not directory.exists():
        return
    if not directory.is_dir():
        raise FileExistsError(f"path {directory} is a file: give a directory, new, empty or of a checkpoint")
    names = sorted(entry.name for entry in directory.iterdir())
    if names and not any(name.startswith(_PREFIX) for name in names):
        raise FileExistsError(
            f"path {directory} is a directory of something else, with {names[0]!r} in it, which is left as it is: give a "
            "directory that is new, empty or of a checkpoint"
        )


def _named_leaves(tree):
    """Leaves by their paths, with None and empty containers among them."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=_is_empty)
    return {f"state{jax.tree_util.keystr(path)}": leaf for path, leaf in leaves}, treedef


def _is_empty(node):
    return not jax.tree.leaves(node)


def _is_array(leaf):
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


def _is_key(leaf):
    return _is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _is_stored(leaf):
    """Whether a leaf has values for orbax, which takes no arrays of size 0."""
    return leaf.size > 0 if _is_array(leaf) else not (_is_empty(leaf) or callable(leaf))


def _kinds(leaves):
    return {name: _kind(name, leaf) for name, leaf in leaves.items()}


def _kind(name, leaf):
    """What a saved leaf and the leaf of `like` must share, in words."""
    if _is_empty(leaf):
        return type(leaf).__name__
    if callable(leaf):
        return "function"
    if _is_key(leaf) or (_is_array(leaf) and _is_storable(leaf.dtype)):
        return f"{leaf.dtype.name}{list(leaf.shape)}"
    if isinstance(leaf, int | float | complex) and _is_storable(np.asarray(leaf).dtype):
        return type(leaf).__name__
    raise TypeError(
        f"{name}: expected an array of numbers, a number of 64 bits or a function, found {type(leaf).__name__} "
        f"{leaf!r:.50}: leave it out of the state"
    )


def _is_storable(dtype):
    is_number = jnp.issubdtype(dtype, jnp.number) or jnp.issubdtype(dtype, jnp.bool_)
    return is_number and dtype.type not in (np.longdouble, np.clongdouble)


def _encode(name, leaf):
    if isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer):
        raise TypeError(
            f"{name}: expected a value, found {type(leaf).__name__}: save states, outside of jit and its like"
        )
    data = random.key_data(leaf) if _is_key(leaf) else leaf
    # an array that was not put on a device by intent is the same in all processes
    return data if isinstance(leaf, jax.Array) and leaf.committed else np.asarray(data)


def _sharding(leaf):
    """Where a restored array belongs, or None."""
    is_placed = leaf.committed if isinstance(leaf, jax.Array) else isinstance(leaf, jax.ShapeDtypeStruct)
    # a mesh of shapes that were traced may be abstract, without devices
    if not is_placed or isinstance(getattr(leaf.sharding, "mesh", None), jax.sharding.AbstractMesh):
        return None
    return leaf.sharding


def _restore_args(leaf):
    orbax, sharding = _orbax(), _sharding(leaf)
    if sharding is None:
        return orbax.RestoreArgs(restore_type=np.ndarray)
    return orbax.ArrayRestoreArgs(sharding=sharding)


def _decode(name, leaf, value):
    if value is None and isinstance(leaf, jax.ShapeDtypeStruct):  # of size 0
        return jnp.empty(leaf.shape, leaf.dtype, device=_sharding(leaf))
    if value is None:
        return leaf
    if isinstance(leaf, np.ndarray):
        return value
    if isinstance(leaf, np.generic):
        return value[()]
    if not _is_array(leaf):
        return type(leaf)(value.item())
    if _is_key(leaf):
        return random.wrap_key_data(jnp.asarray(value), impl=random.key_impl(jnp.empty(0, leaf.dtype)))
    if leaf.weak_type and isinstance(value, np.ndarray):  # it decides what arithmetic promotes to
        value = jnp.full(value.shape, value.dtype.type(0).item()).at[...].set(value)
    value = jnp.asarray(value)
    if value.dtype != leaf.dtype:
        raise ValueError(
            f"{name}: expected {leaf.dtype.name}, found {value.dtype.name}: set jax_enable_x64 to have 64 bits"
        )
    return value


def _check_fits(directory, structure, expected):
    """Raise unless a checkpoint is of this format and has the leaves that are expected."""
    if structure.get("format") != _FORMAT:
        raise ValueError(
            f"checkpoint {directory}: expected format {_FORMAT}, found {structure.get('format')}: restore it by the version of "
            "numpyro_ebm that saved it"
        )
    found = structure["leaves"]
    everything = {**expected, **found}
    names = [name for name in everything if expected.get(name) != found.get(name)]
    if names:
        advice = "give as `like` a state of the model, optimiser and sizes that were saved"
        if structure["x64"] != _has_x64():
            advice = f"set jax_enable_x64 to {structure['x64']}, as it was"
        raise ValueError(
            f"checkpoint {directory} is of another state than `like`. {names[0]}: expected {expected.get(names[0], 'nothing')}, "
            f"found {found.get(names[0], 'nothing')} ({len(names)} of {len(everything)} leaves differ): {advice}"
        )


def _has_x64():
    return jnp.result_type(float) == jnp.float64
