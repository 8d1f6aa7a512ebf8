"""The keys of a branch: those of its run at the checkpoint, but for `branch_keys`."""

import math
from typing import Any

from maxramp.checkpoints.folder import Checkpoint
from maxramp.config.choices import CHOICES
from maxramp.config.keys import Config
from maxramp.config.load import unset_batch
from maxramp.keys.base import base
from maxramp.keys.choices import find_unmade
from maxramp.rampup.phases import MIXTURE
from maxramp.training.learning_rate import LearningRate

# A branch has these as base.yml does: what a run measures or hands over beside its held-out loss,
# and what changed in its rows or weights before the checkpoint.
DEFAULTED = (
    *("export_huggingface", "evaluate_tasks", "checkpoint_best", "log_gradient_noise_scale"),
    *("log_token_statistics", "wandb_project", "profiler", "allow_changed"),
)


def inherit_keys(config: Config, sample: int, own_keys: dict[str, Any]) -> dict[str, Any]:
    """Returns all keys of a branch: those that a resolved run has at a sample, and its own."""
    phase = config.batch.phase_at(sample).values | {MIXTURE: config.values[MIXTURE]}
    defaults = {name: base()[name] for name in DEFAULTED}
    keys = config.values | phase | defaults | own_keys
    return keys | find_unmade(CHOICES, keys, keys)  # those of a later phase, for example


def branch_keys(
    config: Config, position: Checkpoint, rate: LearningRate, size: int, samples: int
) -> dict[str, Any]:
    """Returns the keys that a branch of a resolved run has for itself, but for its folder.

    It trains at the rate that the run had at the checkpoint, times the root of the batches, and so
    do weights decay whose half-life is in samples. What is remembered counts from the reference
    batch of the run: a first threshold gives it, which lies before the checkpoint.
    """
    first, keys = position.consumed_samples, config.optimizer
    batch = position.stage()["global_batch_size"]
    scale = math.sqrt(size / batch)
    pace = rate.pace(batch).rate * scale
    decays = {
        name: config.values[name] / pace
        for name in ("adam_weight_decay", "muon_weight_decay")
        if name in keys.half_lives_in_samples
    }
    has_base = config.model.lora_rank or config.objective.has_reference
    mixtures = {p.name: {MIXTURE: p.changes[MIXTURE]} for p in config.batch.changing(MIXTURE)}
    return (
        decays
        | unset_batch()
        | {
            "step_batch_size_schedule": f"0:{rate.reference} {first}:{size}",
            "step_batch_size_unit": "samples",
            "phases": mixtures,  # the rows of a mixture depend on where those before it begin
            "total_samples": first + samples,
            "learning_rate": float(rate(first, batch)) * scale,
            "learning_rate_by": "samples",
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
