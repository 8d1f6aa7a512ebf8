"""The section of reinforcement learning: prompts, answers and rewards. Imports no JAX."""

import dataclasses
from collections.abc import Sequence

from maxramp.keys.section import Keys, above_zero, minimum, positive_or_open, uint32


@dataclasses.dataclass(frozen=True)
class RolloutKeys(Keys):
    """What is asked, how it is answered, and what the answers are worth."""

    prompt_file: str
    eval_prompt_file: str
    eval_interval: int = positive_or_open()
    log_answers: int = minimum(0)
    sums_below: int = minimum(2)
    num_epoch: int = uint32(1)
    enable_data_shuffling: bool
    data_shuffle_seed: int = uint32()
    split_special_tokens: bool
    max_completion_length: int = minimum(1)
    rollout_seed: int = uint32()
    rewards: Sequence[str]
    reward_weights: Sequence[float]
    reward_workers: int = minimum(1)
    reward_timeout_seconds: float = above_zero()
