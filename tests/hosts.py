"""A job of several processes on this machine, for the tests: what its loader hands out.

Started by test_hosts.py, once per process: python tests/hosts.py REQUESTS, a JSON list of
[first step, arguments of maxramp.train]. Prints for each, as one line of JSON: the fingerprint of
every step from the first step on and of every evaluation batch, the bytes that the expansion moves
in each step by the compiled program, and what this process reads.
"""

import functools
import json
import re
import sys

import jax
import numpy as np

from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.data.loader import Loader
from maxramp.data.opening import open_rows
from maxramp.data.relay import Expansion
from maxramp.model.parts.weights import fingerprint_of_weights
from maxramp.parallel import mesh as mesh_lib
from maxramp.processes import backend
from maxramp.processes.ending import end_process
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.stage import text_fields

_MOVE = re.compile(
    r"[su]32\[([\d,]+)\]\S* collective-permute(?:-start)?\("
    r".*source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}"
)


def moved_bytes(program: str) -> int:
    """Bytes that the collective permutes of a compiled program carry between devices."""
    assert not re.search(r" all-(gather|to-all)", program)
    return sum(
        4 * int(np.prod([int(n) for n in shape.split(",")])) * pairs.count("{")
        for shape, pairs in _MOVE.findall(program)
    )


def serve(first_step: int, loaded) -> dict:
    config = resolve(loaded, jax.device_count(), 1, jax.process_count())
    mesh = mesh_lib.make_mesh(config.mesh)
    with jax.set_mesh(mesh):
        expansion = Expansion(mesh, config.data.expansion_factor_real_data)
        corpus = open_rows(config.data, expansion.reads)
        fields = functools.partial(text_fields, separate=corpus.packed)
        ramp = RampupBatchManager(config.batch, jax.device_count(), fields=fields)
        loader = Loader(config.data, config.reading, corpus, ramp, expansion, first_step)
        gather = jax.jit(expansion.gather)
        programs = {}

        def look(batch):
            shape = batch.tokens.shape
            if shape not in programs:
                compiled = gather.lower(batch).compile()
                programs[shape] = compiled, moved_bytes(compiled.as_text())
            compiled, moved = programs[shape]
            return fingerprint_of_weights(compiled(batch)), moved

        steps = [look(loader.batch(k)[0]) for k in range(first_step, ramp.total_steps)]
        evaluations = list(map(look, loader.eval_batches(ramp.stages[0], config.evaluation)))
        loader.close()
    return {
        "steps": [fingerprint for fingerprint, _ in steps],
        "evaluations": [fingerprint for fingerprint, _ in evaluations],
        "moved": [moved for _, moved in steps],
        "share": [len(expansion.share.rows(s.spec)) for s in ramp.stages],
        **{"reads": expansion.reads, "hash": corpus.hash, "packed": corpus.packed},
    }


def main() -> None:
    requests = json.loads(sys.argv[1])
    for i, (first_step, arguments) in enumerate(requests):
        loaded = load(arguments)
        if i == 0:
            backend.start(loaded.backend)
        print(json.dumps(serve(first_step, loaded)), flush=True)
    end_process(0)  # so that the others do not take its end for a loss


if __name__ == "__main__":
    main()
