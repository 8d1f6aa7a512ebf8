"""Which keys of a run its branches have: all but `DROPPED` and those that `branch_keys` gives."""

import dataclasses
import math
from typing import Any

from maxramp.checkpoints.folder import Checkpoint
from maxramp.config.keys import Config
from maxramp.config.load import no_batch
from maxramp.keys.base import base
from maxramp.launch.keys import LaunchKeys
from maxramp.rampup.phases import MIXTURE
from maxramp.training.learning_rate import LearningRate

# As base.yml has them.
DROPPED = (
    # what is measured or handed over beside the loss on held-out rows
    *("export_huggingface", "evaluate_tasks", "evaluate_tasks_interval"),
    *("evaluate_tasks_include_path", "checkpoint_best", "log_gradient_noise_scale"),
    *("log_token_statistics", "wandb_project", "profiler", "skip_first_n_steps_for_profiler"),
    "profiler_steps",
    # what changed in the run's rows or weights: a branch continues from a checkpoint after that
    "allow_changed",
    # of a curve that a branch does not follow
    *("learning_rate_final_fraction", "wsd_decay_style", "learning_rate_by"),
    # of plans, launches, and of reinforcement learning
    *("price_per_device_hour", "planned_flops_share", "planned_memory_share"),
    *("planned_link_share", "compile_topology", "compile_topology_num_slices"),
    *(field.name for field in dataclasses.fields(LaunchKeys)),
    *("num_generations", "max_completion_length", "decode_sampling_temperature", "rollout_seed"),
    *("grpo_normalize_advantages", "grpo_epsilon", "grpo_epsilon_high", "grpo_beta"),
    *("grpo_normalization", "num_iterations", "prompt_file", "eval_prompt_file", "log_answers"),
    *("sums_below", "rewards", "reward_weights", "reward_workers", "reward_timeout_seconds"),
)


def inherited_keys(config: Config, sample: int) -> dict[str, Any]:
    """The keys of a resolved run at a sample, those of `DROPPED` as base.yml has them."""
    of_phase = {**config.batch.phase_at(sample).values, MIXTURE: config.values[MIXTURE]}
    return config.values | of_phase | {name: base()[name] for name in DROPPED}


def branch_keys(
    config: Config, position: Checkpoint, rate: LearningRate, size: int, samples: int
) -> dict[str, Any]:
    """The keys that a branch of a resolved run has for itself, but for the folder it runs in. It
    trains at the rate that the run had at the checkpoint, times the root of the batches, and so do
    weights decay whose half-life is in samples; what is remembered counts from the reference batch
    of the run: a first threshold gives it, which lies before the checkpoint.
    """
    first, keys = position.consumed_samples, config.optimizer
    batch = position.stage()["global_batch_size"]
    follows = math.sqrt(size / batch)
    by_batch = rate.pace(batch).rate * follows
    decays = {
        name: config.values[name] / by_batch
        for name in ("adam_weight_decay", "muon_weight_decay")
        if name in keys.half_lives_in_samples
    }
    has_base = config.model.lora_rank or config.objective.has_reference
    mixtures = {p.name: {MIXTURE: p.given[MIXTURE]} for p in config.batch.changing(MIXTURE)}
    return (
        decays
        | no_batch()
        | {
            "step_batch_size_schedule": f"0:{rate.reference} {first}:{size}",
            "step_batch_size_unit": "samples",
            "phases": mixtures,  # the rows of a mixture depend on where those before it begin
            "total_samples": first + samples,
            "learning_rate": float(rate(first, batch)) * follows,
            "lr_schedule_type": "wsd",  # constant: no warm-up, and no decay
            "warmup_steps_fraction": 0.0,
            "wsd_decay_steps_fraction": 0.0,
            "learning_rate_schedule_steps": -1,
            "batch_size_lr_scaling": "none",
            "batch_size_lr_reference": "initial",
            "program": "train",
            "load_full_state_path": str(position.path),
            "load_parameters_path": config.checkpoints.load_parameters_path if has_base else "",
            "eval_interval": 10**12,  # at the end alone
            "eval_samples": -1,
            "log_eval_batches": True,
            "enable_checkpointing": True,
            "max_num_checkpoints_to_keep": 1,
            "checkpoint_keep_period": -1,
            "stop_at_stage_end": False,
            "stop_at_node_change": False,
        }
    )
