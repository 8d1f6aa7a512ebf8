"""text_files, or else the sources of Python's standard library: one stream of bytes with marks."""

import glob
import hashlib
import os
import pathlib
import sysconfig

import numpy as np

from maxramp.commandline import count
from maxramp.data.corpus import Corpus, Part, hash_of
from maxramp.data.files.records import UTF16, is_utf16
from maxramp.data.keys import DataKeys
from maxramp.data.rows import StreamRows
from maxramp.data.tokenizers import BEGIN, END
from maxramp.errors import ConfigError


def open_texts(keys: DataKeys) -> Corpus:
    length = keys.max_target_length
    files, name = _find_files(keys.text_files)
    tokens = _read_documents(files)
    # The order of documents is random but the same everywhere, so the tail of the stream
    # is a fair sample; of a single file it is the file's end.
    cut = len(tokens) - round(len(tokens) * keys.eval_fraction)
    train, held_out = StreamRows(tokens[:cut], length), StreamRows(tokens[cut:], length)
    for rows, part, size, remedy in (
        (train, "training", cut, ""),
        (held_out, "held-out", len(tokens) - cut, ", a larger eval_fraction, or eval_interval=-1"),
    ):
        if not len(rows) and (rows is train or keys.eval_interval > 0):
            raise ConfigError(
                f"text_files={keys.text_files}: the {part} text has {size} tokens, but one "
                f"row takes max_target_length + 1 = {length + 1}; give more text or shorter "
                f"rows{remedy}"
            )
    note = f"; {count(len(files), 'file')}, {len(tokens) / 1e6:.1f} MB"
    evaluated = Part("", 1.0, held_out, rows_id=hash_of([_hash(tokens[cut:]), length]))
    return Corpus([Part(name, 1.0, train, _hash(tokens))], [evaluated], note)


def _hash(tokens: np.ndarray) -> str:
    return hashlib.blake2b(tokens.data, digest_size=8).hexdigest()


def _find_files(pattern: str) -> tuple[list[tuple[str, pathlib.Path]], str]:
    """(name, path) of every file, in the corpus's order, and what to call them."""
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
    return sorted(named, key=lambda item: hashlib.sha256(item[0].encode()).digest()), title


def _read_documents(files: list[tuple[str, pathlib.Path]]) -> np.ndarray:
    """The stream of all documents: BEGIN, its bytes, END; uint16."""
    parts = []
    for _, path in files:
        try:
            text = path.read_bytes()
        except OSError as error:
            raise ConfigError(f"text_files: {path} cannot be read: {error.strerror}") from None
        if is_utf16(text):
            raise ConfigError(f"text_files: {path} {UTF16}")
        if b"\0" in text:
            raise ConfigError(
                f"text_files: {path} is not text (it holds a zero byte at {text.index(0)}); "
                "name text files only"
            )
        if text:
            parts += [[BEGIN], np.frombuffer(text, np.uint8), [END]]
    if not parts:
        raise ConfigError(f"text_files: all {len(files)} files are empty, {files[0][1]} for one")
    return np.concatenate(parts, dtype=np.uint16, casting="unsafe")
