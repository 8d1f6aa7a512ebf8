"""Text -> token ids and back: bytes, Hugging Face `tokenizers`, SentencePiece, tiktoken."""

import base64
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from maxramp.data import hub
from maxramp.data.keys import MARK_KEYS
from maxramp.errors import ConfigError, one_line
from maxramp.files import storage
from maxramp.files.storage import optional

BEGIN, END = 256, 257  # marks around a document, after the 256 bytes

# Marks by the names that published tokenizers give them; those that this file names come first.
_MARKS, _TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
_BEGIN_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|endoftext|>")
_END_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|endoftext|>")

# How Llama 3 and cl100k_base cut text into words before they merge bytes.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclasses.dataclass(frozen=True)
class Model:
    """What a tokenizer's library knows and does."""

    vocab_size: int  # one more than the largest id
    begin: int | None
    end: int | None
    encode: Callable[[list[str]], Sequence[Sequence[int] | np.ndarray]]  # without marks
    decode: Callable[[list[int]], str]
    # of one text whose marks are marks, with the characters [n, 2] of each id
    encode_with_offsets: Callable[[str], tuple[list[int], list[tuple[int, int]]]] | None = None
    special: Sequence[str] = ()  # the texts of its marks


def _open_bytes(file: str, split: bool) -> Model:
    shown = {i: bytes([i]) for i in range(256)} | {BEGIN: b"<s>", END: b"</s>"}
    return Model(
        *(len(shown), BEGIN, END),
        encode=lambda texts: [np.frombuffer(text.encode(), np.uint8) for text in texts],
        decode=lambda ids: b"".join(map(shown.__getitem__, ids)).decode(errors="replace"),
    )


