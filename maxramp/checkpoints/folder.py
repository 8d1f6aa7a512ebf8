"""What a checkpoint's folder holds, read without JAX and without devices.

checkpoints/
  100/                100 steps done
    model/ optimizer/ recent/ _CHECKPOINT_METADATA   the arrays, as Orbax writes them
    checkpoint.json   where the run stood, and the size of every other file
  120.torn/           what a restart found damaged and moved aside

checkpoint.json is written last and removed first, on a disk and in an object storage: a number
without it is an unfinished save or removal, and not a checkpoint.
"""

import contextlib
import dataclasses
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from maxramp.errors import ConfigError
from maxramp.files.place import Place, is_near, place, remove_tree, sizes, write_whole
from maxramp.keys import base
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.schedule import trained_stages
from maxramp.stage import ROPE_KEYS, RopeKeys

FILE = "checkpoint.json"
TORN = ".torn"
BEST = "best"  # names the best checkpoint instead of a number
_FORMAT = 1  # of the file: a later version can tell
_ARRAYS = ("model", "optimizer", "recent", "_CHECKPOINT_METADATA")
_ARRAYS += ("commit_success.txt", "orbax.checkpoint")
_STEP = re.compile("0|[1-9][0-9]*")


class TornError(ConfigError):
    """The checkpoint at `path` is damaged; `what` describes it in a few words."""

    def __init__(self, path: Place, what: str):
        super().__init__(
            f"{path} is torn ({what}); a checkpoint must be whole, and every host must see it: put "
            "the file back, or give another one"
        )
        self.path, self.what = path, what


class Best:
    """The best checkpoint among those that were added."""

    def __init__(self, how: str, evaluations: Mapping[str, str]):
        """Begins without a checkpoint. `how` is "lowest NAME" or "highest NAME", "" if none is the
        best; numbers of other `evaluations` (`DataIdentity`) do not compare.
        """
        self._how, self._evaluations = how, evaluations
        self._way, _, self._name = how.partition(" ")
        self.step: int | None = None  # the first of equal ones; None without one
        self._score = -math.inf

    def add(
        self, step: int, evaluation: Mapping[str, float], evaluations: Mapping[str, str]
    ) -> None:
        """Adds a checkpoint, in the order of steps, by its evaluation; one without the number is
        not the best."""
        kind = {self._name.partition("_")[0]}
        known = select_kinds(self._evaluations, kind)
        if self.is_beaten(evaluation) and select_kinds(evaluations, kind) == known:
            self.step, self._score = step, self._score_of(evaluation)

    def check(self, names: Sequence[str]) -> None:
        """Refuses a number that evaluations do not have."""
        if self._name and self._name not in names:
            raise ConfigError(
                f"checkpoint_best={self._how}: evaluations of this run have no {self._name}, but "
                f"{', '.join(names)}"
            )

    def is_beaten(self, evaluation: Mapping[str, float]) -> bool:
        """Tells whether an evaluation is better than the best; False if it lacks the number."""
        return self._score < self._score_of(evaluation) < math.inf

    def _score_of(self, evaluation: Mapping[str, float]) -> float:
        value = evaluation.get(self._name, math.nan)
        return -value if self._way == "lowest" else value

    def __str__(self) -> str:
        if self.step is None:
            return ""
        value = self._score_of({self._name: self._score})
        return f"checkpoint {self.step} has the {self._how}, {value:.4f}"


