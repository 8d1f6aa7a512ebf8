"""The section of checkpoints: when to save, what to keep, where to start, when a job ends."""

import dataclasses
from collections.abc import Sequence

from maxramp.keys.section import (
    Keys,
    above_zero_or_open,
    form,
    minimum,
    path_or_storage,
    positive_or_open,
)


@dataclasses.dataclass(frozen=True)
class CheckpointKeys(Keys):
    """Saves, and what a start makes of them."""

    enable_checkpointing: bool
    async_checkpointing: bool
    checkpoint_period: int = positive_or_open()
    checkpoint_period_samples: int = positive_or_open()
    checkpoint_period_minutes: float = above_zero_or_open()
    checkpoint_stage_ends: bool
    max_num_checkpoints_to_keep: int | None = minimum(1)
    checkpoint_keep_period: int = positive_or_open()
    checkpoint_best: str = form(
        r"(lowest|highest) \S+",
        "must be lowest or highest and a number of evaluations, such as lowest eval_loss",
    )
    max_failed_saves: int = minimum(1)
    enable_emergency_checkpoint: bool
    local_checkpoint_directory: str
    local_checkpoint_period: int = minimum(1)
    load_parameters_path: str = path_or_storage()
    load_full_state_path: str = path_or_storage()
    allow_changed: Sequence[str]
    stop_at_stage_end: bool
    stop_at_node_change: bool
