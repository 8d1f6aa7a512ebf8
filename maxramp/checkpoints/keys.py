"""The section of checkpoints: when to save, what to keep, where to start, when a job ends."""

import dataclasses
from collections.abc import Sequence

from maxramp.errors import ConfigError
from maxramp.keys import base
from maxramp.keys.section import (
    Keys,
    above_zero_or_open,
    at_least,
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
    max_num_checkpoints_to_keep: int | None = at_least(1)
    checkpoint_keep_period: int = positive_or_open()
    max_failed_saves: int = at_least(1)
    load_parameters_path: str = path_or_storage()
    load_full_state_path: str = path_or_storage()
    allow_changed: Sequence[str]
    stop_at_stage_end: bool
    stop_at_node_change: bool

    def check(self) -> None:
        """Checks each key, and that what is asked for can be had together.

        Raises:
          ConfigError: names the key, its value, the relation it breaks and a remedy.
        """
        super().check()
        if self.checkpoint_keep_period != -1 and self.max_num_checkpoints_to_keep is None:
            raise ConfigError(
                f"checkpoint_keep_period={self.checkpoint_keep_period} says what stays besides "
                "the newest, but max_num_checkpoints_to_keep is not given, and so all stay; give it"
            )
        for name in self.allow_changed:
            if name not in base.base() and name != "corpus":
                raise ConfigError(
                    f"allow_changed={list(self.allow_changed)}: {name} is neither a key nor corpus"
                )
        for name in ("stop_at_stage_end", "stop_at_node_change"):
            if getattr(self, name) and not self.enable_checkpointing:
                raise ConfigError(
                    f"{name}=True with enable_checkpointing=False would lose every stage; enable "
                    "checkpointing"
                )
