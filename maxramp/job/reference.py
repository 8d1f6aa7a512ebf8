"""The log-probabilities of pairs under the weights that a run begins with, computed once.

The run's folder keeps them in a file, a line for each row of the data: the rows of its parts one
after another, then those that are held out. After a kill the next start computes the rest. The
first line has the hash of the weights: a run stays near to the same ones to its end. Where adapters
are trained, these are the weights of the model below them.

Shapes: N rows.
"""

import contextlib
import dataclasses
import json
import pathlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from maxramp.commandline import Throttle, count
from maxramp.data.batch import Batch
from maxramp.data.corpus import Corpus
from maxramp.data.loader import read_all
from maxramp.data.relay import Expansion
from maxramp.data.rows import Chain, Row
from maxramp.files.place import write_whole
from maxramp.files.run_folder import Appending
from maxramp.job.start import Job
from maxramp.model.decoder import Decoder
from maxramp.parallel.mesh import Jitted
from maxramp.parallel.sharding import REPLICATED
from maxramp.processes import agreement
from maxramp.run.metrics import read_lines
from maxramp.stage import StageSpec, text_fields
from maxramp.training.preferences import answer_log_probs
from maxramp.training.state import abstract_state

FILE = "reference.jsonl"
_HEAD, _PAIR = ("reference", "weights", "data"), ("row", "chosen", "rejected")  # of its lines


class WithReference:
    """Rows with their log-probabilities."""

    def __init__(self, rows: Sequence[Row], log_probs_N2: np.ndarray):
        self._rows, self._log_probs_N2 = rows, log_probs_N2

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]._replace(reference_log_probs=self._log_probs_N2[index])


def add_reference(job: Job, corpus: Corpus, expansion: Expansion) -> Corpus:
    """Adds to a corpus of pairs their log-probabilities: those in the run's folder, and the others
    computed. Called on all processes; raises Stopped where somebody asks for the end, and as
    `Job.load_reference`."""
    parts = [*corpus.train, *corpus.held_out]
    sequences = [part.items for part in parts]
    ends = np.cumsum([len(rows) for rows in sequences])
    path, so_far = job.config.checkpoints.load_parameters_path, job.known_reference
    head, log_probs = agreement.decide_on_first(lambda: _read(job.output.local / FILE))
    if head.get("data") != corpus.hash or (so_far and head["reference"] != so_far):
        head, log_probs = {}, []  # of other pairs, or put there from elsewhere
    log_probs_N2 = np.array(log_probs, np.float32).reshape(-1, 2)[: ends[-1]]
    if so_far and head.get("weights") == path and len(log_probs_N2) == ends[-1]:
        job.checkpoints.keep_reference(so_far)
    else:  # before the first checkpoint, a run begins with the weights as they are now
        model = job.load_reference(abstract_state(job.config.recipe, _mesh(job, expansion)).model)
        if head.get("reference") != job.checkpoints.reference:
            log_probs_N2 = log_probs_N2[:0]
        log_probs_N2 = _compute_rest(job, corpus.hash, sequences, log_probs_N2, model, expansion)
    with_reference = [
        dataclasses.replace(part, items=WithReference(part.items, part_N2))
        for part, part_N2 in zip(parts, np.split(log_probs_N2, ends[:-1]), strict=True)
    ]
    num_train = len(corpus.train)
    return dataclasses.replace(
        corpus, train=tuple(with_reference[:num_train]), held_out=tuple(with_reference[num_train:])
    )


def _compute_rest(
    job: Job,
    data_hash: str,
    sequences: Sequence[Any],
    known_n2: np.ndarray,
    model: Decoder,
    expansion: Expansion,
) -> np.ndarray:
    """Computes the log-probabilities of the rows after the first n, which `known_n2` has, and
    writes all to the run's folder as they come; returns all. Raises Stopped as `Job.pause`.
    """
    begin, tell = time.monotonic(), Throttle(job.output.say)
    path, reference = job.config.checkpoints.load_parameters_path, job.checkpoints.reference
    blocks, done, total = [known_n2], len(known_n2), sum(map(len, sequences))
    with contextlib.ExitStack() as closing:
        if is_first := jax.process_index() == 0:
            file, head = job.output.local / FILE, _line(_HEAD, (reference, path, data_hash))
            write_whole(file, b"".join([head, *_lines(0, known_n2)]))
            growing = closing.enter_context(contextlib.closing(Appending(file)))
        for block_n2 in _log_probs(job, sequences, done, model, expansion):
            for line in _lines(done, block_n2) if is_first else ():
                growing.append(line)
            blocks.append(block_n2)
            done += len(block_n2)
            tell(f"pairs    {done:,} of {total:,} have their log-probabilities")
            job.pause()
    if missing := total - len(known_n2):
        job.output.say(
            f"pairs    log-probabilities of {count(missing, 'pair')} under {path} (hash "
            f"{reference}) in {time.monotonic() - begin:.0f}s"
        )
    return np.concatenate(blocks)


def _log_probs(
    job: Job, sequences: Sequence[Any], first: int, model: Decoder, expansion: Expansion
) -> Iterator[np.ndarray]:
    """Yields the log-probabilities (chosen, rejected) of the rows from `first` on, by batches:
    float32 [n, 2]. To be called on all processes."""
    rows = Chain(sequences)[first:]
    if not len(rows):
        return
    spec = _spec(job)
    recipe = job.config.recipe.with_spec(spec)

    def compute(model: Decoder, batch: Batch) -> jax.Array:
        micro_batch = jax.tree.map(lambda x_AB: x_AB[0], expansion.gather(batch))  # A = 1
        weights = model.cast(recipe.model.dtype)
        log_p_B2, _ = answer_log_probs(recipe.loss, recipe.model, weights, micro_batch)
        return jax.reshard(log_p_B2, REPLICATED)

    program = Jitted(_mesh(job, expansion), compute)
    with contextlib.closing(read_all(rows, spec, expansion, job.config.reading)) as batches:
        for number, batch in enumerate(batches):
            yield np.asarray(program(model, batch))[: len(rows) - number * spec.rows]


def _mesh(job: Job, expansion: Expansion) -> Mesh:
    return expansion.mesh_of(_spec(job))


def _spec(job: Job) -> StageSpec:
    stage = job.schedule.ramp.stage_at_step(job.schedule.first_step).spec
    fields = text_fields(stage.tokens, separate=True)
    return dataclasses.replace(stage.resize(1, stage.rows), fields=fields)


def _read(path: pathlib.Path) -> tuple[dict[str, Any], list[Any]]:
    """Reads the first line of the file, and the log-probabilities of the first rows; {} and [] if
    it is missing. Leaves out the line that a kill has torn."""
    head, log_probs = {}, []
    with contextlib.suppress(ValueError, LookupError, TypeError):
        for number, value in enumerate(read_lines(path), -1):
            if number < 0:
                head = {name: value[name] for name in _HEAD}
                continue
            row, *pair = (value[name] for name in _PAIR)
            if row != number:
                break
            log_probs.append([float(x) for x in pair])
    return head, log_probs


def _lines(row: int, log_probs_n2: np.ndarray) -> Iterator[bytes]:
    """Makes the lines of rows from number `row` on."""
    for number, pair in enumerate(log_probs_n2.tolist(), row):
        yield _line(_PAIR, (number, *pair))


def _line(names: Sequence[str], values: Sequence[Any]) -> bytes:
    return json.dumps(dict(zip(names, values, strict=True))).encode() + b"\n"
