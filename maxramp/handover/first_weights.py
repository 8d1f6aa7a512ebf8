"""The weights that a run begins with: which they are, fixed at its first start."""

import contextlib
import dataclasses
import functools

from maxramp.checkpoints import folder, starts
from maxramp.config.keys import Config
from maxramp.errors import ConfigError
from maxramp.files.place import Place, place
from maxramp.handover.weights import Weights, open_weights
from maxramp.huggingface import folder as released
from maxramp.keys.yamlfile import read_yaml
from maxramp.processes import agreement

_KEYS = "load_parameters_path", "load_full_state_path"


@dataclasses.dataclass(frozen=True)
class FirstWeights:
    """The weights that a run begins with: `path` is the value of `key`, "" for new ones."""

    key: str
    path: str
    states: dict[str, str]  # as `Checkpoint.first`

    @functools.cached_property
    def weights(self) -> Weights | None:
        """The weights, None for new ones; opened at the first use, as a restart may not need them
        and then they may be gone."""
        return open_weights(self.path, self.key) if self.path else None


def key_of_first_weights(config: Config) -> str:
    """Returns the key that names them: a run may also begin with a state and other weights."""
    for name in _KEYS:
        if config.values[name]:
            return name
    return _KEYS[0]


def check_first_weights(config: Config) -> None:
    """Refuses a run that needs weights to begin with, and has no key that names them."""
    values, key = config.values, key_of_first_weights(config)
    needs = config.objective.needs_weights
    if not needs and config.model.lora_rank:
        needs = f"lora_rank={config.model.lora_rank} adapts the weights of a model"
    if needs and not values[key]:
        raise ConfigError(f"{key} is empty: {needs}; give its folder, a run or a checkpoint")


def pin_first_weights(config: Config) -> tuple[Config, FirstWeights]:
    """Returns the configuration with the paths that `find_first_weights` finds on process 0."""
    weights = agreement.decide_on_first(lambda: find_first_weights(config))
    paths = {name: path for name, (path, _) in weights.items()}
    states = {name: saved for name, (_, saved) in weights.items()}
    if any(config.values[name] != path for name, path in paths.items()):
        config = config.replace(**paths)
    key = key_of_first_weights(config)
    return config, FirstWeights(key, config.values[key], states)


def find_first_weights(config: Config) -> dict[str, tuple[str, str]]:
    """Finds the weights that a run begins with, by the keys that name them: the path of one
    checkpoint and its `saved`, or of a Hugging Face folder and "".

    The folder of another run means its newest checkpoint at the first start and the same one at
    every restart, even if that run has trained on or was moved. Raises a ConfigError if the path
    lies in the run's own folder.
    """
    return {name: _find(name, config) for name in _KEYS if config.values[name]}


def _find(name: str, config: Config) -> tuple[str, str]:
    value, own = config.values[name], config.run.folder
    path = place(value).absolute()
    position, _ = folder.newest(own / "checkpoints")
    before = position.config[name] if position else _path_at_start(name, own)
    first = place(before).absolute()
    state = position.first.get(name, "") if position and before else _state_at(first)
    same = first, first.parent / folder.BEST, *first.parents[:2]  # its folder, its run
    if before and (position or state) and path in same:
        return before, state
    if name == _KEYS[0] and released.find(name, value):
        return value, ""
    if own.resolve() in (path.resolve(), *path.resolve().parents):
        remedy = f"give {before}" if before else "leave it out"
        remedy = f"to continue the run {remedy}" if position else "give weights from elsewhere"
        raise ConfigError(
            f"{name}={value}: lies in this run's own folder, whose checkpoints come and go; "
            f"{remedy}, or another run_name"
        )
    try:
        newest = folder.find(path)
    except ConfigError as error:
        raise ConfigError(f"{name}={value}: {error}, or that of a released model") from None
    moved = newest.with_name(first.name)  # with the other run
    if newest != path and state and _state_at(moved) == state:
        return str(moved), state
    return str(newest), _state_at(newest)


def _path_at_start(name: str, own: Place) -> str:
    """Returns the path that a run began with, if it has snapshots and no checkpoint yet."""
    for file in (own / "config.resolved.yml", own / "config.yml"):
        if file.is_file():
            has_snapshots = starts.read(own).directory is not None
            return read_yaml(file).get(name, "") if has_snapshots else ""
    return ""


def _state_at(path: Place) -> str:
    """Returns the name of the state that a checkpoint holds, "" if it holds none."""
    with contextlib.suppress(ConfigError):
        return folder.read(path).saved if folder.is_committed(path) else ""
    return ""
