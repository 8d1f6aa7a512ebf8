"""Safetensors files: where the tensors of a model lie, without reading them. Imports no JAX.

A file is the length of its header (uint64), the header as JSON, and the tensors' bytes in C order
(https://github.com/huggingface/safetensors, its README). The format's own library reads no files in
object storages.
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
SINGLE_FILE = "model.safetensors"
_LENGTH = struct.Struct("<Q")
_LARGEST_HEADER = 100_000_000  # bytes, the bound of the format's own readers

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
CODES = {str(dtype): code for code, dtype in DTYPES.items()}
OVERFLOW = "has numbers that float16 cannot hold (beyond 65,504); give --dtype bfloat16 or float32"


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where a tensor lies."""

    name: str
    file: str
    dtype: str  # as the format calls it: a key of DTYPES where it can be a weight
    shape: tuple[int, ...]
    start: int  # the byte of the file that it begins with
    inputs_first: bool = False  # whether a matrix has its inputs as rows

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1

    def read(self, first: int, stop: int) -> np.ndarray:
        """Reads rows [first, stop) of the first axis at once, of a dtype in DTYPES; a ConfigError
        if the file is cut off."""
        dtype, rest = DTYPES[self.dtype], self.shape[1:]
        data = self.read_bytes(first, stop, math.prod(rest) * dtype.itemsize)
        return data.view(dtype).reshape(stop - first, *rest)

    def read_bytes(self, first: int, stop: int, size: int) -> np.ndarray:
        """Reads rows [first, stop) of `size` bytes."""
        return storage.read_range(self.file, self.start + first * size, self.start + stop * size)


def find_tensors(folder: str, single_file: str = SINGLE_FILE) -> dict[str, Tensor]:
    """Returns every tensor of a folder by its name.

    `single_file` is the name of a file that holds them all; only a model may have several, listed
    in an index. Raises a ConfigError if the folder has none, or a torn one.
    """
    index, weight_map = f"{folder}/{INDEX}", {}
    if storage.exists(f"{folder}/{single_file}"):  # before an index, as transformers has it
        files = [single_file]
    elif single_file == SINGLE_FILE and storage.exists(index):
        weight_map = storage.read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index}: has no weight_map, which names the file of every tensor")
        files = sorted({*map(str, weight_map.values())})
    else:
        pickles = [p for end in ("bin", "pt", "pth") for p in storage.find(f"{folder}/*.{end}")]
        why = f"; {pickles[0]} is a pickle, which could run any code" if pickles else ""
        raise ConfigError(
            f"{folder}: holds neither {single_file} nor {INDEX}{why}; save the model with "
            "transformers' save_pretrained, which writes them"
        )
    tensors: dict[str, Tensor] = {}
    for name in files:
        path = f"{folder}/{name}"
        if "/" in name or not storage.exists(path):
            raise ConfigError(f"{index}: names {name}, which is not in the folder; fetch it again")
        for tensor in _read_header(path):
            if tensor.name in tensors:
                raise ConfigError(
                    f"{path}: holds {tensor.name}, which {tensors[tensor.name].file} has too"
                )
            tensors[tensor.name] = tensor
    for name, file in weight_map.items():
        if name not in tensors:
            raise ConfigError(f"{index}: names {name} in {file}, which does not hold it")
    return tensors


def _read_header(path: str) -> list[Tensor]:
    """Reads which tensors a file holds; refuses one that is torn."""
    size = storage.size_of(path)
    prefix = storage.read_range(path, 0, min(_LENGTH.size, size)).tobytes()
    length = _LENGTH.unpack(prefix)[0] if len(prefix) == _LENGTH.size else size
    if length > min(size - _LENGTH.size, _LARGEST_HEADER):
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
        if dtype in DTYPES and stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
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


def make_header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """Returns the first bytes of a file that holds tensors, by their dtype (a key of DTYPES) and
    shape, in this order."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # without which transformers stops
    start = 0
    for name, (dtype, shape) in tensors.items():
        stop = start + math.prod(shape) * DTYPES[dtype].itemsize
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that tensors begin at a multiple of 8
    return _LENGTH.pack(len(text)) + text