def _open_huggingface(file: str, split: bool) -> Model:
    """Opens a tokenizer.json; with `split`, special tokens in a text are cut like other text.
    Raises as its library, and a ConfigError for a config with tokens that it lacks."""
    library = optional("tokenizers", "tokenizers", file)
    model = library.Tokenizer.from_buffer(storage.read_bytes(file))
    model.no_truncation()  # a file may have the settings of another use
    model.no_padding()
    for name in ("dropout", "alpha", "nbest_size"):  # what draws among several ways to cut a text
        if hasattr(model.model, name):
            setattr(model.model, name, None)
    model.encode_special_tokens = split
    named, marks = _read_config(file), []
    for key, names in (("bos_token", _BEGIN_NAMES), ("eos_token", _END_NAMES)):
        token = named.get(key)
        token = token["content"] if isinstance(token, dict) else token
        known = [token] * bool(token) if key in named else names  # null: it has none
        ids = (model.token_to_id(name) for name in known)
        marks.append(next((i for i in ids if i is not None), None))
    for i, token in named.get("added_tokens_decoder", {}).items():
        if model.token_to_id(token["content"]) != int(i):  # transformers would add it
            raise ConfigError(
                f"{_marks_file(file)}: {token['content']} is {i}, and {file} has no such token; "
                "save it again with transformers' save_pretrained"
            )
    encode = functools.partial(model.encode_batch_fast, add_special_tokens=False)

    def encode_with_offsets(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = whole.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    whole = library.Tokenizer.from_str(model.to_str())  # whose marks are marks
    added = model.get_added_tokens_decoder().values()
    return Model(
        vocab_size=max(model.get_vocab(with_added_tokens=True).values(), default=-1) + 1,
        begin=marks[0],
        end=marks[1],
        encode=lambda texts: [encoded.ids for encoded in encode(texts)],
        decode=lambda ids: model.decode(ids, skip_special_tokens=False),
        encode_with_offsets=encode_with_offsets,
        special=[token.content for token in added if token.special],
    )


def _marks_file(file: str) -> str:
    return os.path.join(os.path.dirname(file), _MARKS)


def _read_config(file: str) -> dict[str, Any]:
    """Returns the tokenizer_config.json beside a file, {} without one."""
    beside = _marks_file(file)
    return json.loads(storage.read_bytes(beside)) if storage.exists(beside) else {}


def _open_sentencepiece(file: str, split: bool) -> Model:
    library = optional("sentencepiece", "sentencepiece", file)
    model = library.SentencePieceProcessor(model_proto=storage.read_bytes(file))
    begin, end = (mark if mark >= 0 else None for mark in (model.bos_id(), model.eos_id()))
    return Model(model.vocab_size(), begin, end, model.encode, model.decode)


def _open_tiktoken(file: str, split: bool) -> Model:
    """Opens ranks of tiktoken, with the marks and the words of Llama 3; with `split`, marks in a
    text are cut like other text. Raises as its library."""
    library = optional("tiktoken", "tiktoken", file)
    pairs = (line.split() for line in storage.read_bytes(file).splitlines() if line.strip())
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    begin = max(ranks.values()) + 1  # where Llama 3 has its marks
    marks = {_BEGIN_NAMES[0]: begin, _END_NAMES[0]: begin + 1}
    model = library.Encoding(file, pat_str=_WORDS, mergeable_ranks=ranks, special_tokens=marks)
    return Model(
        vocab_size=begin + 2,
        begin=begin,
        end=begin + 1,
        encode=lambda texts: [
            model.encode_ordinary(text) if split else model.encode(text, allowed_special="all")
            for text in texts
        ],
        decode=model.decode,
    )


# How a file of each type is opened, and what its copy in a prepared set is called.
TYPES = {
    "bytes": (_open_bytes, ""),
    "huggingface": (_open_huggingface, "tokenizer.json"),
    "sentencepiece": (_open_sentencepiece, "tokenizer.model"),
    "tiktoken": (_open_tiktoken, "tokenizer.tiktoken"),
}


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Encodes documents. Its model is read when first needed and stays in its process."""

    type: str  # one of TYPES
    # Its file, or of huggingface the folder of tokenizer.json or a name on the hub; bytes have none
    path: str
    add_bos: bool  # whether a document begins with a mark
    add_eos: bool  # and ends with one
    # Whether special tokens that a text names (</s>, <|im_end|>) are text as any other; else they
    # become marks, with huggingface and tiktoken. The texts of bytes and sentencepiece name none.
    split_special_tokens: bool

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the ids of each text, int32, with its marks; threads may call it at once. A
        ConfigError for a mark that the model lacks, or a text that its library refuses."""
        begin, end = self._marks
        try:
            encoded = self.model.encode(list(texts))
        except Exception as error:  # each library has its own
            what = f"cannot encode a text ({one_line(error, 120)})"
            raise ConfigError(f"tokenizer_path={self.path}: {what}") from None
        return [np.concatenate([begin, np.asarray(ids, np.int32), end]) for ids in encoded]

    def encode_with_offsets(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids [n] of a text that names its marks, and the characters [n, 2] of each;
        with huggingface alone."""
        ids, offsets = self.model.encode_with_offsets(text)
        return np.asarray(ids, np.int32), np.asarray(offsets, np.int64).reshape(-1, 2)

    def decode(self, ids: Sequence[int]) -> str:
        return self.model.decode([int(i) for i in ids])

    @property
    def vocab_size(self) -> int:
        """One more than the largest id that it can give."""
        return self.model.vocab_size

    @functools.cached_property
    def hash(self) -> str:
        """Of the file and the marks: equal hash, equal ids."""
        data = storage.read_bytes(self.file) if self.file else b""
        marks = f"{self.type} {self._marks} {self.split_special_tokens}".encode()
        return hashlib.blake2b(data + marks, digest_size=8).hexdigest()

    def describe(self) -> str:
        """Returns type, file, size and marks, for a person."""
        marks = [name for name, value in self.mark_keys.items() if value]
        return (
            f"{self.type}{f' {self.file}' if self.file else ''}: {self.vocab_size:,} ids"
            f"{', '.join(['', *marks])} (hash {self.hash})"
        )

    @property
    def file(self) -> str:
        path = os.path.expanduser(self.path) if self.type != "bytes" else ""
        if hub.is_name(path):
            file = hub.fetch("tokenizer_path", path, TYPES[self.type][1])
            if self.type == "huggingface":  # its marks come to lie beside it
                hub.fetch("tokenizer_path", path, _MARKS, beside=file)
            return file
        is_folder = self.type == "huggingface" and os.path.isdir(path)
        return os.path.join(path, "tokenizer.json") if is_folder else path

    def files(self) -> dict[str, bytes]:
        """Returns the files of its copy in a prepared set, its own first."""
        name = TYPES[self.type][1]
        files = {name: storage.read_bytes(self.file)} if name else {}
        if self.type == "huggingface" and storage.exists(marks := _marks_file(self.file)):
            files[_MARKS] = storage.read_bytes(marks)
        return files

    @property
    def mark_keys(self) -> dict[str, bool]:
        return {name: getattr(self, name) for name in MARK_KEYS}

    @property
    def named_marks(self) -> dict[str, str]:
        named = {name: self._config.get(name) for name in _NAMED}
        texts = {n: x["content"] if isinstance(x, dict) else x for n, x in named.items()}
        return {name: text for name, text in texts.items() if text}

    @property
    def chat_template(self) -> str:
        """The template beside its file, or in its config; "" if there is none. Where chats with
        tools have one of their own, it is both, each for its chats.
        """
        if self.type != "huggingface":
            return ""
        template = self._config.get("chat_template") or ""
        beside = os.path.join(os.path.dirname(self.file), _TEMPLATE)
        path = os.path.expanduser(self.path)
        if not template and hub.is_name(path):
            with contextlib.suppress(ConfigError):  # few models have one
                hub.fetch("tokenizer_path", path, _TEMPLATE, beside=self.file)
        if storage.exists(beside):
            return storage.read_bytes(beside).decode(errors="replace")
        if isinstance(template, list):  # several, by their names
            named = {one["name"]: one["template"] for one in template}
            template, with_tools = named.get("default", ""), named.get("tool_use", "")
            if template and with_tools:
                a, b = (text.removesuffix("\n") for text in (with_tools, template))  # as Jinja does
                template = f"{{% if tools +%}}{a}{{%+ else +%}}{b}{{%+ endif %}}"
        return template

    @property
    def _config(self) -> dict[str, Any]:
        return _read_config(self.file) if self.type == "huggingface" else {}

    @functools.cached_property
    def _marks(self) -> tuple[np.ndarray, np.ndarray]:
        begin, end = self.model.begin, self.model.end
        for key, mark in (("add_bos", begin), ("add_eos", end)):
            if getattr(self, key) and mark is None:
                raise ConfigError(f"{key}=True, but {self.file} has no such token; use {key}=False")
        marks = [begin] * self.add_bos, [end] * self.add_eos
        return tuple(np.asarray(mark, np.int32) for mark in marks)

    @functools.cached_property
    def model(self) -> Model:
        """The tokenizer's model, opened at the first use; a ConfigError if the file is missing, or
        no tokenizer of this type."""
        if not self.file and self.type != "bytes":
            raise ConfigError(
                f"tokenizer_path is empty: tokenizer_type={self.type} needs a file; "
                "tokenizer_type=bytes needs none"
            )
        try:
            return TYPES[self.type][0](self.file, self.split_special_tokens)
        except ConfigError:
            raise
        except Exception as error:  # each library has its own
            what = f"is not a {self.type} tokenizer ({one_line(error, 120)})"
            raise ConfigError(f"tokenizer_path={self.path}: {what}") from None

    def __reduce__(self):
        return Tokenizer, (self.type, self.path, *self.mark_keys.values())


def load(
    tokenizer_type: str, path: str, add_bos: bool, add_eos: bool, split_special_tokens: bool = True
) -> Tokenizer:
    """Opens a tokenizer and tries it; a ConfigError if it does not work."""
    tokenizer = Tokenizer(tokenizer_type, path, add_bos, add_eos, split_special_tokens)
    if not split_special_tokens and tokenizer_type not in ("huggingface", "tiktoken"):
        raise ConfigError(
            "split_special_tokens=False goes with tokenizer_type=huggingface or tiktoken: no text "
            f"is a special token of {tokenizer_type}; leave it out"
        )
    tokenizer.encode([""])
    return tokenizer


def train_bpe(texts: Iterator[str], vocab_size: int) -> bytes:
    """Trains a byte-level BPE of `vocab_size` (258 or more) ids, <s> and </s> first; returns its
    tokenizer.json. Fewer ids if the texts have no more pairs. A ConfigError without the package
    tokenizers."""
    library = optional("tokenizers", "tokenizers", "--train_bpe")
    model = library.Tokenizer(library.models.BPE())
    model.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(texts, trainer)
    return model.to_str().encode()
