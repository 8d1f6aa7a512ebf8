"""What a prepared set is made from: the documents of its inputs, and their tokenizer."""

import pathlib
import time
from collections.abc import Callable, Sequence

from maxramp.data import preparation, tokenizers
from maxramp.data.files import formats
from maxramp.data.files.hubset import HubSet
from maxramp.data.files.records import RecordFile
from maxramp.data.keys import DataKeys
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError
from maxramp.files import storage

_BPE_BYTES = 1 << 30  # of text that a BPE is trained on, at most


def open_inputs(names: Sequence[str], keys: DataKeys) -> list[RecordFile]:
    """The files that globs and paths name, in order, and the set of the hub that the keys name.

    Raises:
      ConfigError: there are none of a name, or they are not all texts or all tokens.
    """
    (column,) = keys.train_data_columns
    tokens = not keys.tokenize_train_data
    inputs: list[RecordFile] = []
    if keys.hf_path:
        inputs.append(HubSet(keys.hf_path, keys.hf_name, keys.train_split, column, tokens))
    for name in names:
        kind, paths = formats.find("INPUT", name, keys.grain_file_type)
        if kind == "prepared":
            raise ConfigError(f"INPUT: {name} is a prepared set; train on it as it is")
        files = [formats.READERS[kind](path, column, tokens) for path in paths]
        if kind == "megatron":
            for file in files:
                file.check()
        inputs += files
    if len({file.tokens for file in inputs}) > 1:
        raise ConfigError("INPUT: Megatron's files hold tokens and the others text; prepare each")
    return inputs


def open_tokenizer(
    bpe_size: int | None, keys: DataKeys, inputs: Sequence[RecordFile]
) -> Tokenizer | None:
    """The tokenizer that the keys name; None where one is trained, or the inputs hold tokens.

    Raises:
      ConfigError: two tokenizers are given, or one for tokens; or it cannot be loaded or trained.
    """
    kind, path, training = keys.tokenizer_type, keys.tokenizer_path, bpe_size is not None
    if inputs[0].tokens:
        if training or path:
            named = f"--train_bpe {bpe_size}" if training else f"tokenizer_path={path}"
            raise ConfigError(f"{named}: the inputs hold no text but tokens; leave it out")
        return None
    if not training:
        return tokenizers.load(kind, path, **keys.mark_keys)
    if path or kind != "bytes":
        raise ConfigError(
            f"--train_bpe {bpe_size} trains a tokenizer, and the keys name another, "
            f"{path or kind}; leave one of them out"
        )
    if bpe_size < 258:
        raise ConfigError(f"--train_bpe {bpe_size} must be 258 or more: 256 bytes and two marks")
    return None


def train_bpe(
    size: int,
    file: pathlib.Path,
    inputs: Sequence[RecordFile],
    keys: DataKeys,
    allowed: int,
    say: Callable[[str], None],
) -> Tokenizer:
    """A BPE trained on the inputs, now or by an earlier start.

    Args:
      size: ids.
      file: where it is, or comes to be.
      inputs: from `open_inputs`.
      keys: which marks documents get.
      allowed: bad records; they are left out.
      say: prints a line.
    """
    if file.exists():
        say(f"tokenizer  {file} is there from an earlier start")
    else:
        start = time.perf_counter()
        texts = preparation.sample_texts(inputs, _BPE_BYTES, allowed)
        storage.write_whole(file, tokenizers.train_bpe(texts, size))
        say(f"tokenizer  trained in {time.perf_counter() - start:.1f}s")
    return tokenizers.load("huggingface", str(file), **keys.mark_keys)
