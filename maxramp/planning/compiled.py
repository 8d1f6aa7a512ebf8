"""What maxramp.compile found, for the stages of a plan."""

import json
import pathlib
from typing import Any

from maxramp.errors import ConfigError


def add_compiled(plan: dict[str, Any], path: pathlib.Path) -> None:
    """Adds `compiled` to every stage whose batch shape and devices a file of maxramp.compile holds.

    Raises:
      ConfigError: it is no such file.
    """
    try:
        found = json.loads(path.read_text())
        pod = f"{found['num_slices']} x {found['compile_topology']}"
        shapes = {_shape(entry, found["max_target_length"]): entry for entry in found["stages"]}
        fields = ("fits", "memory_gib", "step_seconds", "mfu", "tokens_per_second")
        kept = {key: {f: entry.get(f) for f in fields} for key, entry in shapes.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a file of maxramp.compile"
        raise ConfigError(f"--compiled {path}: {reason}") from None
    for entry in plan["stages"]:
        entry["compiled"] = kept.get(_shape(entry, plan["max_target_length"]))
        if entry["compiled"] is None:
            plan["warnings"].append(f"stage {entry['index']} is not one that {path} compiled")
        elif entry["compiled"]["fits"]:
            seconds = entry["compiled"]["step_seconds"]
            hours = entry["run_steps"] * seconds / 3600
            entry["compiled"] |= {"pod": pod, "hours": hours}
            entry["compiled"]["chip_hours"] = hours * entry["devices"]


def _shape(entry: dict[str, Any], length: int) -> tuple:
    names = ("global_batch_size", "gradient_accumulation_steps", "devices")
    return (*(entry[name] for name in names), length)
