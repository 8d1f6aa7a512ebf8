"""Writes the weights of a model into a folder that transformers opens.

Tensors are made one after the other on the devices; the process that writes a file gets its
tensors whole, so that a host holds two of them besides its shards. On a disk and in an object
storage alike config.json comes last (`folder.is_whole`). `.source.json`, which comes first, says
what the folder is made of: a killed export of the same continues, and writes nothing twice.

Shapes: L layers of a stack, E experts.
"""

import contextlib
import dataclasses
import errno
import functools
import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxramp.errors import ConfigError, TrainingError, reason_of
from maxramp.files.place import ObjectPath, Place, is_near, is_unfinished, lock, sizes, write_whole
from maxramp.huggingface.folder import SENTINELS, is_whole
from maxramp.huggingface.names import Form, NamedWeight, name_copies, name_tensors
from maxramp.huggingface.safetensors import (
    CODES,
    DTYPES,
    INDEX,
    OVERFLOW,
    SINGLE_FILE,
    Tensor,
    make_header,
)
from maxramp.huggingface.variants import name_fused, name_in_larger
from maxramp.model.decoder import Decoder
from maxramp.model.families.table import FAMILIES
from maxramp.model.pipeline import order_by_layer
from maxramp.parallel.collectives import map_shards, own_index, psum
from maxramp.parallel.mesh import mesh_of
from maxramp.parallel.sharding import REPLICATED, unstack_spec
from maxramp.processes import agreement

_SOURCE = ".source.json"  # what the folder is made of
_EXACT = ("balance", "recurrence")  # roles of weights that are written in float32


@dataclasses.dataclass(frozen=True)
class Format:
    """How a model's weights are written."""

    decoder_block: str  # their family
    dtype: str  # of the tensors, such as "bfloat16", but for _EXACT
    vocab_size: int  # rows of embedding and head that are written
    layers: Sequence[int] = ()  # the numbers of those that are written; none = all
    single_file: str = SINGLE_FILE  # the name of the file, where one is enough
    file_bytes: float = 5_000_000_000  # of a file, at most, as transformers writes them
    fuse_experts: bool = False  # those of a layer in one tensor
    in_larger: bool = False  # named as parts of a model that also sees or hears


class _Part(NamedTuple):
    """A tensor, or an expert's part of a tensor that holds all experts of a layer."""

    weight: NamedWeight
    index: tuple[int, ...]  # a key of `weight.names`
    shape: tuple[int, ...]
    dtype: str
    interleaved: int = 0  # parts of an expert whose numbers lie in turn; 0 = behind each other


def _list_parts(model: Decoder, form: Format) -> dict[str, list[_Part]]:
    """Returns the parts of each tensor in the order of its rows, by the tensor's name; `model` is
    as in `name_tensors`."""
    tensors: dict[str, list[_Part]] = {}
    copies = name_copies(model, form.decoder_block)
    interleaves = FAMILIES[form.decoder_block].released.interleaves_experts
    for named in name_tensors(model, form.decoder_block, form.layers):
        is_fused = "E" in named.weight.leading if interleaves else form.fuse_experts
        if interleaves and is_fused:
            named = named.turn()
        shape = named.form.tensor_shape
        if named.form.groups[0] == "V":  # rows behind the vocabulary are left out
            shape = form.vocab_size, *shape[1:]
        dtype = "float32" if named.weight.role in _EXACT else form.dtype
        for index, name in named.names.items():
            if is_fused:
                name = name_fused(named.path, name)
            if form.in_larger:
                name = name_in_larger(name)
            tensors.setdefault(name, []).append(_Part(named, index, shape, dtype))
            tensors |= dict.fromkeys(copies.get(named.path, ()), tensors[name])
    for parts in tensors.values():
        parts.sort(key=lambda part: part.index)  # an expert's gate stays before its up
        if interleaves:
            number = len(parts) // len({part.index for part in parts})
            parts[:] = [part._replace(interleaved=number) for part in parts]
    return tensors


