"""Files to read: by path, glob or any URL of fsspec's, whole or by position.

All errors are ConfigErrors that name the path. A run writes to a `place`.
"""

import functools
import glob
import hashlib
import importlib
import json
import logging
import os
import resource
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np

from maxramp.errors import ConfigError, install

PATIENCE = 60.0  # seconds that a storage's first answer may take
_SPANS, _SPAN = 4, 1 << 14  # parts of a file that stand for its contents, and their bytes


def optional(module: str, package: str, purpose: str, extra: str = "data") -> ModuleType:
    """Imports a module that only some data needs, from a package of our `extra`; a ConfigError says
    how to install it for that `purpose`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(f"{purpose} needs the package {package}: {install(extra)}") from None


def allow_many_files() -> None:
    """Lets this process and its children hold as many files open as the system permits. Most start
    with 1,024, for the sake of select(2), which nothing here uses.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def is_remote(path: str) -> bool:
    """Tells whether a path is one of fsspec's, such as gs://bucket/file."""
    return "://" in path


@functools.cache
def store_of(protocol: str) -> Any:
    """Returns fsspec's client of a protocol, such as "gs" or "https", which lists nothing from a
    cache; a ConfigError if no installed package serves it."""
    fsspec = optional("fsspec", "fsspec", f"{protocol}://")
    # The errors that it raises say enough; on stderr it would print pages.
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
    # A cached listing is an old one.
    fsspec.config.conf.setdefault(protocol, {}).setdefault("use_listings_cache", False)
    try:
        # With the options of etils, which asks for Orbax: so both have one client.
        options = {"finalize_on_close": True} if protocol == "gs" else {}
        return fsspec.filesystem(protocol, **options)
    except (ImportError, ValueError) as error:  # it names the package that serves a protocol
        extra = {"gs": "gcs", "gcs": "gcs", "s3": "s3"}.get(protocol)
        reason = f"{install(extra)} brings what it needs" if extra else error
        raise ConfigError(f"{protocol}:// cannot be read: {reason}") from None


def _ask(path: str, near: Callable[[], Any], far: Callable[[Any], Any]) -> Any:
    """Returns near() for a path of the disk, far(client) for a URL; any error becomes a
    ConfigError."""
    try:
        return far(store_of(path.partition("://")[0])) if is_remote(path) else near()
    except ConfigError:
        raise
    except Exception as error:  # a store's client has errors of its own
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConfigError(f"{path}: cannot be read: {reason}") from None


def check_answers(key: str, path: str) -> None:
    """Refuses an address, the value of `key`, whose storage gives no answer within PATIENCE: its
    client asks again and again, and takes that for no file."""
    if not is_remote(path):
        return
    store = store_of(path.partition("://")[0])
    pool = ThreadPool(1)  # left alone: what it waits for ends by itself
    try:
        pool.apply_async(store.info, [path]).get(PATIENCE)
    except (FileNotFoundError, PermissionError):
        return  # it answers
    except Exception as error:
        reason = str(error) or f"no answer in {PATIENCE:.0f} seconds"
        raise ConfigError(
            f"{key}={path}: the storage cannot be reached ({reason}); check the address, the "
            "network and the credentials"
        ) from None


def find(pattern: str) -> list[str]:
    """Lists files and folders that a path or URL, plain or a glob, matches, sorted, [] for none.
    From then on this process and its children may hold all of them open."""
    allow_many_files()
    return _ask(
        pattern,
        lambda: sorted(glob.glob(os.path.expanduser(pattern), recursive=True)),
        lambda store: sorted(map(store.unstrip_protocol, store.glob(pattern))),
    )


def exists(path: str) -> bool:
    return _ask(path, lambda: os.path.isfile(path), lambda store: store.isfile(path))


def open_binary(path: str) -> BinaryIO:
    return _ask(
        path, lambda: open(os.path.expanduser(path), "rb"), lambda store: store.open(path, "rb")
    )


def size_of(path: str) -> int:
    return _ask(path, lambda: os.stat(path).st_size, lambda store: store.size(path))


def version_of(path: str) -> tuple[Any, ...]:
    """Returns what changes when the file does; a copy's differs. For a file on a disk these are the
    size, the times and a hash of evenly spaced parts, for an object what the storage tells.
    """
    return _ask(
        path,
        lambda: _version_here(path),
        # Not its ukey, which of http:// is the address. A redirect's is signed anew each time.
        lambda store: (str(store.info(path) | {"url": ""}),),
    )


def _version_here(path: str) -> tuple[int, int, int, str]:
    """Returns what changes when a local file does: size, times, and a hash of spans of its
    contents."""
    # ctime cannot be set back, as mtime can; but files written together share one, and mounted
    # storages may have none. These give new inode numbers at each mount, so they do not count.
    digest = hashlib.blake2b(digest_size=8)
    with open(path, "rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        last = max(0, status.st_size - _SPAN)
        for start in sorted({last * i // (_SPANS - 1) for i in range(_SPANS)}):
            if start:  # a pipe cannot seek
                file.seek(start)
            digest.update(file.read(_SPAN))
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, digest.hexdigest()


def read_bytes(path: str) -> bytes:
    with open_binary(path) as file:
        return file.read()


def map_in_threads(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """Calls a function on each item, and returns the results in their order, or raises its first
    error. It runs in 16 threads: a storage is slow, and has thousands of files."""
    results = [function(item) for item in items[:1]]  # here, where Ctrl-C can end a download
    with ThreadPool(16) as pool:
        return results + pool.map(function, items[1:])


def read_json(path: str) -> dict[str, Any]:
    return parse_json(path, read_bytes(path))


def parse_json(path: str, data: bytes) -> dict[str, Any]:
    """Returns the JSON object that `data` holds; a ConfigError that begins with `path` for anything
    else."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: is not JSON ({error}); fetch it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: holds no JSON object; fetch it again")
    return value


def map_bytes(path: str) -> Any:
    """Opens the bytes of a file, uint8, which must not change. Of the result use `len` and slices
    without a step alone: they are read on access, from memory or by ranges."""
    if not (size := size_of(path)):
        return np.empty(0, np.uint8)
    # As a plain array: slices of a memmap take microseconds.
    return _ask(
        path,
        lambda: np.asarray(np.memmap(path, np.uint8, "r")),
        lambda store: _RemoteBytes(path, size),
    )


class _RemoteBytes:
    def __init__(self, path: str, size: int):
        self._path, self._size = path, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(self._size)
        return read_range(self._path, start, stop) if start < stop else np.empty(0, np.uint8)


def read_range(path: str, start: int, stop: int) -> np.ndarray:
    """Reads the bytes [start, stop) of a file, uint8, into memory of their own; a ConfigError if it
    is missing or ends before."""
    data = _ask(
        path,
        lambda: np.fromfile(path, np.uint8, stop - start, offset=start),
        # By name: another argument comes first in s3fs.
        lambda store: np.array(
            np.frombuffer(store.cat_file(path, start=start, end=stop), np.uint8)
        ),
    )
    if len(data) < stop - start:
        raise ConfigError(f"{path}: is torn: it ends at byte {start + len(data)}, before {stop}")
    return data
