"""Files by glob or URL, their bytes by position, and packages that only some formats need."""

import functools
import glob
import importlib
import os
import pathlib
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from maxramp.errors import ConfigError


def optional(module: str, package: str, purpose: str) -> ModuleType:
    """Imports a module that only some data needs.

    Raises:
      ConfigError: it is not installed, with the line that installs it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{purpose} needs the package {package}: python -m pip install {package} (or "
            "'maxramp[data]')"
        ) from None


def is_remote(path: str) -> bool:
    """Whether a path is one of fsspec's, such as gs://bucket/file."""
    return "://" in path


@functools.cache
def _filesystem(protocol: str) -> Any:
    fsspec = optional("fsspec", "fsspec", f"{protocol}://")
    try:
        return fsspec.filesystem(protocol)
    except (ImportError, ValueError) as error:  # fsspec names the package that serves a protocol
        raise ConfigError(f"{protocol}:// cannot be read: {error}") from None


def find(pattern: str) -> list[str]:
    """Files and folders that a path, glob or URL with a glob matches, sorted."""
    if not is_remote(pattern):
        return sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    filesystem = _filesystem(pattern.partition("://")[0])
    try:
        return sorted(map(filesystem.unstrip_protocol, filesystem.glob(pattern)))
    except Exception as error:  # a store's client has errors of its own
        raise ConfigError(f"{pattern}: cannot be listed: {_reason(error)}") from None


def exists(path: str) -> bool:
    """Whether there is such a file."""
    if not is_remote(path):
        return os.path.isfile(path)
    return _filesystem(path.partition("://")[0]).isfile(path)


def open_binary(path: str) -> BinaryIO:
    """A file to be read from its beginning, with seek and readline.

    Raises:
      ConfigError: it is not there or not to be read.
    """
    try:
        if is_remote(path):
            return _filesystem(path.partition("://")[0]).open(path, "rb")
        return open(path, "rb")
    except Exception as error:
        raise ConfigError(f"{path}: cannot be read: {_reason(error)}") from None


def size_of(path: str) -> int:
    """Bytes of a file."""
    try:
        if is_remote(path):
            return _filesystem(path.partition("://")[0]).size(path)
        return os.stat(path).st_size
    except Exception as error:
        raise ConfigError(f"{path}: cannot be read: {_reason(error)}") from None


def read_bytes(path: str) -> bytes:
    """The whole of a file."""
    with open_binary(path) as file:
        return file.read()


def map_bytes(path: str) -> Any:
    """The bytes of a file, uint8, whose slices are read on access: from memory, or by ranges."""
    size = size_of(path)
    if is_remote(path):
        return _RemoteBytes(path, size)
    open_binary(path).close()  # says in one line what is wrong
    return np.memmap(path, np.uint8, "r") if size else np.empty(0, np.uint8)


class _RemoteBytes:
    def __init__(self, path: str, size: int):
        self._path, self._size = path, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self._size)
        filesystem = _filesystem(self._path.partition("://")[0])
        try:
            data = filesystem.cat_file(self._path, start=start, end=stop) if stop > start else b""
        except Exception as error:
            raise ConfigError(f"{self._path}: cannot be read: {_reason(error)}") from None
        return np.frombuffer(data, np.uint8)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """Writes a file that is either whole or not there."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(unfinished, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(unfinished, path)
