"""Text -> token ids and back: bytes, Hugging Face `tokenizers`, SentencePiece, tiktoken."""

import abc
import base64
import functools
import hashlib
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxramp.data import storage
from maxramp.data.storage import optional
from maxramp.errors import ConfigError

BEGIN, END = 256, 257  # marks around a document, after the 256 bytes

# Marks by the names that published tokenizers give them; tokenizer_config.json comes first.
_BEGIN_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|endoftext|>")
_END_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|endoftext|>")

# How Llama 3 and cl100k_base cut text into words before they merge bytes.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Tokenizer(abc.ABC):
    """Encodes documents, with a begin and an end mark where asked for.

    Its model is read when first needed and stays in its process.
    """

    type: str
    file_name: str  # of a copy

    def __init__(self, path: str, add_bos: bool, add_eos: bool):
        """
        Args:
          path: the tokenizer's file.
          add_bos, add_eos: whether a document begins and ends with a mark.
        """
        self.path, self.add_bos, self.add_eos = path, add_bos, add_eos

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Ids of each text, int32, with its marks."""
        begin, end = self._marks
        return [
            np.concatenate([begin, np.asarray(ids, np.int32), end]) for ids in self._encode(texts)
        ]

    def check(self) -> None:
        """Reads the model and finds its marks.

        Raises:
          ConfigError: it is not there, is none, or lacks a mark.
        """
        _ = self._marks, self.vocab_size

    @functools.cached_property
    def hash(self) -> str:
        """Of the file and the marks: equal hash, equal ids."""
        data = storage.read_bytes(self.file) if self.file else b""
        marks = f"{self.type} {self.add_bos} {self.add_eos}".encode()
        return hashlib.blake2b(data + marks, digest_size=8).hexdigest()

    @property
    def file(self) -> str:
        """The file that holds the model; "" if none does."""
        return self.path

    def copy_to(self, folder: pathlib.Path) -> str:
        """Puts the tokenizer's files into a folder; returns the name of its own there."""
        return self._copy(self.file, folder / self.file_name).name if self.file else ""

    def _copy(self, file: str, to: pathlib.Path) -> pathlib.Path:
        data = storage.read_bytes(file)
        if not (to.exists() and to.read_bytes() == data):
            storage.write_whole(to, data)
        return to

    @functools.cached_property
    def _marks(self) -> tuple[np.ndarray, np.ndarray]:
        marks = []
        for wanted, key, mark in zip(
            (self.add_bos, self.add_eos), ("add_bos", "add_eos"), self._find_marks(), strict=True
        ):
            if wanted and mark is None:
                raise ConfigError(f"{key}=True, but {self.file} has no such mark; use {key}=False")
            marks.append(np.asarray([mark] if wanted else [], np.int32))
        return marks[0], marks[1]

    @functools.cached_property
    def _model(self) -> Any:
        if not self.path:
            raise ConfigError(
                f"tokenizer_path is empty: tokenizer_type={self.type} needs a file; "
                "tokenizer_type=bytes needs none"
            )
        try:
            return self._open(storage.read_bytes(self.file))
        except ConfigError:
            raise
        except Exception as error:  # each library has its own
            what = " ".join(str(error).split())[:120]
            raise ConfigError(
                f"tokenizer_path={self.path}: is no {self.type} tokenizer ({what})"
            ) from None

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "add_bos": self.add_bos, "add_eos": self.add_eos}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)

    @property
    @abc.abstractmethod
    def vocab_size(self) -> int:
        """One more than the largest id that it can give."""

    @abc.abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""

    @abc.abstractmethod
    def _open(self, data: bytes) -> Any: ...

    @abc.abstractmethod
    def _find_marks(self) -> tuple[int | None, int | None]: ...

    @abc.abstractmethod
    def _encode(self, texts: Sequence[str]) -> Sequence[Sequence[int] | np.ndarray]: ...


class Bytes(Tokenizer):
    """UTF-8 bytes, and two marks after them."""

    type, file_name, file, vocab_size = "bytes", "", "", END + 1

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        names = {BEGIN: "<s>", END: "</s>"}
        parts = [names[i].encode() if i in names else bytes([i]) for i in map(int, ids)]
        return b"".join(parts).decode(errors="replace")

    def _open(self, data: bytes) -> Any:
        return None

    def _find_marks(self) -> tuple[int | None, int | None]:
        return BEGIN, END

    def _encode(self, texts: Sequence[str]) -> Sequence[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]


