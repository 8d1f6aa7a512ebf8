"""What a checkpoint folder holds, read without JAX and without devices.

checkpoints/
  100/                       100 steps done; `store` gives it this name when it is whole
    _CHECKPOINT_METADATA     Orbax's; custom_metadata in it is what `store` put there
    files.json               the size of every other file, written after them
    model/ optimizer/        the arrays
  150.orbax-checkpoint-tmp/  a save that is going on, or was killed
  50.deleting/               an old checkpoint that is being removed
  120.torn/                  what a restart found damaged and moved aside

An object storage renames nothing: there the arrays are in 150/ at once, files.json comes last and
goes first, and a number without it is no checkpoint. The other names hold a mark alone, which says
that 150/ may be removed as long as it has no files.json.
"""

import contextlib
import dataclasses
import errno
import itertools
import json
import re
from collections.abc import Mapping
from typing import Any

from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.errors import ConfigError
from maxramp.folders.place import (
    Place,
    is_folder,
    is_near,
    make_folder,
    move_tree,
    place,
    remove_tree,
    renames,
    sizes,
    write_whole,
)
from maxramp.keys import base
from maxramp.rampup.keys import BatchKeys

UNFINISHED = ".orbax-checkpoint-tmp"
TORN = ".torn"
DELETING = ".deleting"
_METADATA = "_CHECKPOINT_METADATA"
_FILES = "files.json"
_STEP = re.compile("0|[1-9][0-9]*")


class TornError(ValueError):
    """What is damaged in a checkpoint, in a few words."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """Where a checkpoint stands and what it was trained with."""

    path: Place
    step: int  # steps done = the next step
    consumed_samples: int
    stages: list[dict[str, Any]]  # of the schedule it was trained with, as in plan.json
    corpus_hash: str
    config: dict[str, Any]  # of all keys, resolved
    versions: dict[str, str]  # of Python and the packages that decide the arithmetic
    reference: str = ""  # fingerprint of the weights to stay near to, where there are any

    def stages_of_run(self) -> list[dict[str, Any]]:
        """The stages that the run takes, at least one: a ramp may have more behind its end."""
        keys = BatchKeys.of(base.base() | self.config)
        end, of = (keys.steps, "step") if keys.steps != -1 else (keys.samples_of_run, "sample")
        return self.stages[:1] + [s for s in self.stages[1:] if s[f"first_{of}"] < end]

    def stage(self) -> dict[str, Any]:
        """The stage of the next step; after the last, that one's."""
        return [stage for stage in self.stages_of_run() if stage["first_step"] <= self.step][-1]

    def differences(self, values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Keys that the checkpoint and `values` both have with different values: (there, here)."""
        there, here = self.config, json.loads(json.dumps(dict(values)))
        return {
            name: (there[name], here[name])
            for name in here
            if name in there and there[name] != here[name]
        }

    def metadata(self) -> dict[str, Any]:
        """What Orbax keeps with the arrays."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        del values["path"]
        return values | {"config": json.dumps(self.config)}  # as text: it may hold any type


def is_step(name: str) -> bool:
    """Whether a folder of this name is a checkpoint: the number of its steps."""
    return _STEP.fullmatch(name) is not None


def steps_in(folder: Place) -> list[int]:
    """The steps of the checkpoints in a folder, the oldest first, torn ones included."""
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if is_step(p.name) and _may_be_one(p))


def _may_be_one(path: Place) -> bool:
    """Whether a folder with a number for a name is no run's: a run may be called 2024."""
    return path.is_dir() and not is_folder(path / "checkpoints")


def unfinished(path: Place) -> Place:
    """What is there as long as a checkpoint is not whole."""
    return path.with_name(f"{path.name}{UNFINISHED}")


def never_counted(path: Place) -> bool:
    """Whether the files of a torn checkpoint are those of a save that never was whole.

    In a storage, a save that was killed at once has not even left its mark. Orbax writes its
    metadata last, so where that is there somebody has removed files.json, or never copied one.
    """
    if unfinished(path).exists():
        return True
    return not (renames(path) or (path / _FILES).exists() or (path / _METADATA).exists())


def unfinished_arrays(path: Place) -> Place:
    """Where the arrays of a checkpoint are written that is not whole yet."""
    return unfinished(path) if renames(path) else path


def begin(path: Place) -> None:
    """Notes that a save has begun, where its arrays do not say so by their place.

    Raises:
      OSError: it cannot be noted.
    """
    if not renames(path):
        make_folder(unfinished(path))


def commit(path: Place) -> None:
    """Makes a checkpoint count whose arrays are all written.

    Raises:
      OSError: it does not count.
    """
    write_sizes(unfinished_arrays(path))  # before it has its name: not every rename is at once
    if renames(path):
        unfinished(path).rename(path)
    else:
        remove_tree(unfinished(path))


def remove(path: Place) -> None:
    """Removes a checkpoint so that a kill leaves no half of it that counts.

    Raises:
      OSError: it is still there.
    """
    gone = path.with_name(f"{path.name}{DELETING}")
    if renames(path):
        path.rename(gone)
        remove_tree(gone)
    else:
        make_folder(gone)
        (path / _FILES).unlink()
        _remove_marked(path, gone)


