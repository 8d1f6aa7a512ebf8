"""A place for files: a path of the file system, or an address such as gs://bucket/runs.

An object storage has no folders, no rename and no append: an object is written whole and at once,
and a folder is what the names of objects begin with. So a folder that is there holds something.
"""

import contextlib
import errno
import fcntl
import fnmatch
import itertools
import os
import pathlib
import secrets
import shutil
from collections.abc import Collection, Iterator
from typing import IO, Any, Self

from maxramp.errors import ConfigError, one_line
from maxramp.files import storage
from maxramp.keys.section import is_object_storage

MARK = ".folder"  # an object that makes a folder of an object storage exist
_UNFINISHED = ".tmp"  # how the name of a file that is being written ends

# What flock says on network and FUSE file systems that have no locks.
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


class ObjectPath(pathlib.PurePosixPath):
    """An address in an object storage, with methods of pathlib.Path; its errors are OSErrors."""

    kind = ""  # file or directory, if a listing has just told it

    def __str__(self) -> str:
        return super().__str__().replace(":/", "://", 1)

    __fspath__ = __str__

    def ask(self, operation: str, *arguments: Any, **options: Any) -> Any:
        """Calls a method of the storage's fsspec client on this address; its errors come as
        OSErrors."""
        return self._call(operation, str(self), *arguments, **options)

    def upload(self, file: pathlib.Path) -> None:
        self._call("put_file", str(file), str(self))

    def _call(self, operation: str, *arguments: Any, **options: Any) -> Any:
        client = storage.store_of(self.parts[0][:-1])
        try:
            return getattr(client, operation)(*arguments, **options)
        except Exception as error:
            raise failure(error, self) from None

    def spec(self) -> dict[str, Any]:
        """Returns TensorStore's spec of this folder, of gs:// or s3://; it finds credentials where
        fsspec does."""
        spec: dict[str, Any] = {"bucket": self.parts[1], "path": "/".join((*self.parts[2:], ""))}
        if self.parts[0] == "gs:":
            return {"driver": os.environ.get("TENSORSTORE_GCS_BACKEND", "gcs")} | spec
        for key, names in (
            ("endpoint", ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")),
            ("aws_region", ("AWS_REGION", "AWS_DEFAULT_REGION")),
        ):
            if values := [os.environ[name] for name in names if os.environ.get(name)]:
                spec[key] = values[0]
        if os.environ.get("AWS_ACCESS_KEY_ID"):  # else it looks for files first, and complains
            spec["aws_credentials"] = {"type": "environment"}
        return {"driver": "s3"} | spec

    def absolute(self) -> Self:
        return self

    resolve = absolute

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None: ...  # nothing to make

    def is_dir(self) -> bool:
        return self._look_up_kind() == "directory"

    def is_file(self) -> bool:
        return self._look_up_kind() == "file"

    def exists(self) -> bool:
        return self._look_up_kind() != ""

    def _look_up_kind(self) -> str:
        """Returns file or directory, "" for neither; an OSError says that no answer came."""
        try:
            return self.kind or self.ask("info")["type"]  # to some clients' isdir no answer is a no
        except FileNotFoundError:
            return ""

    def iterdir(self) -> Iterator[Self]:
        for entry in self.ask("ls", detail=True):
            path = type(self)(f"{self.parts[0]}//{entry['name']}")
            if path.parent == self:  # some clients list the folder too
                path.kind = entry["type"]
                yield path

    def glob(self, pattern: str) -> Iterator[Self]:
        """Yields what a pattern for each part matches, such as */branch.json, but without **;
        nothing if the folder is missing."""
        first, _, rest = pattern.partition("/")
        with contextlib.suppress(FileNotFoundError):
            for path in self.iterdir():
                if fnmatch.fnmatchcase(path.name, first):
                    yield from path.glob(rest) if rest else [path]

    def read_bytes(self) -> bytes:
        return self.ask("cat_file")

    def read_text(self, encoding: str = "utf-8") -> str:
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> None:
        self.ask("pipe_file", data)

    def unlink(self, missing_ok: bool = False) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.ask("rm_file")


# What clients raise as on a disk; their texts and numbers are their own.
_NUMBERS = {FileNotFoundError: errno.ENOENT, PermissionError: errno.EACCES}


def failure(error: Exception, path: ObjectPath) -> OSError:
    """Returns a client's exception as an OSError with its errno, else EIO."""
    if number := _NUMBERS.get(type(error)):
        return OSError(number, os.strerror(number), str(path))
    return OSError(errno.EIO, getattr(error, "strerror", None) or one_line(error), str(path))


Place = pathlib.Path | ObjectPath


def place(text: str | os.PathLike) -> Place:
    """Makes a Place of a path, whose ~ it expands, or of an address; a ConfigError for the ~ of an
    unknown user."""
    text = os.fspath(text)
    try:
        return ObjectPath(text) if is_object_storage(text) else pathlib.Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{text}: {error}; give the whole path") from None


def is_near(path: Place) -> bool:
    """Tells whether the loop can wait for what is done there: a storage may be away for an hour."""
    return not isinstance(path, ObjectPath)


def sizes(folder: Place, names: Collection[str] = ()) -> dict[str, int]:
    """Measures the files in a folder, however deep: bytes by their names below the folder. On a
    disk, those `names` alone if there are any, also behind links; what is missing is left out. Of a
    missing folder {}; an OSError if a storage does not answer."""
    if isinstance(folder, ObjectPath):
        start = len("/".join((*folder.parts[1:], "")))
        objects = {name[start:]: e["size"] for name, e in folder.ask("find", detail=True).items()}
        return {name: size for name, size in objects.items() if name and name[-1] != "/"}
    walked = (os.path.join(root, name) for root, _, files in os.walk(folder) for name in files)
    files = {}
    for name in names or (os.path.relpath(path, folder) for path in walked):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            files[name] = (folder / name).stat().st_size
    return files


def write_whole(path: Place, data: bytes) -> None:
    """Writes a file at once: after a kill it is the old one or the new one, never a part. On a disk
    its folder must exist. If several processes write it, the last one wins. An OSError names the
    file, as a failed write does not."""
    if isinstance(path, ObjectPath):
        path.write_bytes(data)
        return
    # Hidden, because TensorBoard reads what it sees; and no other process writes to it.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}{_UNFINISHED}")
    try:
        with open(unfinished, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def keep_id(path: Place) -> str:
    """Reads the id in a file; if the file is missing, writes a random id. For one process: two that
    begin at once may return different ids."""
    if not path.exists():
        write_whole(path, f"{secrets.token_hex(8)}\n".encode())
    return path.read_text().strip()


def is_unfinished(path: Place) -> bool:
    return path.name.startswith(".") and path.name.endswith(_UNFINISHED)


def can_make(folder: pathlib.Path) -> bool:
    """Tells whether a folder is on this machine, or could be made."""
    above = next(filter(os.path.exists, (folder, *folder.absolute().parents)))
    return above == folder or os.access(above, os.W_OK | os.X_OK)


def make_folder(path: Place) -> None:
    if isinstance(path, ObjectPath):
        (path / MARK).write_bytes(b"")
    else:
        path.mkdir(parents=True, exist_ok=True)


def remove_tree(folder: Place) -> None:
    """Removes a folder with all that is in it; silently leaves what cannot be removed."""
    if not isinstance(folder, ObjectPath):
        shutil.rmtree(folder, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        # One by one: clients take a folder's name for a glob. Hidden names last: they say what
        # the other files are.
        for name in sorted(sizes(folder), reverse=True):
            (folder / name).unlink(missing_ok=True)


def move_tree(folder: Place, to: Place) -> None:
    """Renames a folder to a name that is free: at once on a disk, object by object in a storage,
    where a kill leaves parts under both names. An OSError if it cannot."""
    if not isinstance(folder, ObjectPath):
        folder.rename(to)
        return
    for name in sizes(folder):
        (folder / name).ask("cp_file", str(to / name))
    remove_tree(folder)


def set_aside(folder: Place, suffix: str) -> Place:
    """Gives a folder its name with a suffix, or the next that is free; returns it. Only for a
    folder that no other process moves or writes; raises as `move_tree`, an OSError."""
    again = (folder.with_name(f"{folder.name}-{n}{suffix}") for n in itertools.count(2))
    names = itertools.chain([folder.with_name(f"{folder.name}{suffix}")], again)
    aside = next(aside for aside in names if not aside.exists())
    move_tree(folder, aside)
    return aside


def lock(file: IO) -> str:
    """Locks an open file until it is closed or the process ends; a BlockingIOError if it is locked.
    Returns a warning if the file system has no locks, so that nothing is locked, else "".
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return (
            f"{file.name}: this file system has no locks ({error.strerror}); make sure that no "
            "other process writes to this folder"
        )
    return ""
