"""Rewards for a model's own answers to prompts (GRPO)."""

import dataclasses
from typing import Any

from maxramp.keys.section import Keys, Relations, above_zero, limit, minimum, one_of
from maxramp.objectives.objective import Objective, measured_noise, refuse_cuts, refuse_in_phases
from maxramp.rampup.phases import MESH_KEYS, MIXTURE
from maxramp.stage import ROPE_KEYS, Field


@dataclasses.dataclass(frozen=True)
class PolicyKeys(Keys):
    """What reinforcement learning minimizes over the answers to prompts."""

    num_generations: int = limit(
        lambda value: value >= 2,
        "must be 2 or more: an answer's advantage is over the others to its prompt",
    )
    grpo_normalize_advantages: bool
    grpo_epsilon: float = minimum(0)
    grpo_epsilon_high: float = minimum(0)
    grpo_beta: float = minimum(0)
    grpo_normalization: str = one_of("token", "sequence")
    num_iterations: int = minimum(1)
    decode_sampling_temperature: float = above_zero()
    loss_block_tokens: int = minimum(0)


def _fields(tokens: int, separate: bool = False) -> tuple[Field, ...]:
    """Lists the arrays for T tokens of a prompt and its answer."""
    ids, numbers = ("tokens", "targets"), ("weights", "shares", "sampled_log_probs")
    dtypes = {**dict.fromkeys(ids, "int32"), **dict.fromkeys(numbers, "float32")}
    return tuple(Field(name, dtype, (tokens,)) for name, dtype in dtypes.items())


def _sum_names(keys: PolicyKeys) -> tuple[str, ...]:
    names = ("loss", "tokens", "entropy", "clip_share", "sampler_difference")
    return (*names, "kl") if keys.grpo_beta else names


def _refuse(config: Any) -> Relations:
    reader, keys, lora = REWARDS.asked_by, config.rollout, config.model.lora_rank
    yield (
        config.model.max_target_length <= keys.max_completion_length,
        f"max_completion_length={keys.max_completion_length} leaves no room for a prompt in "
        f"max_target_length={config.model.max_target_length}; raise that, or lower it",
    )
    yield lora, f"lora_rank={lora}: reinforcement learning trains all weights; leave it out"
    hang, reward = config.run.hang_timeout_seconds, keys.reward_timeout_seconds
    yield (
        0 < hang <= reward,
        f"reward_timeout_seconds={reward:g} must be below hang_timeout_seconds={hang:g}, or "
        "rewards that may take so long would end the run as one that hangs; lower it, or raise "
        "hang_timeout_seconds",
    )
    measured = measured_noise(config)
    yield (
        measured,
        f"{measured}: steps of reinforcement learning do not measure the noise scale; leave it "
        "out, and give a ramp or rampup_policy=seesaw",
    )
    yield from refuse_cuts(config, reader)
    yield from refuse_in_phases(config, reader, (*MESH_KEYS, *ROPE_KEYS, MIXTURE))
    factor = config.model.capacity_factor
    yield (
        factor > 0,
        f"capacity_factor={factor:g}: {reader} samples texts with no token dropped, and would "
        "train on others; leave it out (-1)",
    )


REWARDS = Objective(
    noun="prompts",
    fields=_fields,
    keys=PolicyKeys,
    shown=_sum_names,
    key="program",
    value="grpo",
    needs_weights="reinforcement learning begins with the weights of a model that can answer at "
    "times",
    in_evaluations=(
        *("rewards", "reward_weights", "num_generations", "max_completion_length"),
        *("rollout_seed", "decode_sampling_temperature"),
    ),
    example="configs/post_train/rl.yml",
    refuses=_refuse,
)
