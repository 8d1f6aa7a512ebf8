"""Safetensors files: where the tensors of a model lie, without reading them. Imports no JAX.

A file is the length of its header (uint64), the header as JSON, and the tensors' bytes in C order
(https://github.com/huggingface/safetensors, its README).
"""

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from maxramp.errors import ConfigError
from maxramp.files import storage

INDEX = "model.safetensors.index.json"
ONE = "model.safetensors"
_LENGTH = struct.Struct("<Q")
_MOST_HEADER = 100_000_000  # bytes, as the format's own readers have it

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CODES = {str(dtype): code for code, dtype in DTYPES.items()}
_BYTES = {"I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_BYTES |= {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies."""

    name: str
    file: str
    dtype: str  # as the format calls it: a key of DTYPES where it can be a weight
    shape: tuple[int, ...]
    start: int  # the byte of the file that it begins with

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def read(self, first: int, stop: int) -> np.ndarray:
        """Rows [first, stop) of the first axis, by one read."""
        dtype, rest = DTYPES[self.dtype], self.shape[1:]
        size = math.prod(rest) * dtype.itemsize
        data = storage.read_range(self.file, self.start + first * size, self.start + stop * size)
        return data.view(dtype).reshape(stop - first, *rest)


def tensors_of(folder: str, one: str = ONE) -> dict[str, Tensor]:
    """Every tensor of a model's folder by its name; `one` is the file of a folder with only one."""
    index = f"{folder}/{INDEX}"
    if storage.exists(f"{folder}/{one}"):  # before an index, as transformers has it
        found = None
    elif one == ONE and storage.exists(index):
        found = storage.read_json(index).get("weight_map")
        if not isinstance(found, dict) or not found:
            raise ConfigError(f"{index}: has no weight_map, which names the file of every tensor")
    else:
        pickles = [p for end in ("bin", "pt", "pth") for p in storage.find(f"{folder}/*.{end}")]
        why = f"; {pickles[0]} is a pickle, which could run any code" if pickles else ""
        raise ConfigError(
            f"{folder}: holds neither {one} nor {INDEX}{why}; save the model with transformers' "
            "save_pretrained, which writes them"
        )
    files = {one} if found is None else {*map(str, found.values())}
    tensors: dict[str, Tensor] = {}
    for name in sorted(files):
        path = f"{folder}/{name}"
        if "/" in name or not storage.exists(path):
            raise ConfigError(f"{index}: names {name}, which is not in the folder; fetch it again")
        for tensor in _file_tensors(path):
            if tensor.name in tensors:
                raise ConfigError(
                    f"{path}: holds {tensor.name}, which {tensors[tensor.name].file} has too"
                )
            tensors[tensor.name] = tensor
    for name, file in (found or {}).items():
        if name not in tensors:
            raise ConfigError(f"{index}: names {name} in {file}, which does not hold it")
    return tensors


def _file_tensors(path: str) -> list[Tensor]:
    size = storage.size_of(path)
    head = storage.read_range(path, 0, min(_LENGTH.size, size)).tobytes()
    length = _LENGTH.unpack(head)[0] if len(head) == _LENGTH.size else size
    if length > min(size - _LENGTH.size, _MOST_HEADER):
        raise ConfigError(f"{path}: torn or not a safetensors file: {size} bytes; fetch it again")
    begin = _LENGTH.size + length
    entries: list[tuple[int, int, str, str, tuple[int, ...]]] = []
    try:
        header = json.loads(storage.read_range(path, _LENGTH.size, begin).tobytes())
        header.pop("__metadata__", None)
        for name, entry in header.items():
            dtype, shape, (start, stop) = map(entry.pop, ("dtype", "shape", "data_offsets"))
            numbers = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
            if entry or not numbers or not isinstance(dtype, str):
                raise ValueError
            entries.append((start, stop, name, dtype, tuple(shape)))
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        raise ConfigError(f"{path}: its header is not of safetensors; fetch it again") from None
    tensors, end = [], 0
    for start, stop, name, dtype, shape in sorted(entries):
        itemsize = DTYPES[dtype].itemsize if dtype in DTYPES else _BYTES.get(dtype)
        if itemsize and start != stop - math.prod(shape) * itemsize:
            raise ConfigError(
                f"{path}: {name} is {dtype}{list(shape)}, but has {stop - start} bytes; fetch it "
                "again"
            )
        if start != end:
            raise ConfigError(
                f"{path}: {name} begins at byte {start} of the tensors, but the one before it ends "
                f"at {end}; fetch it again"
            )
        tensors.append(Tensor(name, path, dtype, shape, begin + start))
        end = stop
    if begin + end != size:
        raise ConfigError(
            f"{path}: is torn: {size} bytes, but its tensors end at {begin + end}; fetch it again"
        )
    return tensors


def header_of(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """What a file of tensors begins with, of their dtype (a key of DTYPES) and shape, in order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without which transformers stops
    at = 0
    for name, (dtype, shape) in tensors.items():
        stop = at + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of 8
    return _LENGTH.pack(len(text)) + text
