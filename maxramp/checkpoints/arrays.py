"""The arrays of a checkpoint: which there are of a state, writing and reading them with Orbax."""

import contextlib
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from maxramp.checkpoints import addresses
from maxramp.checkpoints import folder as folder_lib
from maxramp.checkpoints.folder import Checkpoint
from maxramp.errors import ConfigError, is_out_of_memory
from maxramp.files.place import Place, is_near
from maxramp.model.keys import SHAPE_KEYS
from maxramp.training.state import TrainState, in_layer_order, in_stage_order

# What it has to say is in the errors it raises; on stderr it would be pages.
logging.getLogger("absl").setLevel(logging.CRITICAL)

warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
addresses.teach()

# What TensorStore says of them stands among paths and line numbers of its own.
_DISK_ERRORS = (
    "No space left on device",
    "Read-only file system",
    "Disk quota exceeded",
    "File too large",
    "Input/output error",
    "Permission denied",
)

_BATCH_BYTES = 1 << 28

# Orbax writes into the folder that it is given: `folder.commit` makes it count.
_IN_PLACE = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)

# Keys that decide which arrays there are, of what shape and dtype.
_ARRAY_KEYS = (*SHAPE_KEYS, "weight_dtype", "mu_dtype", "opt_type")


def items_of(state: TrainState) -> dict[str, Any]:
    """A state as it is stored: the weights can be read by themselves."""
    names = ("consumed_samples", "buffers", "opt_state", "bad_steps")
    return {"model": state.model, "optimizer": {name: getattr(state, name) for name in names}}


def _leaves(tree: dict[str, Any], names: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    leaves = jax.tree_util.tree_leaves_with_path({name: tree.get(name) for name in names})
    return {_path(path): (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in leaves}


def _path(path: Any) -> str:
    """One spelling for a leaf, whether it is an attribute or an entry of what Orbax read back."""
    names = [str(getattr(k, "key", getattr(k, "name", getattr(k, "idx", k)))) for k in path]
    return ".".join(name for name in names if name != "value")


def _shown(leaf: tuple[tuple[int, ...], str] | None) -> str:
    return "missing" if leaf is None else f"{leaf[1]}{list(leaf[0])}"


def compare(checkpoint: Checkpoint, abstract: Any, values: Mapping[str, Any]) -> None:
    """Refuses a checkpoint whose tree, shapes or dtypes are not those of `abstract`.

    Args:
      checkpoint: the one to go on from.
      abstract: an abstract train state, or parts of one by name.
      values: of all keys, resolved.

    Raises:
      ConfigError: names the first parameter that differs, and the keys that make it so.
    """
    items = in_layer_order(abstract if isinstance(abstract, dict) else items_of(abstract))
    with _reading(checkpoint.path):
        stored = ocp.checkpointables_metadata(os.fspath(checkpoint.path)).metadata
    there, wanted = _leaves(stored, items), _leaves(items, items)
    changed = [k for k in _ARRAY_KEYS if checkpoint.config.get(k) != values[k]]
    keys = ", ".join(f"{k}={values[k]} (there {checkpoint.config.get(k)})" for k in changed)
    for path in sorted(there.keys() | wanted.keys()):
        if there.get(path) != wanted.get(path):
            raise ConfigError(
                f"{checkpoint.path}: {path} is {_shown(there.get(path))}, but "
                f"{keys or 'this config'} makes it {_shown(wanted.get(path))}; give the "
                "model and optimizer keys it was trained with, or another run_name"
            )


def reason_of(error: BaseException) -> str:
    """What a library raised, in a line that a person can read."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    text = " ".join(str(error).split())
    for known in _DISK_ERRORS:
        if known in text:
            return known
    return text[:200] or type(error).__name__


def save(path: Place, state: TrainState) -> Callable[[], None]:
    """Copies a state from the devices, and writes it in threads of Orbax.

    An array of all layers is stored by layer, so that reading one reads no other. With an object
    storage nothing is asked before the arrays are copied: that there is no checkpoint of this
    number is known.

    Returns:
      What waits until the arrays are written on all processes.
    """
    options = {"array_options": ocp.options.ArrayOptions()}
    options["array_options"].saving.scoped_storage_options_creator = _storage_of
    if not is_near(path):
        options["file_options"] = addresses.UNSEEN
    with ocp.Context(atomicity_options=_IN_PLACE, **options):
        return ocp.save_checkpointables_async(
            os.fspath(path), in_layer_order(items_of(state))
        ).result


def _storage_of(path: Any, leaf: Any) -> ocp.options.ArrayOptions.Saving.StorageOptions | None:
    if "layers" not in _path(path).split("."):
        return None
    return ocp.options.ArrayOptions.Saving.StorageOptions(shard_axes=(0,))


def load(path: Place, abstract: dict[str, Any]) -> dict[str, Any]:
    """The arrays of a checkpoint, with the shapes, dtypes and shardings of `abstract`, by name.

    Raises:
      ConfigError: they cannot be read; too little memory is raised as it is.
    """
    with _reading(path):
        loaded = ocp.load_checkpointables(os.fspath(path), in_layer_order(abstract))
    return in_stage_order(loaded, abstract)


@contextlib.contextmanager
def _reading(path: Place) -> Iterator[None]:
    """Turns what Orbax and TensorStore raise about a checkpoint into one line."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"{path}: cannot be read: {reason_of(error)}; move it away to go on from the one before"
        ) from None


def stored_arrays(path: Place) -> Iterator[np.ndarray]:
    """The arrays of a checkpoint, in order, read a few at a time.

    Raises:
      TornError: one cannot be read.
      MemoryError, JaxRuntimeError: it does not fit into memory here.
    """
    try:
        stored = ocp.checkpointables_metadata(os.fspath(path)).metadata
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        for name, tree in stored.items():
            leaves, structure = jax.tree.flatten(tree)
            for few in _batches(leaves):
                wanted = [ocp.PLACEHOLDER] * len(leaves)
                for i in few:
                    shape, dtype = leaves[i].shape, leaves[i].dtype
                    wanted[i] = jax.ShapeDtypeStruct(shape, dtype, sharding=here)
                loaded = ocp.load_checkpointables(
                    os.fspath(path), {name: structure.unflatten(wanted)}
                )
                arrays = jax.tree.leaves(loaded)
                yield from (np.asarray(arrays[i]) for i in few)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise folder_lib.TornError(reason_of(error)) from None


def _batches(leaves: list[Any]) -> Iterator[list[int]]:
    """The places of arrays that are read together: a request for each would take long."""
    few, size = [], 0
    for i, leaf in enumerate(leaves):
        few.append(i)
        size += math.prod(leaf.shape) * leaf.dtype.itemsize
        if size >= _BATCH_BYTES or i == len(leaves) - 1:
            yield few
            few, size = [], 0
