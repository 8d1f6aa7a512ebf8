"""Relations between the keys of checkpoints and other keys."""

from collections.abc import Mapping

from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.data.keys import EvalKeys
from maxramp.keys.base import base
from maxramp.keys.section import Relations


def check_checkpoints(keys: CheckpointKeys) -> Relations:
    """Relations of the section alone."""
    yield (
        keys.checkpoint_keep_period != -1 and keys.max_num_checkpoints_to_keep is None,
        f"checkpoint_keep_period={keys.checkpoint_keep_period} says what stays besides the newest, "
        "but max_num_checkpoints_to_keep is not given, and so all stay; give it",
    )
    for name in keys.allow_changed:
        yield (
            str(name) not in (*base(), "corpus"),
            f"allow_changed={list(keys.allow_changed)}: {name} is neither a key nor corpus",
        )
    for name in ("stop_at_stage_end", "stop_at_node_change"):
        yield (
            getattr(keys, name) and not keys.enable_checkpointing,
            f"{name}=True with enable_checkpointing=False would lose every stage; enable "
            "checkpointing",
        )


def check_best(keys: CheckpointKeys, evaluation: EvalKeys, sets: Mapping[str, str]) -> Relations:
    """Whether the run has the number that its best checkpoint is chosen by.

    Args:
      keys: which number.
      evaluation: when it is measured.
      sets: the held-out sets that have names.
    """
    how, name = f"checkpoint_best={keys.checkpoint_best}", keys.checkpoint_best.partition(" ")[2]
    yield (
        name and not keys.enable_checkpointing,
        f"{how} with enable_checkpointing=False, which saves none; leave one of them out",
    )
    yield (
        name and not name.startswith(("eval_", "task_")),
        f"{how}: {name} is not a number of evaluations, whose names begin with eval_ or task_",
    )
    yield (
        name.startswith("eval_") and evaluation.eval_interval == -1,
        f"{how} with eval_interval=-1, which never evaluates; give an interval",
    )
    yield (
        name.startswith("task_") and not evaluation.evaluate_tasks,
        f"{how} without a task; give evaluate_tasks",
    )
    of_set = name.removeprefix("eval_loss_") if name.startswith("eval_loss_") else ""
    yield (
        of_set and of_set not in sets,
        f"{how}: eval_sets has no {of_set}, but {', '.join(sorted(sets)) or 'none'}",
    )