def discard(path: Place) -> None:
    """Removes what a save that failed has written; in a storage, unless it counts after all."""
    remove_tree(unfinished(path)) if renames(path) else _remove_unless_whole(path)


def set_aside(path: Place) -> None:
    """Gives a torn checkpoint another name; in a storage, leaves killed saves to the next function.

    Raises:
      OSError: it is still there.
    """
    if not renames(path) and unfinished(path).exists():
        return
    again = (f"{path.name}-{n}{TORN}" for n in itertools.count(2))
    names = itertools.chain([f"{path.name}{TORN}"], again)
    move_tree(path, next(aside for aside in map(path.with_name, names) if not aside.exists()))


def remove_leftovers(folder: Place) -> None:
    """Removes the parts of saves and removals that failed or were killed; none is going on."""
    for path in folder.iterdir():
        if path.suffix in (UNFINISHED, DELETING) and is_step(path.stem):
            checkpoint = path.with_name(path.stem)
            if renames(path):
                remove_tree(path)
            elif path.suffix == UNFINISHED:
                _remove_unless_whole(checkpoint)
            else:
                _remove_marked(checkpoint, path)


def _remove_unless_whole(path: Place) -> None:
    """Removes what a save has written to a storage, unless it was its commit that got no answer."""
    with contextlib.suppress(OSError):
        if (path / _FILES).exists():
            remove_tree(unfinished(path))
        else:
            _remove_marked(path, unfinished(path))


def _remove_marked(path: Place, mark: Place) -> None:
    """Removes a folder of a storage and then the mark that says that it may be removed."""
    with contextlib.suppress(OSError):
        remove_tree(path)
        if not path.exists():
            remove_tree(mark)


def read(path: Place) -> Checkpoint:
    """Reads what stands beside a checkpoint's arrays, and looks whether all its files are there.

    Raises:
      TornError: a file is missing, too short or damaged.
      ConfigError: it is a checkpoint of another program, or cannot be looked at.
    """
    try:
        return _read(path)
    except PermissionError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; give this user the right to read it, or take "
            "another run_name"
        ) from None


def _read(path: Place) -> Checkpoint:
    values = _json(path / _METADATA).get("custom_metadata") or {}
    there = sizes(path)
    wanted = _json(path / _FILES)
    fields = {field.name for field in dataclasses.fields(Checkpoint)} - {"path"}
    if not (isinstance(values, dict) and fields <= values.keys()):
        raise ConfigError(
            f"{path}: not a checkpoint of maxramp; move it away, or take another run_name"
        )
    for name, size in wanted.items():
        if there.get(name, -1) < size:
            shown = f"{there[name]} bytes of {size}" if name in there else "missing"
            raise TornError(f"{name}: {shown}")
    if is_step(path.name) and int(path.name) != values["step"]:
        raise TornError(f"{_METADATA}: it is checkpoint {values['step']}, under another number")
    values = {name: values[name] for name in fields}
    return Checkpoint(path=path, **values | {"config": json.loads(values["config"])})


def _json(path: Place) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except PermissionError:
        raise
    except OSError as error:
        if not is_near(path) and not isinstance(error, FileNotFoundError):
            raise  # a storage that does not answer says nothing about the checkpoint
        raise TornError(f"{path.name}: {error.strerror}") from None
    except ValueError:
        raise TornError(f"{path.name}: not JSON") from None
    if not isinstance(value, dict):
        raise TornError(f"{path.name}: not an object")
    return value


def write_sizes(path: Place) -> None:
    """Notes the size of every file of a checkpoint that is whole.

    Raises:
      OSError: it is not whole, as somebody has removed files, or the sizes cannot be written.
    """
    there = sizes(path)
    if _METADATA not in there:
        raise OSError(errno.EIO, "files are missing", str(path))
    there.pop(_FILES, None)
    write_whole(path / _FILES, json.dumps(there).encode())


def find(path: Place) -> Place:
    """The checkpoint that a path means: itself, or the newest of a checkpoints or run folder.

    Raises:
      ConfigError: there is none.
    """
    given, path = str(path), place(path).expanduser().absolute()
    for folder in (path / "checkpoints", path):
        if steps := steps_in(folder):
            return folder / str(steps[-1])
    if is_step(path.name) and _may_be_one(path):
        return path
    hint = ""
    if not path.exists() and re.fullmatch(
        r"[\w.-]+/[\w.-]+", given
    ):  # as models on a hub are named
        hint = (
            "; a model of the Hugging Face Hub cannot be opened yet: model_name gives the sizes of "
            "a released one, and its training begins with random weights"
        )
    raise ConfigError(
        f"{path}: no checkpoint there; give a checkpoint, a checkpoints folder or a run's folder"
        f"{hint}"
    )


def check_sources(keys: CheckpointKeys, folder: Place) -> None:
    """Finds what a run is to start from, before anything that takes long.

    Args:
      keys: where it starts.
      folder: of the run's own checkpoints; a run that has one goes on from that.

    Raises:
      ConfigError: there is no checkpoint at a path that is given.
    """
    for name in ("load_parameters_path", "load_full_state_path"):
        if (path := getattr(keys, name)) and not steps_in(folder):
            try:
                find(place(path))
            except ConfigError as error:
                raise ConfigError(f"{name}={path}: {error}") from None
