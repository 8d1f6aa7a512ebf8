"""What a prepared set holds, and its rows as the model sees them."""

import dataclasses
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from maxramp.commandline import count
from maxramp.data import tokenizers
from maxramp.data.batch import stack, text_fields
from maxramp.data.files import prepared
from maxramp.data.keys import DataKeys
from maxramp.data.mixture import entry_of, open_mixture
from maxramp.data.row import PADDING
from maxramp.data.tokenizer_keys import MARK_KEYS
from maxramp.data.tokenizers import Tokenizer

_DOCUMENTS, _ROWS = 5, 3  # that are shown
_TOKENS = 64  # of each document or piece that are shown
_COLOURS = ("cyan", "yellow")  # of the documents of a row, by turns


def inspect(folder: str, keys: DataKeys, say: Callable[[str], None]) -> None:
    """Prints what a prepared set holds, with some of its documents and rows.

    Args:
      folder: of the set.
      keys: how rows are made.
      say: prints a line.

    Raises:
      ConfigError: it is none, or torn.
    """
    manifest, files = prepared.open_set(folder)
    used, tokenizer = manifest["tokenizer"], None
    if used:
        path = os.path.join(folder, used["file"]) if used["file"] else ""
        tokenizer = tokenizers.load(used["type"], path, **{k: used[k] for k in MARK_KEYS})
    say(f"set        {folder} (hash {manifest['hash']})")
    say(f"tokenizer  {tokenizer.describe() if tokenizer else 'none: the inputs held tokens'}")
    say(
        f"holds      {manifest['documents']:,} documents, {manifest['tokens']:,} tokens "
        f"({manifest['dtype']}, largest id {manifest['max_token']}) in {len(files):,} shards"
    )
    starts_of_shards = np.cumsum([0, *(shard["documents"] for shard in manifest["shards"])])
    for index in _spread(manifest["documents"], _DOCUMENTS):
        which = int(np.searchsorted(starts_of_shards, index, "right")) - 1
        ids = files[which][int(index - starts_of_shards[which])]
        say(f"document {index:,}, {len(ids):,} tokens: {_shown(ids, tokenizer)}")
    if manifest["tokens"] > keys.max_target_length:
        _show_rows(folder, manifest, keys, tokenizer, say)


def _show_rows(
    folder: str,
    manifest: dict[str, Any],
    keys: DataKeys,
    tokenizer: Tokenizer | None,
    say: Callable[[str], None],
) -> None:
    """Rows as training stacks them."""
    entry = entry_of("--inspect", folder)
    opened = {"grain_train_files": entry, "eval_fraction": 0.0, "eval_interval": -1}
    opened |= {"vocab_size": manifest["max_token"] + 1}
    corpus = open_mixture(dataclasses.replace(keys, **opened))
    rows, fields = corpus.train[0].items, text_fields(keys.max_target_length, corpus.packed)
    console = Console(highlight=False)
    say(
        f"rows       {len(rows):,} of max_target_length={keys.max_target_length}, "
        f"{'documents apart' if corpus.packed else 'each one text'}"
    )
    for number in _spread(len(rows), _ROWS):
        batch = stack([rows[int(number)]], fields)
        tokens, predicted = batch.tokens[0], batch.targets[0]
        begins = np.array([0])
        if batch.segments is not None:
            begins = np.unique(batch.segments[0], return_index=True)[1]
        say(f"row {number:,}, {count(len(begins), 'document')}")
        ends = [*begins[1:], len(tokens)]
        for piece, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            used = int((predicted[begin:end] != PADDING).sum())
            border = " |" if predicted[end - 1] == PADDING else ""
            text = Text(f"  tokens {begin:>5} to {end - 1:>5}, positions 0 to {end - begin - 1:>5}")
            text.append(f", {count(used, 'target'):>12}: ")
            text.append(_shown(tokens[begin:end], tokenizer), _COLOURS[piece % len(_COLOURS)])
            text.append(border, "bold red")
            with console.capture() as captured:
                console.print(text, soft_wrap=True)
            say(captured.get().rstrip("\n"))


def _spread(total: int, most: int) -> np.ndarray:
    """Numbers from all over the first `total`."""
    return np.unique(np.linspace(0, total - 1, most).astype(int))


def _shown(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    """The text of ids, as far as it is shown."""
    text = repr(tokenizer.decode(ids[:_TOKENS])) if tokenizer else " ".join(map(str, ids[:16]))
    return f"{text}{'...' if len(ids) > (_TOKENS if tokenizer else 16) else ''}"