def select_kinds(numbers: Mapping[str, Any], kinds: Collection[str]) -> dict[str, Any]:
    """Selects the numbers of some kinds of evaluations: the first words of their names."""
    return {name: x for name, x in numbers.items() if name.partition("_")[0] in kinds}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint without its arrays: where the run stood and what it was trained with."""

    kind = "checkpoint"

    path: Place
    step: int  # steps done = the next step
    consumed_samples: int
    stages: list[dict[str, Any]]  # of the run, trained and planned, as in plan.json
    corpus_hash: str
    config: dict[str, Any]  # of all keys, resolved
    versions: dict[str, str]  # of Python and the packages that decide the arithmetic
    # fingerprint of the weights that the run adapts or stays near to, "" without any
    reference: str = ""
    # as in `DataIdentity`; of the mixtures after the first, those that it has seen
    parts: list[Any] = dataclasses.field(default_factory=list)
    mixtures: list[Any] = dataclasses.field(default_factory=list)
    evaluations: dict[str, str] = dataclasses.field(default_factory=dict)
    # numbers of the evaluations after its last step, by the names of metrics.jsonl
    evaluation: dict[str, float] = dataclasses.field(default_factory=dict)
    saved: str = ""  # the unique id of this save
    # `saved` of the checkpoints that the run began with, by the keys that name them
    first: dict[str, str] = dataclasses.field(default_factory=dict)
    # what a run with rampup_policy=noise decides by (`NoisePolicy`)
    noise: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return str(self.path)

    def to_json(self) -> dict[str, Any]:
        """Returns all fields but its path."""
        fields = dataclasses.fields(Checkpoint)
        return {f.name: getattr(self, f.name) for f in fields if f.name != "path"}

    def stages_of_run(self) -> list[dict[str, Any]]:
        """Returns the stages that the run reaches, at least one: others of its ramp begin behind
        the run's end.
        """
        keys = BatchKeys.from_values(base.base() | self.config)
        end, unit = (keys.steps, "step") if keys.steps != -1 else (keys.total_samples, "sample")
        if keys.total_tokens != -1:
            trained = trained_stages(self.stages, self.step)
            tokens = sum(s["samples"] * s["max_target_length"] for s in trained)
            end = self.consumed_samples - (tokens - keys.total_tokens) // keys.max_target_length
        return self.stages[:1] + [s for s in self.stages[1:] if s[f"first_{unit}"] < end]

    def stage(self) -> dict[str, Any]:
        """Returns the stage of the next step; after the last step, that of the last one."""
        return [stage for stage in self.stages_of_run() if stage["first_step"] <= self.step][-1]

    @property
    def rope_keys(self) -> RopeKeys:
        """What tokens saw in the last step; before the first step, what they see in that."""
        trained = [stage for stage in self.stages[1:] if stage["first_step"] < self.step]
        stage = base.base() | [self.stages[0], *trained][-1]
        return RopeKeys(**{name: stage[name] for name in ROPE_KEYS})

    def differences(self, values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Returns the keys that both have with different values: (value before, value now)."""
        before, now = self.config, json.loads(json.dumps(dict(values)))
        return {
            name: (before[name], now[name])
            for name in now
            if name in before and before[name] != now[name]
        }


def is_step(name: str) -> bool:
    return _STEP.fullmatch(name) is not None


def steps_in(folder: Place) -> list[int]:
    """Lists the steps of the checkpoints in a folder, the oldest first, torn ones included."""
    return sorted(int(path.name) for path in step_folders(folder) if is_committed(path))


def step_folders(folder: Place) -> list[Place]:
    return [p for p in folder.iterdir() if is_step(p.name)] if folder.is_dir() else []


def is_committed(path: Place) -> bool:
    """Tells whether a folder is a checkpoint, torn or not, and not an unfinished save; an OSError
    if its storage does not answer."""
    try:
        return (path / FILE).exists()
    except PermissionError:
        return True  # `read` names what may not be read


def commit(checkpoint: Checkpoint) -> None:
    """Makes a checkpoint count whose arrays are written, or rewrites the record of one that counts.
    After an OSError the record is as it was before.
    """
    files = {name: size for name, size in sizes(checkpoint.path).items() if name != FILE}
    values = {"format": _FORMAT, "files": files} | checkpoint.to_json()
    write_whole(checkpoint.path / FILE, json.dumps(values).encode())


def remove(path: Place) -> None:
    """Removes a checkpoint; after a kill, what is left of it does not count. An OSError says that
    nothing is removed.
    """
    (path / FILE).unlink()
    remove_tree(path)


def discard(folder: Place) -> list[Place]:
    """Removes unfinished checkpoints from a folder, which saves and removals left that failed or
    were killed; returns them. Called by one process, while no save runs.

    A folder with anything else than arrays of ours is somebody's, and stays.
    """
    removed = []
    for path in step_folders(folder):
        if path.is_dir() and not is_committed(path):
            names = {inner.name for inner in path.iterdir()}
            if all(name in _ARRAYS or name.startswith(f".{FILE}.") for name in names):
                remove_tree(path)
                removed.append(path)
    return removed


