"""The arrays of a checkpoint: which there are of a state, writing and reading them with Orbax.

Orbax knows TensorStore's drivers for gs:// and for the file system alone. S3 needs what Orbax does
for gs://, with another driver: so three functions of Orbax that look at an address are replaced by
ours, which know both. The tests with servers notice when Orbax no longer calls them.
"""

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils.epath.gpath import PosixGPath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from maxramp import errors
from maxramp.checkpoints.folder import FILE, Checkpoint, TornError
from maxramp.checkpoints.pieces import Snapshot
from maxramp.errors import ConfigError, is_out_of_memory
from maxramp.files.place import ObjectPath, Place, is_near
from maxramp.model.adapters import attach_adapters, stored_part
from maxramp.model.decoder import Decoder
from maxramp.model.keys import LORA_KEYS, SHAPE_KEYS
from maxramp.model.parts.weights import is_weight
from maxramp.model.pipeline import order_by_layer, order_by_stage
from maxramp.training.eight_bits import EXPONENTS
from maxramp.training.keys import OPTIMIZERS
from maxramp.training.state import TrainState

# The errors that they raise say enough; on stderr they would print pages.
for _name in ("absl", "asyncio"):
    logging.getLogger(_name).setLevel(logging.CRITICAL)
warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)

_report = sys.unraisablehook


def _report_unless_late(event: Any) -> None:
    """Replaces Python's hook. Orbax closes the event loop of a save that fails while its other
    writes run; nobody is left to raise their errors to.
    """
    if str(event.exc_value) != "Event loop is closed":
        _report(event)


sys.unraisablehook = _report_unless_late

# TensorStore's messages have them among paths and line numbers of its own.
_DISK_ERRORS = (
    *("No space left on device", "Read-only file system", "Disk quota exceeded"),
    *("File too large", "Input/output error", "Permission denied"),
)

_BATCH_BYTES = 1 << 28  # of arrays that are read together: a request for each takes long

# Orbax writes into the folder that it is given: `folder.commit` makes it count.
_IN_PLACE = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)


class _Path(PosixGPath):
    """An address without the mark of an unfinished deletion, for which Orbax would ask the storage.

    Only Orbax's own way of deleting leaves it, and maxramp deletes in another way.
    """

    def exists(self) -> bool:
        return self.name != "_CHECKPOINT_DELETION" and super().exists()


_UNCHECKED = ocp.options.FileOptions(path_class=_Path, skip_sync_file_validations=True)


def _store(path: str) -> dict[str, Any]:
    # A name as Orbax gives it: of a folder, or what a folder's name begins with.
    return ObjectPath(path).spec() | {"path": path.split("/", 3)[3]}


_normal = tensorstore_utils._normalize_path
tensorstore_utils._normalize_path = lambda path: re.sub("^s3:/+", "s3://", _normal(path))
tensorstore_utils._use_gcs_driver = lambda path: re.match("(gs|s3)://", path) is not None
gcs_utils.get_kvstore_for_gcs = _store

# Keys that decide which arrays there are, of what shape and dtype.
_ARRAY_KEYS = (
    *(*SHAPE_KEYS, *LORA_KEYS, "weight_dtype", "opt_type", "trainable_parameters_mask"),
    *(name for record in OPTIMIZERS.values() for name in record.state_keys),
)


# What a start may turn on or off, or give another shape: zeros replace what a checkpoint lacks.
_OPTIONAL = ("recent", EXPONENTS)


def items_of(state: TrainState) -> dict[str, Any]:
    """Returns what is stored of a state, its layers still in the state's own order: the weights can
    be read alone. Of adapted weights only the adapters are stored.
    """
    optimizer = {x: getattr(state, x) for x in ("consumed_samples", "opt_state", "bad_steps")}
    optimizer["buffers"] = {x: value for x, value in state.buffers.items() if x != EXPONENTS}
    items = {"model": stored_part(state.model), "optimizer": optimizer}
    return items | {name: value for name, value in _optional_items(state).items() if value}


def _optional_items(state: TrainState) -> dict[str, Any]:
    exponents = {x: value for x, value in state.buffers.items() if x == EXPONENTS}
    return {"recent": state.recent, EXPONENTS: exponents}


