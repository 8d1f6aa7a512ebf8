"""text_files, or else the sources of Python's standard library: one stream of bytes with marks."""

import glob
import hashlib
import os
import pathlib
import sysconfig

import numpy as np

from maxramp.data.files.records import UTF16, BadRecord, RecordFile, is_utf16
from maxramp.data.keys import DataKeys
from maxramp.data.shards import Preparation, plan_cached
from maxramp.data.tokenizers import BEGIN, END, Tokenizer
from maxramp.errors import ConfigError
from maxramp.files import storage


class BytesFile(RecordFile):
    """A file that is one document of bytes, in any encoding, with its marks."""

    def __len__(self) -> int:
        return 1

    def _record(self, index: int) -> np.ndarray:
        data = storage.read_bytes(self.path)
        if is_utf16(data):
            raise BadRecord(UTF16)
        if b"\0" in data:
            raise BadRecord(
                f"is not text (it holds a zero byte at {data.index(0)}); name text files only"
            )
        return np.concatenate([[BEGIN], np.frombuffer(data, np.uint8), [END]], dtype=np.int32)

    def where(self, position: int) -> str:
        return f"text_files: {self.path}"


def plan_text(keys: DataKeys) -> Preparation:
    """Returns the set of the files' bytes. The order of documents is random but the same
    everywhere, so the tail of the stream is a fair sample; of a single file it is the file's end. A
    ConfigError if all files are empty."""
    named, title = _find_files(keys.text_files)
    files = [BytesFile(str(path), "", True) for _, path in named if path.stat().st_size]
    if not files:
        raise ConfigError(f"text_files: all {len(named)} files are empty, {named[0][1]} for one")
    tokenizer = Tokenizer("bytes", "", True, True, True)
    return plan_cached(title, keys.data_cache_dir, files, tokenizer)


def _find_files(pattern: str) -> tuple[list[tuple[str, pathlib.Path]], str]:
    """Returns (name, path) of every file of a folder or glob on this machine, in corpus order,
    and what to call them; of "" the standard library's sources. A ConfigError for none."""
    if not pattern:
        title, paths = "sources of the Python standard library", []
        root = pathlib.Path(sysconfig.get_paths()["stdlib"])
        skipped = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if name not in skipped]
            paths += [pathlib.Path(folder, name) for name in names if name.endswith(".py")]
    else:
        title, root = f"text_files={pattern}", pathlib.Path(os.path.expanduser(pattern))
        if root.is_dir():
            paths = [p for p in root.rglob("*") if p.is_file()]
            paths = [p for p in paths if not any(x[0] == "." for x in p.relative_to(root).parts)]
        else:
            paths = [pathlib.Path(p) for p in glob.glob(str(root), recursive=True)]
            paths = [p for p in paths if p.is_file()]
            root = pathlib.Path(os.path.commonpath([p.parent for p in paths] or ["/"]))
    if not paths:
        raise ConfigError(f"text_files={pattern}: no such file, and no folder or glob that has any")
    named = [(p.relative_to(root).as_posix(), p) for p in paths]
    return sorted(named, key=lambda item: hashlib.sha256(os.fsencode(item[0])).digest()), title
