"""The log-probabilities of pairs under the weights that a run begins with, made once.

They are kept in the run's folder, a line for each row of the data: the rows of its parts one after
another, then those that are held out. What was made before a kill is not made again. The first line
says which weights they are of, by their hash: a run stays near to the same ones to its end. Where
adapters are trained, they are of the model below them.

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
    """The corpus with the log-probabilities of its pairs, made where there are none; on all
    processes. Raises Stopped where somebody asks for the end.
    """
    parts = [*corpus.train, *corpus.held_out]
    sequences = [part.items for part in parts]
    ends = np.cumsum([len(rows) for rows in sequences])
    total, path = int(ends[-1]), job.config.checkpoints.load_parameters_path
    said, log_probs = agreement.decide_on_first(lambda: _read(job.output.here / FILE))
    done_N2 = np.array(log_probs, np.float32).reshape(-1, 2)[:total]
    so_far = job.known_reference
    if said.get("data") != corpus.hash or (so_far and said["reference"] != so_far):
        said = {}  # of other pairs, or put there from elsewhere
    # Before the first checkpoint, a run begins with the weights as they are now.
    if not so_far or said.get("weights") != path or len(done_N2) < total:
        begin, tell = time.monotonic(), Throttle(job.output.say)
        abstract = abstract_state(job.config.recipe, expansion.mesh_of(_spec(job)))
        model = job.load_reference(abstract.model)
        found = job.checkpoints.reference
        made = [done_N2 if said.get("reference") == found else done_N2[:0]]
        first = done = len(made[0])
        with contextlib.ExitStack() as closing:
            if is_first := jax.process_index() == 0:
                head = _line(_HEAD, (found, path, corpus.hash))
                write_whole(file := job.output.here / FILE, b"".join([head, *_lines(0, made[0])]))
                growing = closing.enter_context(contextlib.closing(Appending(file)))
            for new_n2 in _log_probs(job, sequences, first, model, expansion):
                for line in _lines(done, new_n2) if is_first else ():
                    growing.append(line)
                made.append(new_n2)
                done += len(new_n2)
                tell(f"pairs    {done:,} of {total:,} have their log-probabilities")
                job.pause()
        done_N2 = np.concatenate(made)
        if first < total:
            job.output.say(
                f"pairs    log-probabilities of {count(total - first, 'pair')} under {path} (hash "
                f"{found}) in {time.monotonic() - begin:.0f}s"
            )
    else:
        job.checkpoints.reference = so_far
    job.checkpoints.evaluations["eval_reference"] = job.checkpoints.reference
    known = map(WithReference, sequences, np.split(done_N2, ends[:-1]))
    found = tuple(map(lambda part, items: dataclasses.replace(part, items=items), parts, known))
    count_of_train = len(corpus.train)
    return dataclasses.replace(
        corpus, train=found[:count_of_train], held_out=found[count_of_train:]
    )


def _log_probs(
    job: Job, sequences: Sequence[Any], first: int, model: Decoder, expansion: Expansion
) -> Iterator[np.ndarray]:
    """The log-probabilities of all rows from one on, batch by batch: float32 [n, 2]."""
    rows = Chain(sequences)[first:]
    if not len(rows):
        return
    spec = _spec(job)
    recipe = job.config.recipe.with_spec(spec)

    def find(model: Decoder, batch: Batch) -> jax.Array:
        micro_batch = jax.tree.map(lambda x_AB: x_AB[0], expansion.gather(batch))
        weights = model.cast(recipe.model.dtype)
        log_p_B2, _ = answer_log_probs(recipe.loss, recipe.model, weights, micro_batch)
        return jax.reshard(log_p_B2, REPLICATED)

    program = Jitted(expansion.mesh_of(spec), find)
    with contextlib.closing(read_all(rows, spec, expansion, job.config.reading)) as batches:
        for number, batch in enumerate(batches):
            yield np.asarray(program(model, batch))[: len(rows) - number * spec.rows]


def _spec(job: Job) -> StageSpec:
    stage = job.schedule.ramp.stage_at_step(job.schedule.first_step).spec
    fields = text_fields(stage.tokens, separate=True)
    return dataclasses.replace(stage.resize(1, stage.rows), fields=fields)


def _read(path: pathlib.Path) -> tuple[dict[str, Any], list[Any]]:
    """What the file says, but for the line that a kill has torn: its first line, and the
    log-probabilities of the first rows."""
    said, log_probs = {}, []
    lines = path.read_bytes().splitlines() if path.exists() else []
    with contextlib.suppress(ValueError, LookupError, TypeError):
        for number, line in enumerate(lines, -1):
            value = json.loads(line)
            if number < 0:
                said = {name: value[name] for name in _HEAD}
                continue
            row, *pair = (value[name] for name in _PAIR)
            if row != number:
                break
            log_probs.append([float(x) for x in pair])
    return said, log_probs


def _lines(row: int, log_probs_n2: np.ndarray) -> Iterator[bytes]:
    """Those of rows from one on."""
    for number, pair in enumerate(log_probs_n2.tolist(), row):
        yield _line(_PAIR, (number, *pair))


def _line(names: Sequence[str], values: Sequence[Any]) -> bytes:
    return json.dumps(dict(zip(names, values, strict=True))).encode() + b"\n"
