"""What a checkpoint folder holds, read without JAX and without devices.

checkpoints/
  100/                       100 steps done; Orbax gives it this name when it is whole
    _CHECKPOINT_METADATA     Orbax's; custom_metadata in it is what `saving` put there
    files.json               the size of every other file, written after them
    model/ optimizer/        the arrays
  150.orbax-checkpoint-tmp/  a save that is going on, or was killed
  120.torn/                  what a restart found damaged and moved aside
"""

import dataclasses
import json
import pathlib
from typing import Any

from maxramp.errors import ConfigError

UNFINISHED = ".orbax-checkpoint-tmp"
TORN = ".torn"
DELETING = ".deleting"
_METADATA = "_CHECKPOINT_METADATA"
_FILES = "files.json"


class TornError(ValueError):
    """What is damaged in a checkpoint, in a few words."""


@dataclasses.dataclass(frozen=True)
class Saved:
    """Where a checkpoint stands and what it was trained with."""

    path: pathlib.Path
    step: int  # steps done = the next step
    consumed_samples: int
    stages: list[dict[str, Any]]  # of the schedule it was trained with, as in plan.json
    corpus_hash: str
    config: dict[str, Any]  # resolved
    versions: dict[str, str]  # of Python and the packages that decide the arithmetic
    shuffle: str = "added"  # one of data.order.SHUFFLES; those from before it was kept added seeds

    def stage(self) -> dict[str, Any]:
        """The stage of the next step."""
        return [stage for stage in self.stages if stage["first_step"] <= self.step][-1]

    def differences(self, config: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Keys that both configurations have and whose values differ: (there, in `config`)."""
        there, here = self.config, json.loads(json.dumps(config))
        shared = there.keys() & here.keys()
        return {
            name: (there[name], here[name])
            for name in here
            if name in shared and there[name] != here[name]
        }

    def metadata(self) -> dict[str, Any]:
        """What Orbax keeps with the arrays."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del values["path"]
        return values | {"config": json.dumps(self.config)}  # as text: it may hold any type


def steps_in(folder: pathlib.Path) -> list[int]:
    """The steps of the checkpoints in a folder, the oldest first, torn ones included."""
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdigit())


def read(path: pathlib.Path) -> Saved:
    """Reads what stands beside a checkpoint's arrays, and looks whether all its files are there.

    Raises:
      TornError: a file is missing, too short or unreadable.
      ConfigError: it is a checkpoint of another program.
    """
    try:
        values = json.loads((path / _METADATA).read_text())["custom_metadata"] or {}
        sizes = json.loads((path / _FILES).read_text()) if (path / _FILES).exists() else {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not JSON"
        name = pathlib.Path(getattr(error, "filename", None) or _METADATA).name
        raise TornError(f"{name}: {reason}") from None
    values = {"shuffle": Saved.shuffle} | values
    fields = {field.name for field in dataclasses.fields(Saved)} - {"path"}
    if not fields <= values.keys():
        raise ConfigError(
            f"{path}: not a checkpoint of maxramp; move it away, or take another run_name"
        )
    for name, size in sizes.items():
        file = path / name
        there = file.stat().st_size if file.is_file() else None
        if there is None or there < size:
            shown = "missing" if there is None else f"{there} bytes of {size}"
            raise TornError(f"{name}: {shown}")
    values = {name: values[name] for name in fields}
    return Saved(path=path, **values | {"config": json.loads(values["config"])})


def write_sizes(path: pathlib.Path) -> None:
    """Notes the size of every file of a checkpoint that is whole."""
    sizes = {str(p.relative_to(path)): p.stat().st_size for p in path.rglob("*") if p.is_file()}
    sizes.pop(_FILES, None)
    writing = path / f"{_FILES}.tmp"
    writing.write_text(json.dumps(sizes))
    writing.replace(path / _FILES)


def find(path: pathlib.Path) -> pathlib.Path:
    """The checkpoint that a path means: itself, or the newest of a checkpoints or run folder.

    Raises:
      ConfigError: there is none.
    """
    path = path.expanduser().absolute()
    if path.name.isdigit() and path.is_dir():
        return path
    for folder in (path / "checkpoints", path):
        if steps := steps_in(folder):
            return folder / str(steps[-1])
    raise ConfigError(
        f"{path}: no checkpoint there; give a checkpoint, a checkpoints folder or a run's folder"
    )
