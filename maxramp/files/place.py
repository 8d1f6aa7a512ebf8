"""A place for files: a path of the file system, or an address such as gs://bucket/runs.

An object storage has no folders, no rename and no append: an object is written whole and at once,
and a folder is what the names of objects begin with. So a folder that is there holds something.
"""

import contextlib
import dataclasses
import errno
import fnmatch
import os
import pathlib
import shutil
from collections.abc import Iterable, Iterator
from typing import Any, Self

from maxramp.errors import ConfigError
from maxramp.files import storage
from maxramp.keys.section import is_object_storage

MARK = ".folder"  # an object that makes a folder of an object storage be there


@dataclasses.dataclass(frozen=True, order=True)
class ObjectPath:
    """An address in an object storage, with the part of pathlib.Path that such a storage has.

    Whatever goes wrong is an OSError, as on a disk.
    """

    scheme: str  # gs or s3
    parts: tuple[str, ...]  # the bucket, and what the names of its objects are made of
    kind: str = dataclasses.field(default="", compare=False)  # where a listing has just told it

    @classmethod
    def of(cls, address: str) -> Self:
        """The path of scheme://bucket/name."""
        scheme, _, name = address.partition("://")
        return cls(scheme, tuple(part for part in name.split("/") if part))

    def __str__(self) -> str:
        return f"{self.scheme}://{'/'.join(self.parts)}"

    __fspath__ = __str__

    def __truediv__(self, name: str | os.PathLike) -> Self:
        return type(self).of(f"{self}/{os.fspath(name)}")

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self.parts[0]

    @property
    def key(self) -> str:
        """What the names of the bucket's objects call it."""
        return "/".join(self.parts[1:])

    @property
    def name(self) -> str:
        """The last part."""
        return self.parts[-1]

    @property
    def suffix(self) -> str:
        """What follows the last dot of the name, with it."""
        return pathlib.PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        """The name without its suffix."""
        return pathlib.PurePosixPath(self.name).stem

    @property
    def parent(self) -> Self:
        """Without the last part; of a bucket, itself."""
        return type(self)(self.scheme, self.parts[:-1] or self.parts)

    def with_name(self, name: str) -> Self:
        """With another last part."""
        return self.parent / name

    def absolute(self) -> Self:
        """Itself."""
        return self

    expanduser = resolve = absolute

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        """Does nothing: a folder comes with what is written to it."""

    def is_dir(self) -> bool:
        """Whether there is an object below it."""
        return self._found() == "directory"

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        return self._found() == "file"

    def exists(self) -> bool:
        """Whether either holds."""
        return self._found() != ""

    def _found(self) -> str:
        """The kind: file or directory, "" for neither; whoever gets no answer learns of it."""
        if self.kind:
            return self.kind
        try:
            with _asking(self) as store:  # not isdir: to some clients no answer is a no
                return store.info(str(self))["type"]
        except FileNotFoundError:
            return ""

    def iterdir(self) -> Iterator[Self]:
        """What is directly below it."""
        with _asking(self) as store:
            found = store.ls(str(self), detail=True)
        for entry in found:
            name = entry["name"].rstrip("/").rpartition("/")[2]
            if name and entry["name"].rstrip("/") != f"{self.bucket}/{self.key}".rstrip("/"):
                yield dataclasses.replace(self / name, kind=entry["type"])

    def glob(self, pattern: str) -> Iterator[Self]:
        """What is below it by a pattern of each part, such as */branch.json; no ** among them."""
        first, _, rest = pattern.partition("/")
        try:
            found = [path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, first)]
        except FileNotFoundError:
            return
        for path in found:
            yield from path.glob(rest) if rest else [path]

    def read_bytes(self) -> bytes:
        """The whole of an object."""
        with _asking(self) as store:
            return store.cat_file(str(self))

    def read_text(self, encoding: str = "utf-8") -> str:
        """The whole of an object that is text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        """Writes an object at once."""
        with _asking(self) as store:
            store.pipe_file(str(self), data)

    def unlink(self, missing_ok: bool = False) -> None:
        """Removes an object."""
        try:
            with _asking(self) as store:
                store.rm_file(str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise


Place = pathlib.Path | ObjectPath


def place(text: str | os.PathLike) -> Place:
    """The place that a text names."""
    text = os.fspath(text)
    return ObjectPath.of(text) if is_object_storage(text) else pathlib.Path(text)


def home_of(text: str | os.PathLike) -> Place:
    """The place that a text of a command line names, with its ~ spelled out.

    Raises:
      ConfigError: it names the home of nobody.
    """
    try:
        return place(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{text}: {error}; give the whole path") from None


def is_folder(path: Place) -> bool:
    """Whether there is such a folder; False also where this user may not look."""
    # Not of pathlib: before Python 3.12 it raises there.
    return path.is_dir() if isinstance(path, ObjectPath) else os.path.isdir(path)


def is_near(path: Place) -> bool:
    """Whether the loop can wait for what is done there: a storage may be away for an hour."""
    return not isinstance(path, ObjectPath)


def sizes(folder: Place) -> dict[str, int]:
    """Bytes of every file in a folder, however deep, by its name below the folder."""
    if isinstance(folder, ObjectPath):
        with _asking(folder) as store:
            found = store.find(str(folder), detail=True)
        start = len(f"{folder.bucket}/{folder.key}/")
        names = [name for name in found if name[start:].rstrip("/") == name[start:] != ""]
        return {name[start:]: found[name]["size"] for name in names}
    names = (os.path.join(root, name) for root, _, files in os.walk(folder) for name in files)
    return sizes_of(folder, [os.path.relpath(name, folder) for name in names])


def sizes_of(folder: Place, names: Iterable[str]) -> dict[str, int]:
    """Bytes of those of these files that are in a folder."""
    if isinstance(folder, ObjectPath):
        return sizes(folder)
    found = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found[name] = (folder / name).stat().st_size
    return found


def write_whole(path: Place, data: bytes) -> None:
    """Writes a file at once, as `storage.write_whole`.

    Raises:
      OSError: it cannot be written.
    """
    path.write_bytes(data) if isinstance(path, ObjectPath) else storage.write_whole(path, data)


def make_folder(path: Place) -> None:
    """Makes a folder that holds nothing yet, in an object storage by an object that names it."""
    if isinstance(path, ObjectPath):
        (path / MARK).write_bytes(b"")
    else:
        path.mkdir(parents=True, exist_ok=True)


def remove_tree(folder: Place) -> None:
    """Removes a folder and all that is in it, as far as that is possible."""
    if not isinstance(folder, ObjectPath):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        for name in sizes(folder):  # one by one: clients take a folder's name for a glob
            (folder / name).unlink(missing_ok=True)


def move_tree(folder: Place, to: Place) -> None:
    """Gives a folder another name: at once on a disk, object by object in an object storage."""
    if not isinstance(folder, ObjectPath):
        folder.rename(to)
        return
    for name in sizes(folder):
        with _asking(folder) as store:
            store.cp_file(f"{folder}/{name}", f"{to}/{name}")
    remove_tree(folder)


# What clients raise as on a disk; their texts and numbers are their own.
_NUMBERS = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}


@contextlib.contextmanager
def _asking(path: ObjectPath) -> Iterator[Any]:
    """The storage's client; what it raises becomes an OSError that names the address."""
    try:
        yield storage.store_of(path.scheme)
    except ConfigError:
        raise
    except Exception as error:  # clients have errors of their own
        if number := _NUMBERS.get(type(error)):
            raise OSError(number, os.strerror(number), str(path)) from None
        text = getattr(error, "strerror", None) or " ".join(str(error).split())[:200]
        raise OSError(errno.EIO, text or type(error).__name__, str(path)) from None
