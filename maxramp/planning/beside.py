"""Ramps of published runs (configs/schedules), beside the one that is planned."""

import itertools
from typing import Any

from maxramp.config.load import load
from maxramp.errors import ConfigError
from maxramp.keys.base import CONFIGS
from maxramp.rampup.schedule import RampupBatchManager


def find_published(names: str) -> list[dict[str, Any]]:
    """Runs by their names, with commas between them, as `summarize_ramp` gives them."""
    there = {path.stem: path for path in sorted((CONFIGS / "schedules").glob("*.yml"))}
    found = []
    for name in names.split(","):
        if name not in there:
            raise ConfigError(f"--beside {name}: no such run; there are {', '.join(there)}")
        keys = load([str(there[name])], note=lambda line: None).batch
        ramp = RampupBatchManager(keys, 1)
        stages = ramp.stages_between(0, ramp.total_steps)
        pairs = [(stage.first_sample, stage.global_batch_size) for stage in stages]
        found.append(summarize_ramp(name, pairs, ramp.total_samples, keys.max_target_length))
    return found


def summarize_ramp(
    name: str, stages: list[tuple[int, int]], end: int, sample_tokens: int
) -> dict[str, Any]:
    """A ramp in tokens: of (first sample, samples of a batch) of its stages, up to sample `end`.

    Returns `name`; `starts` and `batches` where the batch changes; `end` of the run.
    """
    of_batches = (next(same) for _, same in itertools.groupby(stages, key=lambda pair: pair[1]))
    starts, batches = ([n * sample_tokens for n in x] for x in zip(*of_batches, strict=True))
    return {"name": name, "starts": starts, "batches": batches, "end": end * sample_tokens}
