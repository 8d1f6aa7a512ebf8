"""Ramps of published runs (configs/schedules), to show beside a planned one."""

import itertools
from typing import Any

from maxramp.config.load import load
from maxramp.errors import ConfigError
from maxramp.keys.base import CONFIGS
from maxramp.rampup.schedule import RampupBatchManager


def find_published(names: str) -> list[dict[str, Any]]:
    """Finds runs by their names, which commas separate; each as `summarize_ramp` returns it."""
    files = {path.stem: path for path in sorted((CONFIGS / "schedules").glob("*.yml"))}
    runs = []
    for name in names.split(","):
        if name not in files:
            raise ConfigError(f"--beside {name}: no such run; there are {', '.join(files)}")
        keys = load([str(files[name])], note=lambda line: None).batch
        ramp = RampupBatchManager(keys, 1)
        stages = ramp.stages_between(0, ramp.total_steps)
        pairs = [(stage.first_sample, stage.global_batch_size) for stage in stages]
        runs.append(summarize_ramp(name, pairs, ramp.total_samples, keys.max_target_length))
    return runs


def summarize_ramp(
    name: str, stages: list[tuple[int, int]], end: int, sample_tokens: int
) -> dict[str, Any]:
    """Converts a ramp to tokens, from the (first sample, global batch size) of its stages.

    Returns `name`; `starts` and `batches` where the batch changes; `end` of the run.
    """
    changes = (next(same) for _, same in itertools.groupby(stages, key=lambda pair: pair[1]))
    starts, batches = ([n * sample_tokens for n in x] for x in zip(*changes, strict=True))
    return {"name": name, "starts": starts, "batches": batches, "end": end * sample_tokens}
