"""The rows of a run: its data prepared where it has to be, opened, and documents laid out.

Every process of a job calls this; those that do not read learn the sizes from those that do. An
error in one ends all with the same line, before anything is trained.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from maxramp.commandline import count
from maxramp.data import packing
from maxramp.data.corpus import Corpus, Part, hash_of
from maxramp.data.files.megatron import MegatronFile, TokenStream
from maxramp.data.files.prepared import open_set
from maxramp.data.keys import DataKeys
from maxramp.data.mixtures import NAMES, Entry, Mixtures, find_mixtures
from maxramp.data.preparation import prepare
from maxramp.data.rows import LEFT_OUT, Chain, StreamRows, SyntheticRows, WholeRows
from maxramp.data.shards import Preparation
from maxramp.errors import ConfigError
from maxramp.processes.agreement import all_gather_json, raise_everywhere, run_on, run_on_first

_SAMPLED = 64  # rows of Megatron's files that are read at the start, for their hash


def open_rows(
    data: DataKeys,
    reads: bool,
    beat: Callable[[], None] = lambda: None,
    later: Sequence[tuple[int, str]] = (),
) -> Corpus:
    """Opens the rows that the keys name, on all processes; a ConfigError if these see other data.

    Text, chats and token ids are prepared once, into sets below data_cache_dir.

    Args:
      reads: whether this process opens the data; the first one does. Others get a range of numbers.
      beat: called on every process now and then while a set is prepared.
      later: (first row, grain_train_files) of the phases that change the mixture. A part is the
        same in all mixtures that name it.
    """
    mixtures = raise_everywhere(lambda: find_mixtures(data, later) if reads else Mixtures())

    def prepare_sets(publishes: bool) -> None:
        for one in mixtures.cached_sets:
            prepare(one, beat, publishes)

    # The first process begins, as the others may see what it writes; then each prepares what it
    # still lacks, where machines share no disk.
    run_on_first(lambda: prepare_sets(True), beat)
    lacks = all_gather_json(not all(one.is_prepared for one in mixtures.cached_sets))
    run_on(np.flatnonzero(lacks).tolist(), lambda: prepare_sets(False), beat)
    corpus = raise_everywhere(lambda: _open(data, mixtures) if reads else None)
    summaries = all_gather_json(corpus.summary if corpus else None)
    for process, summary in enumerate(summaries):
        if summary not in (None, summaries[0]):
            raise ConfigError(
                f"process {process} sees other data than process 0 (hash {hash_of(summary)}, not "
                f"{hash_of(summaries[0])}); give all processes the same files"
            )
    return corpus or Corpus.from_summary(summaries[0])


def _open(data: DataKeys, mixtures: Mixtures) -> Corpus:
    sources = open_sources(data, mixtures)
    # Rows need no laying out: all parts have one noun.
    corpus = sources if sources.train[0].noun == "rows" else _lay_out(data, sources)
    description = f"{_describe(sources)}{corpus.description}"
    return dataclasses.replace(corpus, later=sources.later, description=description)


def _describe(sources: Corpus) -> str:
    """Describes parts and their shares, before documents are laid out."""
    names = [part.name for part in sources.train]
    shares = _describe_shares(names, [part.weight for part in sources.train])
    for row, weights in sources.later:
        shares += f"; from row {row} on {_describe_shares(names, weights)}"
    parts = sources.train, sources.held_out
    train, held_out = (sum(len(part.items) for part in group) for group in parts)
    names = ", ".join(part.name for part in sources.held_out)
    return (
        f"{shares}: {train:,} {sources.train[0].noun} to train on and {held_out:,} "
        f"held out{f' in {names}' if names else ''}"
    )


def _describe_shares(names: Sequence[str], weights: Sequence[float]) -> str:
    total = sum(weights)
    named = [(name, weight) for name, weight in zip(names, weights, strict=True) if weight]
    shares = [f"{name} {weight / total:.3g}" for name, weight in named]
    return ", ".join(shares) if len(shares) > 1 else named[0][0]


def open_sources(keys: DataKeys, mixtures: Mixtures) -> Corpus:
    """Opens entries whose sets are prepared; documents are still to be laid out. Raises a
    ConfigError if no row is left to train on, or to evaluate."""
    if keys.dataset_type == "text":
        return _open_text(keys, mixtures.cached_sets[0])
    if keys.dataset_type == "synthetic":
        return _open_synthetic(keys)
    length = keys.max_target_length
    parts, held_out = [_open_part(keys, entry) for entry in mixtures.train], []
    packed = any(map(_is_separate, parts))
    for name, entries in mixtures.evaluated.items():
        chosen = [_open_part(keys, entry) for entry in entries]
        packed = packed or any(map(_is_separate, chosen))
        digest = hash_of([length, [part.hash for part in chosen]])
        held_out.append(_hold_out(name, chosen, length, digest))
    if not held_out:  # the end of every part of the first mixture
        ends = []
        for i, part in enumerate(parts):
            if part.weight:
                cut = len(part.items) - round(len(part.items) * keys.eval_fraction)
                ends.append(dataclasses.replace(part, items=part.items[cut:]))
                parts[i] = dataclasses.replace(part, items=part.items[:cut])
        held_out = [_hold_out("", ends, length)]
    _check_counts(keys, parts, held_out)
    parts = [dataclasses.replace(x, hash=hash_of([length, len(x.items), x.hash])) for x in parts]
    tokenizers = [one.manifest["tokenizer"] for entry in mixtures.entries for one in entry.sets]
    tokenizers += [cached.tokenizer for cached in mixtures.cached_sets]
    note = ""
    if keys.tokenizer_path and not any(tokenizers):
        note = f"; tokenizer_path={keys.tokenizer_path} is not used, the files hold tokens"
    return Corpus(parts, held_out, note, packed, mixtures.later)


def _hold_out(name: str, parts: Sequence[Part], length: int, digest: str = "") -> Part:
    """Joins parts to a held-out set; `digest` is "" where the train parts' hash covers it."""
    identities = [[part.hash, len(part.items), _is_separate(part)] for part in parts]
    items = Chain([part.items for part in parts])
    return Part(name, 1.0, items, digest, parts[0].noun, repr([length, identities]))