def _leaves(tree: dict[str, Any], names: dict[str, Any]) -> dict[str, str]:
    """Describes each array of some items as dtype and shape, such as float32[2, 3]."""
    leaves = named_leaves({name: tree.get(name) for name in names})
    return {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves.items()}


def named_leaves(items: dict[str, Any]) -> dict[str, Any]:
    """Returns the arrays of a tree by their names, such as model.embedding."""
    return {_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(items)}


def _path(path: Any) -> str:
    names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
    return ".".join(name for name in names if name != "value")


def _stored_leaves(checkpoint: Checkpoint, items: dict[str, Any]) -> dict[str, str]:
    """Describes the arrays that a checkpoint has of some items, as `_leaves` does."""
    if isinstance(checkpoint, Snapshot):
        leaves = checkpoint.arrays.items()
        return {name: f"{x}{shape}" for name, (x, shape) in leaves if name.split(".")[0] in items}
    with _reading(checkpoint.path):
        return _leaves(ocp.checkpointables_metadata(os.fspath(checkpoint.path)).metadata, items)


def compare(checkpoint: Checkpoint, abstract: Any, values: Mapping[str, Any]) -> None:
    """Refuses a checkpoint whose tree, shapes or dtypes are not those of `abstract`, a train state
    or parts of one by name; names the first parameter that differs, and the keys that make it so.
    `values` are those of all keys now.
    """
    rank = checkpoint.config.get("lora_rank")
    if rank and rank != values["lora_rank"]:
        raise ConfigError(
            f"lora_rank={values['lora_rank']}: the adapters of {checkpoint} were trained with "
            f"lora_rank={rank}; give that, or another run_name"
        )
    items = order_by_layer(abstract if isinstance(abstract, dict) else items_of(abstract))
    for name in _OPTIONAL:
        items.pop(name, None)
    stored, wanted = _stored_leaves(checkpoint, items), _leaves(items, items)
    changed = [k for k in _ARRAY_KEYS if checkpoint.config.get(k) != values[k]]
    keys = ", ".join(f"{k}={values[k]} (there {checkpoint.config.get(k)})" for k in changed)
    for path in sorted(stored.keys() | wanted.keys()):
        actual, expected = stored.get(path, "missing"), wanted.get(path, "missing")
        if actual != expected:
            raise ConfigError(
                f"{checkpoint}: {path} is {actual}, but {keys or 'this config'} makes it "
                f"{expected}; give the model and optimizer keys it was trained with, or another "
                "run_name"
            )


def restore(
    checkpoint: Checkpoint, abstract: TrainState, base: Decoder | None = None
) -> TrainState:
    """Restores the state of a checkpoint with the shapes, dtypes and shardings of `abstract`, on
    all processes, after `compare`; raises as `load`, or for a snapshot as `_collect`. `base` is the
    model below adapters, None without adapters: no checkpoint holds it. Zeros replace what the
    checkpoint has not in this shape of `_OPTIONAL`."""
    items = items_of(abstract)
    for name in items.keys() & {*_OPTIONAL}:
        own = {name: items[name]}
        if _stored_leaves(checkpoint, own) != _leaves(own, own):
            del items[name]
    if isinstance(checkpoint, Snapshot):
        loaded = _collect(checkpoint, items)
    else:
        loaded = load(checkpoint.path, items)
    model = loaded["model"] if base is None else attach_adapters(loaded["model"], base)
    optional = {
        name: loaded.get(name)
        or {key: jnp.zeros(x.shape, x.dtype, device=x.sharding) for key, x in empty.items()}
        for name, empty in _optional_items(abstract).items()
    }
    rest = loaded["optimizer"] | {"recent": optional["recent"]}
    rest["buffers"] = rest["buffers"] | optional[EXPONENTS]
    return dataclasses.replace(abstract.with_model(model), **rest)


