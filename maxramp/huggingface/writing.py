"""The weights of a model into a folder that transformers opens.

Tensors are made one after the other on the devices; the process that writes a file gets its
tensors whole, so that a host holds two of them beside its shards. On a disk and in an object
storage alike config.json comes last (`folder.is_whole`). The first file says what the folder is
made of: a killed export of the same continues, and writes nothing twice.

Shapes: L layers of a stack, E experts.
"""

import contextlib
import dataclasses
import errno
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxramp.errors import ConfigError, TrainingError, reason_of
from maxramp.files.place import ObjectPath, Place, is_near, is_unfinished, lock, sizes, write_whole
from maxramp.huggingface.experts import name_fused
from maxramp.huggingface.folder import MARKS, is_whole
from maxramp.huggingface.names import Form, Named, name_tensors
from maxramp.huggingface.parts import name_in_larger
from maxramp.huggingface.safetensors import CODES, DTYPES, INDEX, ONE, header_of
from maxramp.model.decoder import Decoder
from maxramp.model.order import order_by_layer
from maxramp.parallel.collectives import map_shards, own_index, psum
from maxramp.parallel.mesh import mesh_of
from maxramp.parallel.sharding import REPLICATED, unstack_spec
from maxramp.processes import agreement

_SOURCE = ".source.json"  # what the folder is made of


@dataclasses.dataclass(frozen=True)
class Format:
    """How a model's weights are written."""

    decoder_block: str  # their family
    dtype: str  # of the tensors, such as "bfloat16"; experts' biases are float32
    vocab_size: int  # rows of embedding and head that are written
    layers: Sequence[int] = ()  # the numbers of those that are written; none = all
    one_file: str = ONE  # the name of the file, where one is enough
    file_bytes: float = 5_000_000_000  # of a file, at most, as transformers writes them
    fuse_experts: bool = False  # those of a layer in one tensor
    in_larger: bool = False  # named as parts of a model that also sees or hears


class _Part(NamedTuple):
    """A tensor, or what lies in one of all experts of a layer."""

    weight: Named
    place: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str