def _is_separate(part: Part) -> bool:
    return getattr(part.items, "separate", False)


def _open_text(keys: DataKeys, cached: Preparation) -> Corpus:
    """Opens the prepared files as one stream, whose end is held out; raises a ConfigError if
    no row is left to train on, or to evaluate."""
    texts = open_set(str(cached.folder))
    stream, length = TokenStream(texts.shards), keys.max_target_length
    total, digest = len(stream), texts.digest
    cut = total - round(total * keys.eval_fraction)
    train, held_out = (StreamRows(stream, length, span=s) for s in ((0, cut), (cut, total)))
    for rows, part, size, remedy in (
        (train, "training", cut, ""),
        (held_out, "held-out", total - cut, ", a larger eval_fraction, or eval_interval=-1"),
    ):
        if not len(rows) and (rows is train or keys.eval_interval != -1):
            raise ConfigError(
                f"text_files={keys.text_files}: the {part} text has {size} tokens, but one "
                f"row takes max_target_length + 1 = {length + 1}; give more text or shorter "
                f"rows{remedy}"
            )
    note = f"; {count(len(cached.files), 'file')}, {total / 1e6:.1f} MB"
    evaluated = Part("", 1.0, held_out, rows_id=hash_of([digest, cut, length]))
    return Corpus([Part(cached.name, 1.0, train, digest)], [evaluated], note)


