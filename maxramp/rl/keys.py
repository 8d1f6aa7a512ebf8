"""The section of reinforcement learning: prompts, answers and rewards. Imports no JAX."""

import dataclasses
import re
import sys
from collections.abc import Sequence

from maxramp.keys.section import Keys, limit, minimum, uint32


@dataclasses.dataclass(frozen=True)
class RolloutKeys(Keys):
    """What is asked, how it is answered, and what the answers are worth."""

    prompt_file: str
    eval_prompt_file: str
    eval_interval: int = minimum(-1)
    log_answers: int = minimum(0)
    sums_below: int = minimum(2)
    num_epoch: int = uint32(1)
    enable_data_shuffling: bool
    data_shuffle_seed: int = uint32()
    split_special_tokens: bool
    max_completion_length: int = minimum(1)
    rollout_seed: int = uint32()
    rewards: Sequence[str] = limit(
        lambda value: (
            0 < len(value) == len({*map(str, value)})
            and all(re.fullmatch("[^:]+:.+", str(name)) for name in value)
        ),
        "must be functions, each once as module:function",
    )
    reward_weights: Sequence[float] = limit(
        lambda value: all(type(x) in (int, float) and abs(x) <= sys.float_info.max for x in value),
        "must be finite numbers",
    )
    reward_workers: int = minimum(1)
    reward_timeout_seconds: float = limit(  # the system waits 2^31 ms at most
        lambda value: 0 < value <= 2e6, "must be above 0 and at most 2e6, which is 23 days"
    )