def read(path: Place) -> Checkpoint:
    """Reads a checkpoint without its arrays; raises a TornError if a file is missing, too short or
    damaged, another ConfigError if it may not be read or is of another format, and an OSError if
    its storage does not answer."""
    try:
        values = json.loads((path / FILE).read_bytes())
        present = sizes(path, values.get("files", ()))
    except PermissionError as error:
        raise ConfigError(
            f"{error.filename}: {error.strerror}; give this user the right to read it, or take "
            "another run_name"
        ) from None
    except OSError as error:
        if not is_near(path) and not isinstance(error, FileNotFoundError):
            raise  # a storage that does not answer says nothing about the checkpoint
        raise TornError(path, f"{FILE}: {error.strerror}") from None
    except (ValueError, AttributeError):
        raise TornError(path, f"{FILE}: not a JSON object") from None
    if values.get("format") != _FORMAT:
        raise ConfigError(
            f"{path}: not a checkpoint of this version of maxramp; move it away, or take another "
            "run_name"
        )
    for name, size in values["files"].items():
        if present.get(name, -1) < size:
            shown = f"{present[name]} bytes of {size}" if name in present else "missing"
            raise TornError(path, f"{name}: {shown}")
    if is_step(path.name) and int(path.name) != values["step"]:
        raise TornError(path, f"{FILE}: it is checkpoint {values['step']}, under another number")
    fields = {field.name for field in dataclasses.fields(Checkpoint)} - {"path"}
    return Checkpoint(path=path, **{name: values[name] for name in fields if name in values})


def newest(folder: Place) -> tuple[Checkpoint | None, list[TornError]]:
    """Reads the newest whole checkpoint of a folder, None without one; returns also the torn ones
    after it. Raises what else `read` raises."""
    torn = []
    for step in reversed(steps_in(folder)):
        try:
            return read(folder / str(step)), torn
        except TornError as error:
            torn.append(error)
    return None, torn


def read_whole(folder: Place) -> Iterator[Checkpoint]:
    """Reads the checkpoints of a folder that are whole, the oldest first; raises what else `read`
    raises."""
    for step in steps_in(folder):
        with contextlib.suppress(TornError):
            yield read(folder / str(step))


def find_best(folder: Place) -> Place:
    """Finds the best checkpoint of a folder, as its newest one defines it (`checkpoint_best`);
    raises a ConfigError if the folder has no best one."""
    last, _ = newest(folder)
    why = "no checkpoint there"
    if last:
        how = last.config.get("checkpoint_best", "")
        why = f"none has a number for checkpoint_best={how}" if how else "checkpoint_best not given"
        best = Best(how, last.evaluations)
        for checkpoint in read_whole(folder) if how else ():
            best.add(checkpoint.step, checkpoint.evaluation, checkpoint.evaluations)
        if best.step is not None:
            return folder / str(best.step)
    raise ConfigError(f"{folder / BEST}: {why}; give a checkpoint by its number")


def find(path: Place) -> Place:
    """Finds the checkpoint that a path names, torn or not: itself, the newest of a checkpoints or
    run folder, or the best (CHECKPOINTS/best); raises a ConfigError if it finds none."""
    path = place(path).absolute()
    for folder in (path / "checkpoints", path):
        if steps := steps_in(folder):
            return folder / str(steps[-1])
    if is_step(path.name) and is_committed(path):
        return path
    if path.name == BEST and not path.exists():
        return find_best(path.parent)
    why = "no checkpoint there; give a checkpoint, a checkpoints folder or a run's folder"
    raise ConfigError(f"{path}: {why_not_maxtext(path) or why}")


def why_not_maxtext(path: Place) -> str:
    """Returns why a checkpoint of MaxText cannot be read, and what can; "" for another path. Of an
    address only the name is looked at."""
    by_name = path.name == "items" and (not is_near(path) or is_step(path.parent.name))
    files = [path / name for name in ("_METADATA", "manifest.ocdbt")] * is_near(path)
    by_files = any(file.exists() for file in files) and not is_committed(path.parent)
    return (by_name or by_files) * (
        "is MaxText's checkpoint; convert it with MaxText's to_huggingface, and give that folder "
        '(docs/huggingface.md, "Other formats")'
    )