def _open_synthetic(keys: DataKeys) -> Corpus:
    """Returns rows of random ids below vocab_size, the same for the same data_shuffle_seed."""
    seed, sizes = keys.data_shuffle_seed, (keys.vocab_size, keys.max_target_length)
    train = SyntheticRows(2**31 - 1, *sizes, 2 * seed)
    held_out = SyntheticRows(1024, *sizes, 2 * seed + 1)
    note = "; random tokens"
    if keys.tokenizer_path:
        note += f"; tokenizer_path={keys.tokenizer_path} is not used"
    digest = f"{seed}, {sizes}"
    evaluated = Part("", 1.0, held_out, rows_id=digest)
    return Corpus([Part("synthetic", 1.0, train, digest)], [evaluated], note)


def _open_part(keys: DataKeys, entry: Entry) -> Part:
    """Opens an entry: Megatron's files and prepared sets become StreamRows, cut from one stream of
    tokens; a set in the cache becomes WholeRows if it holds rows; else Documents, still to be laid
    out. A ConfigError without a row, or with tokens beyond vocab_size in the set in the cache or in
    a sampled row of Megatron's; other rows of those are checked as they are read.
    """
    length, sets, files = keys.max_target_length, entry.sets, entry.files
    if entry.cached:
        sets = [open_set(str(entry.cached.folder))]
    if sets:
        files = [shard for one in sets for shard in one.shards]
        digest = "+".join(one.digest for one in sets)
    if entry.cached:
        _check_ids(keys, entry.name, sets[0].manifest["max_token"], files)
    noun = "rows"
    if not entry.are_rows:
        noun = keys.objective.noun if keys.reads_chats else "documents"
        items = packing.Documents(files, length, keys.long_chats == "cut")
        if keys.reads_chats:
            digest += f" {sets[0].manifest['chats']['made_by']['template']} {keys.long_chats}"
    elif entry.cached:
        _check_lengths(entry.name, files, length)
        items = WholeRows(files)
    else:
        separate = keys.separate_documents and sum(map(len, files)) > 1
        items = StreamRows(TokenStream(files), length, keys.vocab_size, separate)
    if not len(items):
        raise ConfigError(
            f"{entry.name} has not one row of max_target_length + 1 = {length + 1} tokens; give "
            "more data or shorter rows"
        )
    digest = digest if sets else _hash_files(files, items)
    return Part(entry.name, entry.weight, items, digest, noun)


def _hash_files(files: Sequence[MegatronFile], rows: StreamRows) -> str:
    """Hashes the sizes, where documents begin, and evenly spaced rows: all would take hours."""
    text = f"{len(rows)} {sum(file.num_bytes for file in files)}"
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    for file in files:
        digest.update(file.index)
    for index in np.unique(np.linspace(0, len(rows) - 1, _SAMPLED).astype(np.int64)):
        tokens = rows[int(index)].tokens
        digest.update(f"{len(tokens)} ".encode() + tokens.tobytes())
    return digest.hexdigest()


def _check_lengths(name: str, files: Sequence[MegatronFile], length: int) -> None:
    """Refuses rows of another length than `length` + 1 tokens, naming the first."""
    lengths = np.concatenate([file.lengths() for file in files])
    for record in np.flatnonzero(lengths != length + 1)[:1]:
        raise ConfigError(
            f"{name}: record {record} has {lengths[record]} tokens, but a row takes "
            f"max_target_length + 1 = {length + 1}; use max_target_length={lengths[record] - 1}, "
            "or prepare the files with maxramp.prepare, which takes any length"
        )


def _check_ids(keys: DataKeys, name: str, largest: int, files: Sequence[MegatronFile]) -> None:
    """Refuses files whose `largest` id is outside the vocabulary, by the name of the record, for
    which it reads them again."""
    if largest < keys.vocab_size:
        return
    documents = Chain(files)
    record = next(i for i in range(len(documents)) if largest in documents[i])
    raise ConfigError(
        f"{name}: record {record} has token id {largest}, which is not below "
        f"vocab_size={keys.vocab_size}; use the vocab_size of its tokenizer"
    )


