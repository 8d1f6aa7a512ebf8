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
from maxramp.data.row import Row
from maxramp.data.rows import Chain
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
    said, log_probs, size = agreement.decide_on_first(lambda: _read(job.output.here / FILE))
    done_N2 = np.array(log_probs, np.float32).reshape(-1, 2)[:total]
    so_far = job.known_reference
    if said.get("data") != corpus.hash or (so_far and said["reference"] != so_far):
        said = {}  # of other pairs, or put there from elsewhere
    # Before the first checkpoint, a run begins with the weights as they are now.
    if not so_far or said.get("weights") != path or len(done_N2) < total:
        begin = time.monotonic()
        mesh = expansion.mesh_of(_spec(job))
        model = job.load_reference(abstract_state(job.config.recipe, mesh).model)
        found = job.checkpoints.reference
        if said.get("reference") != found:
            done_N2, size = done_N2[:0], 0
        head = dict(zip(_HEAD, (found, path, corpus.hash), strict=True))
        made, tell = [done_N2], Throttle(job.output.say)
        with contextlib.ExitStack() as closing:
            write = closing.enter_context(_writing(job, head, size))
            for new_n2 in _log_probs(job, sequences, len(done_N2), model, expansion):
                write(sum(map(len, made)), new_n2)
                made.append(new_n2)
                tell(f"pairs    {sum(map(len, made)):,} of {total:,} have their log-probabilities")
                job.pause()
        done_N2 = np.concatenate(made)
        if new := total - len(made[0]):
            job.output.say(
                f"pairs    log-probabilities of {count(new, 'pair')} under {path} (hash {found}) "
                f"in {time.monotonic() - begin:.0f}s"
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
    program = _program(job, spec, expansion)
    with contextlib.closing(read_all(rows, spec, expansion, job.config.reading)) as batches:
        for number, batch in enumerate(batches):
            yield np.asarray(program(model, batch))[: len(rows) - number * spec.rows]


def _spec(job: Job) -> StageSpec:
    stage = job.span.ramp.stage_at_step(job.span.first_step).spec
    fields = text_fields(stage.tokens, separate=True)
    return dataclasses.replace(stage.resize(1, stage.rows), fields=fields)


def _program(job: Job, spec: StageSpec, expansion: Expansion) -> Jitted:
    recipe = job.config.recipe.with_spec(spec)

    def find(model: Decoder, batch: Batch) -> jax.Array:
        micro_batch = jax.tree.map(lambda x_AB: x_AB[0], expansion.gather(batch))
        weights = model.cast(recipe.model.dtype)
        log_p_B2, _ = answer_log_probs(recipe.objective, recipe.model, weights, micro_batch)
        return jax.reshard(log_p_B2, REPLICATED)

    return Jitted(expansion.mesh_of(spec), find)


def _read(path: pathlib.Path) -> tuple[dict[str, Any], list[Any], int]:
    """What the file has: its first line, the log-probabilities of the first rows, and
    the bytes of the lines that are whole."""
    said, log_probs, size = {}, [], 0
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, -1):
        try:
            value = json.loads(line)
            first, *others = (value[name] for name in (_HEAD if number < 0 else _PAIR))
            pair = [] if number < 0 else [[float(x) for x in others]]
        except (ValueError, LookupError, TypeError):
            break
        if not line.endswith(b"\n") or number not in (-1, first):  # torn by a kill
            break
        said, size = said or value, size + len(line)
        log_probs += pair
    return said, log_probs, size


@contextlib.contextmanager
def _writing(job: Job, head: dict[str, Any], size: int) -> Iterator[Any]:
    """What appends log-probabilities from a row on to the file, cut to a size; on process 0."""
    if jax.process_index():
        yield lambda row, log_probs_n2: None
        return
    path = job.output.here / FILE
    if not size:
        path.write_bytes(json.dumps(head).encode() + b"\n")
    else:
        with path.open("r+b") as file:
            file.truncate(size)
    file = Appending(path)

    def write(row: int, log_probs_n2: np.ndarray) -> None:
        for number, (chosen, rejected) in enumerate(log_probs_n2.tolist(), row):
            line = dict(zip(_PAIR, (number, chosen, rejected), strict=True))
            file.append(json.dumps(line).encode() + b"\n")

    with contextlib.closing(file):
        yield write
