"""Tokenizes documents into a data set for training, whose rows are read by number.
If it is interrupted, run the same command again to continue.

python -m maxramp.prepare INPUT... --output DIR [--train_bpe SIZE] [key=value ...]
python -m maxramp.prepare hf_path=NAME --output DIR [--train_bpe SIZE] [key=value ...]
python -m maxramp.prepare CHATS... --output DIR use_sft=true tokenizer_path=FOLDER [key=value ...]
python -m maxramp.prepare --inspect DIR [max_target_length=T] [separate_documents=False]
python -m maxramp.prepare --inspect CHATS use_sft=true tokenizer_path=FOLDER/tokenizer.json
python -m maxramp.prepare --inspect CONFIG.yml [key=value ...]
"""

if __name__ == "__main__":  # before the imports that take a second
    import sys

    from maxramp import console

    if any(argument.partition("=")[0] == "--inspect" for argument in sys.argv):
        console.end_with_readers()
    else:
        console.outlive_readers()

import argparse
import dataclasses
import functools
import itertools
import math
import os
import pathlib
import re
import shlex
import signal
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import Any

from maxramp.commandline import Parser, command, count, print_note
from maxramp.config.load import load
from maxramp.config.resolve import data_values
from maxramp.data import preparation, tokenizers
from maxramp.data.chats.chats import ChatEncoder
from maxramp.data.corpus import hash_of
from maxramp.data.files import prepared
from maxramp.data.files.records import RecordFile
from maxramp.data.keys import MARK_KEYS, ChatKeys, DataKeys
from maxramp.data.mixtures import escape_path, find_files, open_files
from maxramp.data.shards import LIST, Preparation, describe_reading
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import EXIT_FAILED, ConfigError
from maxramp.files import place, storage
from maxramp.keys.base import CONFIGS, base
from maxramp.keys.section import is_address, refuse

KEYS = (
    *("tokenizer_type", "tokenizer_path", *MARK_KEYS, "train_data_columns", "tokenize_train_data"),
    *("grain_file_type", "hf_path", "hf_name", "train_split"),
    # Of chats; which of them fit into a row is for the run to say.
    *(name for name in ChatKeys.names() if name != "long_chats"),
)
INSPECTION_KEYS = (
    *("max_target_length", "separate_documents", "tokenizer_path", "grain_file_type"),
    "data_cache_dir",
    *ChatKeys.names(),
)

