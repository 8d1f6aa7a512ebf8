"""Prints what a prepared set holds, its rows as the model sees them, and chats' targets."""

import dataclasses
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from rich.console import Console
from rich.text import Text

from maxramp.commandline import count
from maxramp.data import tokenizers
from maxramp.data.batch import Batch, stack
from maxramp.data.chats.messages import PAIR
from maxramp.data.files import prepared
from maxramp.data.files.megatron import TokenStream
from maxramp.data.keys import MARK_KEYS, DataKeys
from maxramp.data.mixtures import find_mixtures
from maxramp.data.preparation import prepare
from maxramp.data.rows import PADDING, Chain, Document, StreamRows
from maxramp.data.tokenizers import Tokenizer
from maxramp.objectives.pairs import PAIRS
from maxramp.objectives.table import find_objective
from maxramp.stage import text_fields

_DOCUMENTS, _ROWS = 5, 3  # that are shown
_BEGIN, _END = "\u27e6", "\u27e7"  # around targets: brackets that texts hardly have
_TOKENS = 64  # of each document or piece that are shown
# Of control characters, which a terminal obeys or drops.
_ESCAPES = {n: repr(chr(n))[1:-1] for n in range(160) if chr(n) not in "\n\t" and not 31 < n < 127}
Pieces = Iterable[tuple[str, bool]]  # of a text, and whether each is a target
_COLOURS = ("cyan", "yellow")  # of the documents of a row, by turns


def inspect(folder: str, keys: DataKeys) -> None:
    """Prints what a prepared set holds, some of its documents, and rows as the model sees them, by
    max_target_length and separate_documents; a ConfigError if it is not a whole set."""
    _, manifest, files, _ = prepared.open_set(folder)
    used, tokenizer = manifest["tokenizer"], None
    if used:
        path = os.path.join(folder, used["file"]) if used["file"] else ""
        tokenizer = tokenizers.load(used["type"], path, **{k: used[k] for k in MARK_KEYS})
    print(f"set        {folder} (hash {manifest['hash']})")
    print(f"tokenizer  {tokenizer.describe() if tokenizer else 'none: the inputs held tokens'}")
    print(
        f"holds      {prepared.describe(manifest)} "
        f"({manifest['dtype']}, largest id {manifest['max_token']}) in {count(len(files), 'shard')}"
    )
    documents, length, console = Chain(files), keys.max_target_length, Console(highlight=False)
    for line in prepared.describe_left_out(manifest):
        print(f"left out   {line}")
    if "chats" in manifest:
        is_pair = find_objective(manifest["chats"]["made_by"]) is PAIRS
        for index in _spread(len(documents), _DOCUMENTS):
            document = documents[index]
            texts = () if document.left_out else _decode(document, tokenizer)
            _show_chat(console, index, document, texts, is_pair)
        return
    for index in _spread(len(documents), _DOCUMENTS):
        ids = documents[index]
        print(f"document {index:,}, {len(ids):,} tokens: {_preview(ids, tokenizer)}")
    separate = keys.separate_documents and len(documents) > 1
    rows = StreamRows(TokenStream(files), length, separate=separate)
    if len(rows):
        apart = "documents apart" if separate else "each one text"
        print(f"rows       {len(rows):,} of max_target_length={length}, {apart}")
    for number in _spread(len(rows), _ROWS):
        pieces = list(_pieces(stack([rows[number]], text_fields(length, separate)), tokenizer))
        print(f"row {number:,}, {count(len(pieces), 'document')}", flush=True)
        for piece in pieces:
            console.print(piece, soft_wrap=True)


def inspect_chats(files: str, keys: DataKeys) -> None:
    """Prepares chats, or pairs, as a run would (below data_cache_dir), and prints the same of them;
    `files` has the form of `grain_train_files`. Raises as `find_mixtures` and `prepare`."""
    whole = {"grain_train_files": files, "grain_eval_files": "", "eval_sets": {}}
    no_model = {"vocab_size": 2**31 - 1}  # into which the tokenizer has to fit
    for cached in find_mixtures(dataclasses.replace(keys, **whole, **no_model)).cached_sets:
        prepare(cached, lambda: None)
        inspect(str(cached.folder), keys)


def _decode(document: Document, tokenizer: Tokenizer) -> Iterator[Pieces]:
    """Yields the parts of a document, each as texts and whether they are targets."""
    for first, last in itertools.pairwise((*document.begins, len(document.tokens))):
        is_target, tokens = document.is_target[first:last], document.tokens[first:last]
        ends = [*(1 + np.flatnonzero(np.diff(is_target))), len(is_target)]
        yield [
            (tokenizer.decode(tokens[begin:end]), is_target[begin])
            for begin, end in itertools.pairwise((0, *ends))
        ]


def _show_chat(
    console: Console, index: int, document: Document, texts: Iterable[Pieces], is_pair: bool
) -> None:
    targets = 0 if document.is_target is None else int(document.is_target[1:].sum())
    note = f"{len(document.tokens)} tokens, {count(targets, 'target')}"
    note = f"left out: {document.left_out}" if document.left_out else note
    console.print(Text(f"{'pair' if is_pair else 'chat'} {index:,}, {note}", "bold"))
    for number, pieces in enumerate(texts):
        if is_pair:
            console.print(Text(f"{PAIR[number]}:", "bold"))
        shown = Text()
        for text, is_learnt in pieces:
            text = text.translate(_ESCAPES)
            shown.append(*((f"{_BEGIN}{text}{_END}", "bold green") if is_learnt else (text,)))
        console.print(shown, soft_wrap=True)


def _pieces(batch: Batch, tokenizer: Tokenizer | None) -> Iterator[Text]:
    """Yields a line for every piece of the first row of a batch: where it lies, its targets, and
    its beginning as text."""
    tokens, predicted, begins = batch.tokens[0], batch.targets[0], np.array([0])
    if batch.segments is not None:
        begins = np.unique(batch.segments[0], return_index=True)[1]
    ends = [*begins[1:], len(tokens)]
    for piece, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        used = int((predicted[begin:end] != PADDING).sum())
        text = Text(f"  tokens {begin:>5} to {end - 1:>5}, positions 0 to {end - begin - 1:>5}")
        text.append(f", {count(used, 'target'):>12}: ")
        text.append(_preview(tokens[begin:end], tokenizer), _COLOURS[piece % len(_COLOURS)])
        text.append(" |" if predicted[end - 1] == PADDING else "", "bold red")
        yield text


def _spread(total: int, most: int) -> list[int]:
    return np.unique(np.linspace(0, total - 1, min(total, most)).astype(int)).tolist()


def _preview(ids: Sequence[int], tokenizer: Tokenizer | None) -> str:
    text = repr(tokenizer.decode(ids[:_TOKENS])) if tokenizer else " ".join(map(str, ids[:16]))
    return f"{text}{'...' if len(ids) > (_TOKENS if tokenizer else 16) else ''}"
