"""The section of reinforcement learning: prompts, answers and rewards. Imports no JAX."""

import dataclasses
import sys
from collections.abc import Sequence

from maxramp.errors import ConfigError
from maxramp.keys.section import Keys, above_zero, at_least, positive_or_open, uint32

_MOST_SECONDS = 2e6  # that the system can wait: 2^31 ms


@dataclasses.dataclass(frozen=True)
class RolloutKeys(Keys):
    """What is asked, how it is answered, and what the answers are worth."""

    prompt_file: str
    eval_prompt_file: str
    eval_interval: int = positive_or_open()
    log_answers: int = at_least(0)
    sums_below: int = at_least(2)
    num_epoch: int = uint32(1)
    enable_data_shuffling: bool
    data_shuffle_seed: int = uint32()
    split_special_tokens: bool
    max_completion_length: int = at_least(1)
    rollout_seed: int = uint32()
    rewards: Sequence[str]
    reward_weights: Sequence[float]
    reward_workers: int = at_least(1)
    reward_timeout_seconds: float = above_zero()

    def check(self) -> None:
        """Checks each key, and that every reward has a weight.

        Raises:
          ConfigError: names the key, its value, the relation it breaks and a remedy.
        """
        super().check()
        for name in self.rewards:
            module, colon, function = str(name).partition(":")
            if not (module and colon and function):
                raise ConfigError(f"rewards: {name} must be module:function")
        if not self.rewards:
            raise ConfigError("rewards=[] names no function; give module:function")
        if len(set(self.rewards)) < len(self.rewards):
            raise ConfigError(f"rewards={list(self.rewards)} names a function twice; weigh it once")
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            raise ConfigError(
                f"reward_weights={list(self.reward_weights)} has {len(self.reward_weights)} "
                f"numbers for {len(self.rewards)} rewards; give one for each, or none"
            )
        for weight in self.reward_weights:
            if not (type(weight) in (int, float) and abs(weight) <= sys.float_info.max):
                raise ConfigError(f"reward_weights: {weight} must be a finite number")
        if self.reward_timeout_seconds > _MOST_SECONDS:
            raise ConfigError(
                f"reward_timeout_seconds={self.reward_timeout_seconds:g} must be at most "
                f"{_MOST_SECONDS:g}, 23 days"
            )