_BPE_BYTES = 1 << 30  # of text that a BPE is trained on, at most
_say = functools.partial(print, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(__doc__)
    parser.epilog = textwrap.fill(f"Keys, as in configs/base.yml: {', '.join(KEYS)}.")
    add = parser.add_argument
    add("inputs", nargs="*", metavar="INPUT", help="file, glob or URL; or key=value")
    add("--output", metavar="DIR", help="folder to write the prepared set to")
    add("--train_bpe", type=int, metavar="SIZE", help="train a byte-level BPE of SIZE ids first")
    text = "write its tokenizer.json to DIR and nothing else, for several sets (tokenizer_path=)"
    add("--tokenizer_only", action="store_true", help=text)
    text = "processes (one per core; for less than 32 MB none)"
    add("--workers", type=int, metavar="N", help=text)
    text = "megabytes of input per shard (128)"
    add("--shard_megabytes", type=float, metavar="N", default=128, help=text)
    text = "leave out up to N records that cannot be read (0)"
    add("--max_bad_records", type=int, metavar="N", default=0, help=text)
    add("--deduplicate", action="store_true", help="leave out documents that equal an earlier one")
    text = "show documents and rows of a prepared set, a file of chats, or a config's data"
    add("--inspect", metavar="DIR", help=text)
    return parser


@command
def main(arguments: list[str]) -> int:
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        options = _parser().parse_intermixed_args(arguments)
        keys = [x for x in options.inputs if re.match(r"\w+=", x) and not storage.find(x)]
        names = [text for text in options.inputs if text not in keys]
        if options.inspect:
            _inspect(options.inspect, keys)
        else:
            _check(options, names or [text for text in keys if text.startswith("hf_path=")])
            work = _write_tokenizer if options.tokenizer_only else prepare
            work(options, names, _load_keys(keys, "preparing", KEYS))
    except KeyboardInterrupt:
        print("stopped; run the same command again to continue", file=sys.stderr)
        return EXIT_FAILED
    return 0


def _inspect(named: str, arguments: list[str]) -> None:
    """Shows a prepared set, files of chats or pairs, or what a config (.yml) trains on of these; a
    ConfigError for others."""
    if named.endswith((".yml", ".yaml")):
        config = load([named, *arguments], "train")
        keys = config.replace(**data_values(config)).data
        if keys.dataset_type != "grain" or (";" in keys.grain_train_files and not keys.reads_chats):
            raise ConfigError(
                f"{named} trains on dataset_type={keys.dataset_type} "
                f"grain_train_files={keys.grain_train_files}: --inspect shows chats, pairs, or one "
                "prepared set; name that"
            )
        named = keys.grain_train_files
    else:
        keys = _load_keys(arguments, "inspecting", INSPECTION_KEYS)
    is_set = prepared.is_prepared(named)
    if not is_set and not keys.reads_chats and storage.exists(named):
        raise ConfigError(
            f"{named} is not a prepared set: give use_sft=true (chats) or use_dpo=true (pairs); "
            "without them --inspect reads a prepared set"
        )
    # Imports jax, which a preparation does not.
    from maxramp.data.inspection import inspect, inspect_chats

    (inspect_chats if keys.reads_chats and not is_set else inspect)(named, keys)


def _write_tokenizer(options: argparse.Namespace, names: Sequence[str], keys: DataKeys) -> None:
    """Trains a tokenizer and writes it to --output; a ConfigError if that has one."""
    file = place.place(options.output) / "tokenizer.json"
    if file.exists() or prepared.is_prepared(options.output):
        raise ConfigError(f"--output {options.output} has a tokenizer already; give another folder")
    inputs = _open_inputs(names, keys)
    _open_tokenizer(options.train_bpe, keys, inputs)
    _train_bpe(options, file, inputs)
    size = tokenizers.load("huggingface", str(file), **keys.mark_keys).vocab_size
    if size < options.train_bpe:
        print_note(f"{size} ids in place of {options.train_bpe}: the texts have no more pairs")
    _say(f"wrote      {file}; prepare with tokenizer_path={shlex.quote(str(file))}")


def _check(options: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuses options that do not fit each other, before anything is read."""
    needed = (("INPUT", names), ("--output DIR", options.output))
    usage = "given: python -m maxramp.prepare INPUT... --output DIR"
    refuse((not value, f"no {flag} {usage}") for flag, value in needed)
    alone = options.tokenizer_only and not options.train_bpe
    refuse([(alone, "--tokenizer_only trains a tokenizer: give --train_bpe SIZE too")])
    both = options.tokenizer_only and options.deduplicate
    refuse([(both, "--deduplicate with --tokenizer_only: no documents are written; leave it out")])
    above_zero = (
        ("workers", 1 if options.workers is None else options.workers, "above 0"),
        ("shard_megabytes", options.shard_megabytes * 1e6, "above 0"),
        ("max_bad_records", options.max_bad_records + 1, "0 or more"),
    )
    refuse(
        (not 0 < value < math.inf, f"--{flag} {getattr(options, flag)} must be {least} and finite")
        for flag, value, least in above_zero
    )
    if is_address(options.output):
        raise ConfigError(f"--output {options.output} must be a local folder; copy it afterwards")
    escape_path("--output", options.output)


def _load_keys(arguments: list[str], doing: str, known: Sequence[str]) -> DataKeys:
    """Returns the keys of the data for the arguments NAME=VALUE, a ConfigError for others than
    `known`."""
    from_hub = any(argument.startswith("hf_path=") for argument in arguments)
    source = ["dataset_type=hf"] if from_hub else ["dataset_type=grain", "grain_train_files=INPUT"]
    # Which chats have, and pairs; nothing is packed here.
    source += ["grain_packing_type=best_fit", "packing=False"]
    config = load([str(CONFIGS / "base.yml"), *source, *arguments], "prepare")
    listed = f"{doing} takes only {', '.join(known)}"
    refuse((text.partition("=")[0] not in known, f"{text}: {listed}") for text in arguments)
    keys = config.replace(**data_values(config)).data
    no_marks = {"add_bos": False, "add_eos": False}  # chats have their template's
    return dataclasses.replace(keys, **no_marks) if keys.reads_chats else keys


def _open_inputs(names: Sequence[str], keys: DataKeys) -> list[RecordFile]:
    """Opens all inputs, of tokens or of texts; a ConfigError for both at once, and for prepared
    sets."""
    files = open_files(keys, "hf", [keys.train_split]) if keys.hf_path else []
    for name in names:
        kind, paths = find_files("INPUT", name, keys.grain_file_type)
        if kind == "prepared":
            raise ConfigError(f"INPUT: {name} is a prepared set; train on it as it is")
        opened = open_files(keys, kind, paths)
        if kind == "megatron" and keys.reads_chats:
            raise ConfigError(f"INPUT: {name} holds tokens, and {keys.reads_chats} reads chats")
        files += opened
    if len({file.tokens for file in files}) > 1:
        raise ConfigError("INPUT: Megatron's files hold tokens and the others text; prepare each")
    return files


def _open_tokenizer(
    bpe_size: int | None, keys: DataKeys, inputs: Sequence[RecordFile]
) -> Tokenizer | None:
    """Opens the tokenizer; None where one is to be trained (of `bpe_size`), or the inputs, at least
    one, hold tokens. Refuses keys that do not go with that."""
    kind, path, training = keys.tokenizer_type, keys.tokenizer_path, bpe_size is not None
    tokens, flag = inputs[0].tokens, f"--train_bpe {bpe_size}"
    named = f"tokenizer_path={path}" if path else ""
    if training:
        named = flag
    refuse(
        [
            (tokens and named, f"{named}: the inputs hold no text but tokens; leave it out"),
            (
                training and (path or kind != "bytes"),
                f"{flag} trains a tokenizer, and the keys name another, {path or kind}; leave one "
                "of them out",
            ),
            (training and bpe_size < 258, f"{flag} must be 258 or more: 256 bytes, begin and end"),
        ]
    )
    return None if tokens or training else tokenizers.load(kind, path, **keys.mark_keys)


def prepare(options: argparse.Namespace, names: Sequence[str], keys: DataKeys) -> None:
    """Makes the set, or says that it is there; a ConfigError if another one is. `options` are those
    that `_check` lets pass."""
    start = time.perf_counter()
    output = place.place(options.output)
    files = _open_inputs(names, keys)
    tokenizer = _open_tokenizer(options.train_bpe, keys, files)
    bpe = _bpe_name(options.train_bpe, files)
    encoder = ChatEncoder(tokenizer, keys) if keys.reads_chats else None
    refuse([(encoder and options.deduplicate, "--deduplicate compares documents, not chats")])
    work = Preparation(
        output,
        label=f"--output {options.output}",
        name="the inputs",
        files=files,
        how=describe_reading(tokenizer.hash if tokenizer else f"{bpe} {keys.mark_keys}", encoder),
        tokenizer=tokenizer,
        encoder=encoder,
        deduplicate=options.deduplicate,
        allowed=options.max_bad_records,
        shard_size=max(1, int(options.shard_megabytes * 1e6)),
        workers=options.workers,
    )
    with work.lock():
        if work.is_prepared:
            manifest = _check_prepared(work)
        else:
            if bpe:
                file = work.work / f"{bpe}.json"
                _train_bpe(options, file, files)
                tokenizer = tokenizers.load("huggingface", str(file), **keys.mark_keys)
                work = dataclasses.replace(work, tokenizer=tokenizer)
            if tokenizer:
                _say(f"tokenizer  {tokenizer.describe()}")
            done = len(work.finished_shards())
            earlier = f", {done} of them made by an earlier start" if done else ""
            _say(
                f"input      {count(len(files), 'file')}, {work.size / 1e6:,.1f} MB, in "
                f"{count(len(work.shards), 'shard')}{earlier}"
            )
            with preparation.progress(work.size) as show:
                manifest = preparation.make(work, show)
    seconds = time.perf_counter() - start
    _say(f"done       {prepared.describe(manifest)} in {seconds:.1f}s (hash {manifest['hash']})")
    _say_what_follows(manifest, output, keys)


def _check_prepared(work: Preparation) -> dict[str, Any]:
    """Returns the manifest of a finished set; a ConfigError if it is not of these inputs, or leaves
    out more records than allowed."""
    manifest = prepared.read_manifest(str(work.folder))
    left_out = manifest.get("bad_records", 0)
    if manifest["source"] != work.source:
        raise ConfigError(
            f"{work.label} holds a set of other inputs, or read in another way; give another "
            "folder, or remove it"
        )
    if left_out > work.allowed:
        raise ConfigError(
            f"{work.label} is prepared already and leaves out {count(left_out, 'bad record')}, "
            f"which --max_bad_records {left_out} allows"
        )
    _say(f"{work.folder} is prepared already")
    return manifest


def _bpe_name(size: int | None, files: Sequence[RecordFile]) -> str:
    """Returns a name by size and names of inputs, as one that was repaired keeps the tokenizer."""
    names = [(os.path.basename(file.data_path), file.column) for file in files]
    return f"bpe-{hash_of((size, names))}" if size else ""


def _train_bpe(options: argparse.Namespace, file: pathlib.Path, inputs: list[RecordFile]) -> None:
    """Trains a BPE on about 1 GiB of the texts and writes it to `file`, unless an earlier start
    did; a ConfigError if there are none, or more bad records than --max_bad_records."""
    if file.exists():
        _say(f"tokenizer  {file} is there from an earlier start")
        return
    start = time.perf_counter()
    texts = preparation.sample_texts(inputs, _BPE_BYTES, options.max_bad_records)
    first = next(filter(None, texts), "")
    if not first:
        raise ConfigError(
            f"--train_bpe {options.train_bpe}: the inputs hold no text to train it on"
        )
    trained = tokenizers.train_bpe(itertools.chain([first], texts), options.train_bpe)
    file.parent.mkdir(parents=True, exist_ok=True)
    place.write_whole(file, trained)
    _say(f"tokenizer  trained in {time.perf_counter() - start:.1f}s")


def _say_what_follows(manifest: dict[str, Any], output: pathlib.Path, keys: DataKeys) -> None:
    for kind, what, see in (
        ("bad_records", "bad record", f", listed in {output / LIST}"),
        ("duplicates", "document", " that an earlier one equals"),
    ):
        if left_out := manifest.get(kind, 0):
            _say(f"left out   {count(left_out, what)}{see}")
    for line in prepared.describe_left_out(manifest):
        _say(f"left out   {line}")
    entry = shlex.quote(escape_path("--output", str(output)))
    name = shlex.quote(output.resolve().name)
    config = f"configs/base.yml run_name={name} dataset_type=grain"
    sizes = f"vocab_size={prepared.vocab_size_for(manifest)}"
    if keys.reads_chats:
        config = f"{keys.objective.example} run_name={name}"
        own = {name: getattr(keys, name) for name in ChatKeys.names() if name[:4] != "use_"}
        own = [f"{name}={value}" for name, value in own.items() if value != base()[name]]
        sizes = shlex.join(["load_parameters_path=MODEL", *own])
    _say(f"train      python -m maxramp.train {config} grain_train_files={entry} {sizes}")


if __name__ == "__main__":
    sys.exit(main())