def _collect(snapshot: Snapshot, abstract: dict[str, Any]) -> dict[str, Any]:
    """Reads the arrays of a snapshot from the nodes, as `load` does those of a checkpoint, each
    process those of its devices; a PeerLostError if one does not answer."""

    def collect(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        def read(index: tuple[slice, ...]) -> np.ndarray:
            bounds = [s.indices(size) for s, size in zip(index, leaf.shape, strict=True)]
            start, shape = [low for low, _, _ in bounds], [high - low for low, high, _ in bounds]
            return snapshot.read(_path(path), start, shape)

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, read, dtype=leaf.dtype)

    loaded = jax.tree_util.tree_map_with_path(collect, order_by_layer(abstract))
    return order_by_stage(loaded, abstract)


def reason_of(error: Exception) -> str:
    """Describes what a library raised in one line; an error of the disk by its name."""
    text = " ".join(str(error).split())
    known = [] if isinstance(error, OSError) else [name for name in _DISK_ERRORS if name in text]
    return known[0] if known else errors.reason_of(error)[:300]


def save(path: Place, state: TrainState) -> Callable[[], None]:
    """Copies a state from the devices, and writes it in threads of Orbax; returns what waits until
    all processes, which call it together, have written its arrays, and raises any error of that.
    Then `folder.commit` makes the checkpoint count.

    An array of all layers is stored by layer, so that reading one reads no other. An object storage
    is not asked for anything before the arrays are copied: it has no checkpoint of this number.
    """
    items = order_by_layer(items_of(state))
    leaves = jax.tree_util.tree_leaves_with_path(items, is_leaf=is_weight)
    stacks = {_path(path[1:]) for path, leaf in leaves if is_weight(leaf) and leaf.layers}
    by_layer = ocp.options.ArrayOptions.Saving.StorageOptions(shard_axes=(0,))
    options = {"array_options": ocp.options.ArrayOptions()}
    options["array_options"].saving.scoped_storage_options_creator = lambda key, _: (
        by_layer if _path(key) in stacks else None
    )
    if not is_near(path):
        options["file_options"] = _UNCHECKED
    with ocp.Context(atomicity_options=_IN_PLACE, **options):
        return ocp.save_checkpointables_async(os.fspath(path), items).result


def load(path: Place, abstract: dict[str, Any]) -> dict[str, Any]:
    """Reads arrays of a checkpoint, with the names, shapes, dtypes and shardings of `abstract`, as
    `items_of` makes it. All processes call it, after `compare`. A ConfigError where it cannot.
    """
    with _reading(path):
        loaded = ocp.load_checkpointables(os.fspath(path), order_by_layer(abstract))
    return order_by_stage(loaded, abstract)


@contextlib.contextmanager
def _reading(path: Place) -> Iterator[None]:
    """Turns what Orbax and TensorStore raise about a checkpoint into a ConfigError of one line, but
    not what says that memory ran out."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if is_near(path) and not (path / FILE).exists():
            raise ConfigError(f"{path}: was removed meanwhile; give another checkpoint") from None
        raise ConfigError(
            f"{path}: cannot be read: {reason_of(error)}; give another checkpoint, or move it away "
            "so that its run continues from the one before"
        ) from None


def stored_arrays(path: Place) -> Iterator[np.ndarray]:
    """Reads the arrays of a checkpoint, a few at a time, onto the first device: on one process
    alone, in no order of its parts. Raises a TornError if one cannot be read, a MemoryError or
    JaxRuntimeError if it does not fit into memory here.
    """
    try:
        stored = ocp.checkpointables_metadata(os.fspath(path)).metadata
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        for name, tree in stored.items():
            leaves, structure = jax.tree.flatten(tree)
            sizes = [math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves]
            batches = [end // _BATCH_BYTES for end in itertools.accumulate(sizes)]
            for _, few in itertools.groupby(range(len(leaves)), batches.__getitem__):
                wanted = [ocp.PLACEHOLDER] * len(leaves)
                for i in few:
                    shape, dtype = leaves[i].shape, leaves[i].dtype
                    wanted[i] = jax.ShapeDtypeStruct(shape, dtype, sharding=device)
                named = {name: structure.unflatten(wanted)}
                loaded = jax.tree.leaves(ocp.load_checkpointables(os.fspath(path), named))
                yield from (np.asarray(x) for x in loaded if x is not ocp.PLACEHOLDER)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise TornError(path, reason_of(error)) from None