def _check_counts(keys: DataKeys, train: Sequence[Part], held_out: Sequence[Part]) -> None:
    """Refuses a part without items to train on, and an evaluation without any held out."""
    for part in train:
        if not len(part.items):
            raise ConfigError(
                f"{NAMES[keys.dataset_type][0]}: {part.name} has no {part.noun} left to train on; "
                "give more data, or a smaller eval_fraction"
            )
    if keys.eval_interval != -1 and not any(len(part.items) for part in held_out):
        most = max(len(part.items) for part in train if part.weight)
        digits = len(str(most - 1))
        # 1 / most, rounded up to as many digits: the largest part holds out at least one item.
        least = -(-(10**digits) // most) / 10**digits
        larger = f", eval_fraction={least:g}" if most > 1 else ""
        raise ConfigError(
            f"eval_interval={keys.eval_interval}, but eval_fraction={keys.eval_fraction} of "
            f"{sum(len(part.items) for part in train)} {train[0].noun} holds none out; give "
            f"grain_eval_files{larger}, or eval_interval=-1"
        )


def _lay_out(data: DataKeys, sources: Corpus) -> Corpus:
    """Lays the documents of all parts into rows; a ConfigError if one that is trained on or
    evaluated predicts nothing."""
    length = data.max_target_length
    separate = data.objective.chats > 1 or (data.packing and data.separate_documents)
    name = data.packing and data.grain_packing_type
    lay_out = packing.LAYOUTS[name or "one_per_row"]
    if name == "concat_then_split":
        lay_out = partial(lay_out, separate=separate)

    def make_rows(part: Part, counts: np.ndarray) -> Part:
        packed = packing.PackedRows(part.items, lay_out(counts[:, 0], length), length, separate)
        digest = hash_of([part.hash, part.rows_id])
        rows_id = hash_of([digest, length, separate, name])
        return Part(part.name, part.weight, packed, digest, rows_id=rows_id)

    counts = [part.items.counts() for part in sources.train]
    train = list(map(make_rows, sources.train, counts))
    documents = np.concatenate(counts)
    left_out = _describe_left_out(documents)
    for part in train:
        if not len(part.items):
            why = left_out or "no document has two tokens"
            raise ConfigError(f"{part.name}: nothing to predict: {why}")
    held_out = []
    for part in sources.held_out:
        counts = part.items.counts()
        rows = make_rows(part, counts)
        if data.eval_interval == -1:  # the hash of the data does not depend on that
            rows = dataclasses.replace(rows, items=())
        elif not len(rows.items):
            number = count(len(counts), part.noun.removesuffix("s"))
            why = _describe_left_out(counts) or "none has two tokens"
            raise ConfigError(
                f"{_held_out_key(data, part.name)} holds out {number}, and nothing to predict: "
                f"{why}; hold out others, or use eval_interval=-1"
            )
        held_out.append(rows)
    num_rows = sum(len(part.items) for part in train)
    full = sum(part.items.num_tokens for part in train) / num_rows / (length + 1)
    layout = f", in {num_rows} rows, {full:.1%} full"
    if data.reads_chats:
        tokens, targets = documents[:, :2].sum(0, dtype=np.int64)
        layout += f", {targets / tokens:.1%} of the tokens are targets"
    layout += f"; left out: {left_out}" if left_out else ""
    return Corpus(train, held_out, f"{layout}{sources.description}", separate)


def _describe_left_out(counts: np.ndarray) -> str:
    """Says how many documents are left out and why, from their counts (of `Documents.counts`)."""
    numbers = np.bincount(counts[:, 2], minlength=len(LEFT_OUT))
    return ", ".join(f"{n} {why}" for n, why in zip(numbers, LEFT_OUT, strict=True) if n and why)


def _held_out_key(data: DataKeys, name: str) -> str:
    if name:
        return f"eval_sets.{name}={data.eval_sets[name]}"
    for key in ("grain_eval_files", "hf_eval_split"):
        if value := getattr(data, key):
            return f"{key}={value}"
    return f"eval_fraction={data.eval_fraction}"