def _join_shapes(parts: list[_Part]) -> tuple[str, tuple[int, ...]]:
    """Returns the dtype and shape of a tensor of these parts."""
    code, (rows, *rest) = CODES[parts[0].dtype], parts[0].shape
    if len(parts) == 1:
        return code, (rows, *rest)
    num_experts = len({part.index for part in parts})
    if number := parts[0].interleaved:
        *rows, last = parts[0].shape
        return code, (num_experts, *rows, number * last)
    return code, (num_experts, len(parts) * rows // num_experts, *rest)


def write(
    folder: Place,
    model: Decoder,
    form: Format,
    side_files: Mapping[str, bytes],
    source: Mapping[str, Any],
    pause: Callable[[], None] = lambda: None,
    side_tensors: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Writes a model's folder, which is missing or not whole; all processes call it together.

    A ConfigError if something else wrote the folder, it cannot be written, or the dtype cannot hold
    the weights; a TrainingError if the disk is full.

    Args:
      side_files: the other files by name, one of SENTINELS among them.
      source: says what the weights are (`read_source`).
      pause: is called between two tensors; what it raises, on all processes alike, ends the export.
      side_tensors: tensors of another folder, by name, that are written as they are.
    """
    model = order_by_layer(model)
    tensors = _list_parts(model, form)
    entries = {name: _join_shapes(parts) for name, parts in tensors.items()}
    entries |= {name: (tensor.dtype, tensor.shape) for name, tensor in side_tensors.items()}
    num_bytes = {name: math.prod(x) * DTYPES[code].itemsize for name, (code, x) in entries.items()}
    files = _split_into_files(num_bytes, form)
    headers = {file: make_header({n: entries[n] for n in names}) for file, names in files.items()}
    file_sizes = {file: len(headers[file]) + sum(map(num_bytes.get, files[file])) for file in files}
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(num_bytes.values())}, "weight_map": weight_map}
        side_files = {INDEX: json.dumps(index, indent=2).encode(), **side_files}
    side_sizes = {name: len(data) for name, data in side_files.items()}
    source = {**source, "dtype": form.dtype, "files": file_sizes | side_sizes}
    with contextlib.ExitStack() as closing, jax.set_mesh(mesh_of(model)):
        done = agreement.raise_everywhere(lambda: _begin(folder, source, closing))
        done = agreement.all_gather_json(done)[0]
        for number, (file, names) in enumerate(files.items()):
            if done.get(file) == file_sizes[file]:
                continue
            is_own = number % jax.process_count() == jax.process_index()
            own = [part for name in names for part in tensors.get(name, ())]
            others = [side_tensors[name] for name in names if name in side_tensors and is_own]
            copies = (tensor.read(0, tensor.rows) for tensor in others)
            arrays = itertools.chain(_make_arrays(own, is_own, pause), copies)
            agreement.raise_everywhere(
                functools.partial(_write_file, folder / file, headers[file], arrays, is_own)
            )
        agreement.raise_everywhere(lambda: _finish(folder, files, side_files))


def check_free(folder: Place) -> None:
    """Refuses a folder unless it is missing, empty, or begun by an export and not finished."""
    with _refusing(folder):
        names = []
        if folder.is_dir():
            names = [path.name for path in folder.iterdir() if not is_unfinished(path)]
        elif folder.exists() or (is_near(folder) and folder.is_symlink()):  # a broken link
            names = [folder.name]
        if names and (_SOURCE not in names or not {*names}.isdisjoint(SENTINELS)):
            raise ConfigError(f"{folder}: is there already; move it away, or write to another")


def read_source(folder: Place) -> dict[str, Any] | None:
    """Returns what a folder was made of, the `source` of `write`.

    Empty for a folder that something else wrote, or that has lost files since; None for one that
    is missing or not whole. A ConfigError if it cannot be read.
    """
    with _refusing(folder):
        if not is_whole(folder):
            return None
        try:
            source = json.loads((folder / _SOURCE).read_bytes())
            files = source["files"].items()
        except (FileNotFoundError, ValueError, LookupError, AttributeError):
            return {}
        return source if files <= sizes(folder, source["files"]).items() else {}


def _begin(
    folder: Place, source: Mapping[str, Any], closing: contextlib.ExitStack
) -> dict[str, int]:
    """Makes the folder of an export, or continues it, on the first process; returns the sizes of
    the files in it, {} elsewhere. A ConfigError if the folder is not free.

    On a disk no other export may write it until `closing` closes.
    """
    if jax.process_index():
        return {}
    text = json.dumps(source, sort_keys=True).encode()
    with _refusing(folder):
        if is_near(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            path = folder.with_name(f".{folder.name}.lock")
            file = closing.enter_context(path.open("w"))
            try:
                lock(file)
            except BlockingIOError:
                raise ConfigError(f"{folder}: another export is writing it; wait") from None
            closing.callback(path.unlink, missing_ok=True)
        check_free(folder)
        folder.mkdir(exist_ok=True)
        file_sizes = sizes(folder)
        if _SOURCE in file_sizes and (folder / _SOURCE).read_bytes() == text:
            return file_sizes
        _remove(folder, file_sizes.keys() - {_SOURCE})  # of other weights
        write_whole(folder / _SOURCE, text)
    return {}


def _finish(folder: Place, files: Iterable[str], side_files: Mapping[str, bytes]) -> None:
    """Writes the files beside those of tensors, the sentinels last."""
    if jax.process_index():
        return
    with _refusing(folder):
        _remove(folder, sizes(folder).keys() - {*files, _SOURCE})  # left by a kill
        for name in sorted(side_files, key=SENTINELS.__contains__):
            write_whole(folder / name, side_files[name])


def _remove(folder: Place, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _refusing(folder: Place) -> Iterator[None]:
    """Raises errors of the system as one line about the folder: a TrainingError if the disk is
    full, else a ConfigError."""
    try:
        yield
    except OSError as error:
        line = f"{folder}: cannot be written: {reason_of(error)}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TrainingError(f"{line}; make room, and start again to continue") from None
        raise ConfigError(line) from None


def _split_into_files(num_bytes: Mapping[str, int], form: Format) -> dict[str, list[str]]:
    """Returns the names of each file's tensors, at most `form.file_bytes` but at least one tensor
    in a file; `num_bytes` are those of each tensor."""
    files, total = [[]], 0
    for name, size in num_bytes.items():
        if total and total + size > form.file_bytes:
            files.append([])
            total = 0
        files[-1].append(name)
        total += size
    if len(files) == 1:
        return {form.single_file: files[0]}
    stem = f"model-{{:05d}}-of-{len(files):05d}.safetensors"
    return {stem.format(i): names for i, names in enumerate(files, 1)}


def _make_arrays(
    parts: Iterable[_Part], is_own: bool, pause: Callable[[], None]
) -> Iterator[np.ndarray]:
    """Makes the arrays of a file on every process, all of which exhaust it; yields them where it
    `is_own`, then raises a ConfigError if float16 could not hold one."""
    too_large, held = "", []
    for weight, index, shape, dtype, interleaved in parts:
        pause()
        (array,) = jax.tree.leaves(weight.weight)
        x = _gather(array, index, weight.form, shape[0], dtype)
        jax.block_until_ready(x)
        if is_own:
            written = np.asarray(x.addressable_data(0))
            if dtype == "float16" and not np.isfinite(written).all():
                too_large = too_large or weight.names[index]
            held.append(written)
            if len(held) >= interleaved:
                yield np.stack(held, -1) if interleaved > 1 else written
                held = []
    if too_large:
        raise ConfigError(f"{too_large}: {OVERFLOW}")


def _write_file(path: Place, header: bytes, arrays: Iterator[np.ndarray], is_own: bool) -> None:
    """Writes a file of tensors; takes part in making them where another process writes it."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        if is_own:
            with _refusing(path):
                is_far = isinstance(path, ObjectPath)
                with path.ask("open", "wb") if is_far else open(unfinished, "wb") as file:
                    file.write(header)
                    for array in arrays:
                        file.write(array.reshape(-1).view(np.uint8).data)
                    if not is_far:
                        file.flush()
                        os.fsync(file.fileno())
                if not is_far:
                    os.replace(unfinished, path)
    finally:
        for _ in arrays:  # after an error too: the others wait for this process to make the rest
            pass


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _gather(
    stack: jax.Array, index: tuple[int, ...], form: Form, rows: int, dtype: str
) -> jax.Array:
    """Returns the tensor at an index of a stack [L, ...] or [L, E, ...], or all of a weight, whole
    on every device and as it lies in a folder, cut to `rows` of its first axis."""
    x = stack
    if index:
        spec = jax.typeof(stack).sharding.spec
        axes = spec.partitions[: len(index)]

        def select(stack: jax.Array, *index: jax.Array) -> jax.Array:
            own = [own_index(*each) for each in zip(index, stack.shape, axes, strict=False)]
            x = stack.at[*own].get(mode="fill", fill_value=0)  # zeros where another device has it
            return psum(x, [axis for axis in axes if axis])

        specs = spec, *(REPLICATED for _ in index)
        x = map_shards(select, specs, unstack_spec(spec, len(index)))(stack, *map(jnp.int32, index))
    x = jax.reshard(x.astype(dtype), REPLICATED)
    x = x.transpose(form.order).reshape(form.tensor_shape)
    return x[np.argsort(form.rows) if form.blocks else slice(rows)]