def _entry(parts: list[_Part]) -> tuple[str, tuple[int, ...]]:
    """The dtype and shape of a tensor of these parts."""
    code, (rows, *rest), experts = CODES[parts[0].dtype], parts[0].shape, {x.place for x in parts}
    of_all = [] if len(parts) == 1 else [len(experts)]
    return code, (*of_all, len(parts) * rows // len(experts), *rest)


def write(
    folder: Place,
    model: Decoder,
    form: Format,
    beside: Mapping[str, bytes],
    source: Mapping[str, Any],
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Writes a model's folder, which is not there yet or not whole, on every process of the job.
    `beside` are other files by name, one of MARKS among them; `source` says what the weights are
    (`made_of`); `pause` is called between two tensors: what it raises ends the export.
    """
    model = order_by_layer(model)
    tensors: dict[str, list[_Part]] = {}
    for weight in name_tensors(model, form.decoder_block, form.layers):
        shape = weight.form.tensor_shape
        if weight.form.groups[0] == "V":
            shape = form.vocab_size, *shape[1:]
        dtype = "float32" if weight.weight.role == "balance" else form.dtype
        for place, part in weight.names.items():
            name = name_fused(weight.path, part) if form.fuse_experts else part
            name = name_in_larger(name) if form.in_larger else name
            tensors.setdefault(name, []).append(_Part(weight, place, shape, dtype))
    for parts in tensors.values():
        parts.sort(key=lambda part: part.place)  # an expert's gate stays before its up
    entries = {name: _entry(parts) for name, parts in tensors.items()}
    sizes_of = {name: math.prod(x) * DTYPES[code].itemsize for name, (code, x) in entries.items()}
    files = _files(sizes_of, form)
    headers = {file: header_of({n: entries[n] for n in names}) for file, names in files.items()}
    wanted = {file: len(headers[file]) + sum(map(sizes_of.get, files[file])) for file in files}
    if len(files) > 1:
        where = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes_of.values())}, "weight_map": where}
        beside = {INDEX: json.dumps(index, indent=2).encode(), **beside}
    sizes_beside = {name: len(data) for name, data in beside.items()}
    source = {**source, "dtype": form.dtype, "files": wanted | sizes_beside}
    with contextlib.ExitStack() as held, jax.set_mesh(mesh_of(model)):
        done = agreement.raise_everywhere(lambda: _begin(folder, source, held))
        done = agreement.all_gather_json(done)[0]
        for number, (file, names) in enumerate(files.items()):
            if done.get(file) == wanted[file]:
                continue
            is_own = number % jax.process_count() == jax.process_index()
            parts = _arrays([part for name in names for part in tensors[name]], is_own, pause)
            agreement.raise_everywhere(
                functools.partial(_write_file, folder / file, headers[file], parts, is_own)
            )
        agreement.raise_everywhere(lambda: _finish(folder, files, beside))


def _finish(folder: Place, files: Iterable[str], beside: Mapping[str, bytes]) -> None:
    """Writes what stands beside the files of tensors, the marks last."""
    if jax.process_index():
        return
    with _refusing(folder):
        _remove(folder, sizes(folder).keys() - {*files, _SOURCE})  # left by a kill
        for name in sorted(beside, key=MARKS.__contains__):
            write_whole(folder / name, beside[name])


def check_free(folder: Place) -> None:
    """Makes sure that an export may make this folder: it is not there, or an export began it."""
    with _refusing(folder):
        there = folder.exists() or (is_near(folder) and folder.is_symlink())  # to nowhere
        names = [""] * there
        if folder.is_dir():
            names = [path.name for path in folder.iterdir() if not is_unfinished(path)]
        if names and (_SOURCE not in names or not {*names}.isdisjoint(MARKS)):
            raise ConfigError(f"{folder}: is there already; move it away, or write to another")


def made_of(folder: Place) -> dict[str, Any] | None:
    """What a folder was made of, the `source` given to `write`.

    Empty for a folder that something else wrote, or that has lost files since; None for one that
    is not there or not whole.
    """
    with _refusing(folder):
        if not is_whole(folder):
            return None
        try:
            source = json.loads((folder / _SOURCE).read_bytes())
            wanted = source["files"].items()
        except (FileNotFoundError, ValueError, LookupError, AttributeError):
            return {}
        return source if wanted <= sizes(folder, source["files"]).items() else {}


def _remove(folder: Place, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _refusing(folder: Place) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        said = f"{folder}: cannot be written: {reason_of(error)}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise TrainingError(f"{said}; make room, and start again to continue") from None
        raise ConfigError(said) from None


def _files(sizes_of: Mapping[str, int], form: Format) -> dict[str, list[str]]:
    """The tensors of each file, by their bytes."""
    files, size = [[]], 0
    for name, own in sizes_of.items():
        if size and size + own > form.file_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += own
    if len(files) == 1:
        return {form.one_file: files[0]}
    stem = f"model-{{:05d}}-of-{len(files):05d}.safetensors"
    return {stem.format(i): names for i, names in enumerate(files, 1)}


def _begin(folder: Place, source: Mapping[str, Any], held: contextlib.ExitStack) -> dict[str, int]:
    """Makes the folder of an export, or continues it; returns the sizes of what is there.

    On a disk no other export may write it until `held` is closed.
    """
    if jax.process_index():
        return {}
    text = json.dumps(source, sort_keys=True).encode()
    with _refusing(folder):
        if is_near(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
            path = folder.with_name(f".{folder.name}.lock")
            file = held.enter_context(path.open("w"))
            try:
                lock(file)
            except BlockingIOError:
                raise ConfigError(f"{folder}: another export is writing it; wait") from None
            held.callback(path.unlink, missing_ok=True)
        check_free(folder)
        folder.mkdir(exist_ok=True)
        there = sizes(folder)
        if _SOURCE in there and (folder / _SOURCE).read_bytes() == text:
            return there
        _remove(folder, there.keys() - {_SOURCE})  # of other weights
        write_whole(folder / _SOURCE, text)
    return {}


def _arrays(
    parts: Iterable[_Part], is_own: bool, pause: Callable[[], None]
) -> Iterator[np.ndarray]:
    """What a file holds; every process makes it, and the one that writes it reads it."""
    too_large = ""
    for weight, place, shape, dtype in parts:
        pause()
        (array,) = jax.tree.leaves(weight.weight)
        x = _take(array, place, weight.form, shape[0], dtype)
        jax.block_until_ready(x)
        if is_own:
            written = np.asarray(x.addressable_data(0))
            if dtype == "float16" and not np.isfinite(written).all():
                too_large = too_large or weight.names[place]
            yield written
    if too_large:
        raise ConfigError(
            f"{too_large}: has numbers that float16 cannot hold (beyond 65,504); give --dtype "
            "bfloat16 or float32"
        )


def _write_file(path: Place, header: bytes, parts: Iterator[np.ndarray], is_own: bool) -> None:
    """Writes a file of tensors; takes part in making them where another process writes it."""
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        if is_own:
            with _refusing(path):
                is_far = isinstance(path, ObjectPath)
                with path.ask("open", "wb") if is_far else open(unfinished, "wb") as file:
                    file.write(header)
                    for part in parts:
                        file.write(part.reshape(-1).view(np.uint8).data)
                    if not is_far:
                        file.flush()
                        os.fsync(file.fileno())
                if not is_far:
                    os.replace(unfinished, path)
    finally:
        for _ in parts:  # the others wait for what this process has to do in making the rest
            pass


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def _take(stack: jax.Array, place: tuple[int, ...], form: Form, rows: int, dtype: str) -> jax.Array:
    """The tensor at a place of a stack [L, ...] or [L, E, ...], or a weight, as it lies in a
    folder, everywhere. `rows` are written of its first axis.
    """
    x = stack
    if place:
        spec = jax.typeof(stack).sharding.spec
        axes = spec.partitions[: len(place)]

        def take(stack: jax.Array, *place: jax.Array) -> jax.Array:
            own = [own_index(*each) for each in zip(place, stack.shape, axes, strict=False)]
            x = stack.at[*own].get(mode="fill", fill_value=0)  # zeros where another device has it
            return psum(x, [axis for axis in axes if axis])

        specs = spec, *(REPLICATED for _ in place)
        x = map_shards(take, specs, unstack_spec(spec, len(place)))(stack, *map(jnp.int32, place))
    x = jax.reshard(x.astype(dtype), REPLICATED)
    return x.transpose(form.order).reshape(form.tensor_shape)[:rows]
