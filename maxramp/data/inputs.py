"""What a prepared set is made from: the documents of its inputs, and their tokenizer."""

import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from maxramp.data import mixture, preparation, shards, tokenizers
from maxramp.data.bad_records import BadRecords
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
        kind, paths = mixture.find_files("INPUT", name, keys.grain_file_type)
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


def check_apart(output: pathlib.Path, inputs: Sequence[RecordFile]) -> None:
    """Refuses a folder that holds an input: nothing lies there but the set.

    Raises:
      ConfigError: it does.
    """
    folder = output.resolve()
    for file in inputs:
        path = pathlib.Path(file.local_path).absolute()
        if file.local_path and (
            path.resolve().is_relative_to(folder) or path.parent.resolve().is_relative_to(folder)
        ):
            raise ConfigError(f"--output {output} holds the input {path}; give another folder")


def open_tokenizer(
    bpe_size: int | None,
    keys: DataKeys,
    output: pathlib.Path,
    inputs: Sequence[RecordFile],
    manifest: dict[str, Any] | None,
    allowed: BadRecords,
    say: Callable[[str], None],
) -> tuple[Tokenizer | None, str]:
    """The tokenizer of the inputs, by the keys or trained on them.

    Args:
      bpe_size: ids of a BPE that is to be trained; None = the tokenizer of the keys.
      keys: of data.
      output: folder of the set.
      inputs: from `open_inputs`.
      manifest: of a set that is there already.
      allowed: bad records.
      say: prints a line.

    Returns:
      The tokenizer, None where the inputs hold tokens; and the name of one that was trained, or "".

    Raises:
      ConfigError: two tokenizers are given, or one for tokens; or it cannot be loaded or trained.
    """
    if inputs[0].tokens:
        if bpe_size is None and not keys.tokenizer_path:
            return None, ""
        named = f"tokenizer_path={keys.tokenizer_path}"
        if bpe_size is not None:
            named = f"--train_bpe {bpe_size}"
        raise ConfigError(f"{named}: the inputs hold no text but tokens; leave it out")
    kind, path, trained = keys.tokenizer_type, keys.tokenizer_path, ""
    if bpe_size is not None:
        if path or kind != "bytes":
            raise ConfigError(
                f"--train_bpe {bpe_size} trains a tokenizer, and the keys name "
                f"another, {path or kind}; leave one of them out"
            )
        file, trained = _train_bpe(bpe_size, output, inputs, manifest, allowed, say)
        kind, path = "huggingface", str(file)
    tokenizer = tokenizers.load(kind, path, **keys.mark_keys)
    say(f"tokenizer  {tokenizer.describe()}")
    return tokenizer, trained


def _train_bpe(
    size: int,
    output: pathlib.Path,
    inputs: Sequence[RecordFile],
    manifest: dict[str, Any] | None,
    allowed: BadRecords,
    say: Callable[[str], None],
) -> tuple[pathlib.Path, str]:
    """The file of a BPE trained on the inputs, now or by an earlier start, and its name there.

    Its name says what it was trained from until the set is finished; then the manifest does.
    """
    if size < 258:
        raise ConfigError(f"--train_bpe {size} must be 258 or more: 256 bytes and two marks")
    name = shards.bpe_name(size, inputs)
    path = output / f"{name}.json"
    if manifest:
        used = manifest["tokenizer"] or {"vocab_size": 0}
        if used.get("trained") != name:
            raise ConfigError(
                f"--train_bpe {size}: {output} holds a set that was finished with another "
                f"tokenizer, of {used['vocab_size']:,} ids; give another folder, or remove it"
            )
        return output / "tokenizer.json", name
    if path.exists():
        say(f"tokenizer  {path} is there from an earlier start")
        return path, name
    start = time.perf_counter()
    texts = preparation.sample_texts(inputs, _BPE_BYTES, allowed)
    storage.write_whole(path, tokenizers.train_bpe(texts, size))
    say(f"tokenizer  trained in {time.perf_counter() - start:.1f}s")
    return path, name