class HuggingFace(Tokenizer):
    """tokenizer.json of Hugging Face `tokenizers`: the file, or the folder that holds it."""

    type, file_name = "huggingface", "tokenizer.json"

    @property
    def file(self) -> str:
        """tokenizer.json."""
        folder = os.path.isdir(os.path.expanduser(self.path))
        return os.path.join(self.path, "tokenizer.json") if folder else self.path

    def copy_to(self, folder: pathlib.Path) -> str:
        """Puts tokenizer.json and what names its marks into a folder."""
        if storage.exists(self._named_marks):
            self._copy(self._named_marks, folder / "tokenizer_config.json")
        return super().copy_to(folder)

    @property
    def _named_marks(self) -> str:
        return os.path.join(os.path.dirname(self.file), "tokenizer_config.json")

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return max(self._model.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, marks shown."""
        return self._model.decode([int(i) for i in ids], skip_special_tokens=False)

    def _open(self, data: bytes) -> Any:
        model = optional("tokenizers", "tokenizers", self.file).Tokenizer.from_buffer(data)
        model.no_truncation()  # a file may have settings of a use that is not ours
        model.no_padding()
        return model

    def _find_marks(self) -> tuple[int | None, int | None]:
        beside = self._named_marks
        named = json.loads(storage.read_bytes(beside)) if storage.exists(beside) else {}
        found = []
        for key, names in (("bos_token", _BEGIN_NAMES), ("eos_token", _END_NAMES)):
            token = named.get(key)
            token = token.get("content") if isinstance(token, dict) else token
            ids = (self._model.token_to_id(name) for name in ([token] if token else names))
            found.append(next((i for i in ids if i is not None), None))
        return found[0], found[1]

    def _encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        encoded = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [one.ids for one in encoded]


class SentencePiece(Tokenizer):
    """A SentencePiece .model file."""

    type, file_name = "sentencepiece", "tokenizer.model"

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._model.vocab_size()

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids."""
        return self._model.decode([int(i) for i in ids])

    def _open(self, data: bytes) -> Any:
        module = optional("sentencepiece", "sentencepiece", self.file)
        return module.SentencePieceProcessor(model_proto=data)

    def _find_marks(self) -> tuple[int | None, int | None]:
        begin, end = self._model.bos_id(), self._model.eos_id()
        return (begin if begin >= 0 else None), (end if end >= 0 else None)

    def _encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return self._model.encode(list(texts))


class Tiktoken(Tokenizer):
    """A .tiktoken file (base64 bytes and rank a line), with the words and marks of Llama 3."""

    type, file_name = "tiktoken", "tokenizer.tiktoken"

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._model.max_token_value + 1

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids, marks shown."""
        return self._model.decode([int(i) for i in ids])

    def _open(self, data: bytes) -> Any:
        pairs = (line.split() for line in data.splitlines() if line.strip())
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        end = max(ranks.values()) + 1
        return optional("tiktoken", "tiktoken", self.file).Encoding(
            self.path,
            pat_str=_WORDS,
            mergeable_ranks=ranks,
            special_tokens={_BEGIN_NAMES[0]: end, _END_NAMES[0]: end + 1},
        )

    def _find_marks(self) -> tuple[int | None, int | None]:
        return (
            self._model.encode_single_token(_BEGIN_NAMES[0]),
            self._model.encode_single_token(_END_NAMES[0]),
        )

    def _encode(self, texts: Sequence[str]) -> Sequence[Sequence[int]]:
        return [self._model.encode_ordinary(text) for text in texts]


TYPES = {kind.type: kind for kind in (Bytes, HuggingFace, SentencePiece, Tiktoken)}


def load(tokenizer_type: str, path: str, add_bos: bool, add_eos: bool) -> Tokenizer:
    """A tokenizer that is known to work.

    Raises:
      ConfigError: what is wrong with its file, or a mark it lacks.
    """
    tokenizer = TYPES[tokenizer_type](os.path.expanduser(path), add_bos, add_eos)
    tokenizer.check()
    return tokenizer


def train_bpe(texts: Any, vocab_size: int) -> bytes:
    """tokenizer.json of a byte-level BPE of `vocab_size` tokens, <s> and </s> among them.

    Args:
      texts: iterator over texts.
      vocab_size: at least 258: 256 bytes and two marks.
    """
    lib = optional("tokenizers", "tokenizers", "--train_bpe")
    model = lib.Tokenizer(lib.models.BPE())
    model.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=lib.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model.to_str().encode()
