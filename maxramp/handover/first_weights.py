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
    """What a run begins with; the `path` is the value of `key`, "" for new weights."""

    key: str
    path: str
    states: dict[str, str]  # as `Checkpoint.first`

    @functools.cached_property
    def weights(self) -> Weights | None:
        """Opened when somebody asks first: a restart may not need them, and then they may be gone.
        None for new ones.
        """
        return open_weights(self.path, self.key) if self.path else None


def key_of_first_weights(config: Config) -> str:
    """A run may also continue from a state, with other weights."""
    return next((name for name in _KEYS if config.values[name]), _KEYS[0])


def check_first_weights(config: Config) -> None:
    """Refuses a run that needs weights to begin with where no key gives them."""
    values, key = config.values, key_of_first_weights(config)
    needs = config.objective.needs_weights
    if not needs and config.model.lora_rank:
        needs = f"lora_rank={config.model.lora_rank} adapts the weights of a model"
    if needs and not values[key]:
        raise ConfigError(f"{key} is empty: {needs}; give its folder, a run or a checkpoint")


def pin_first_weights(config: Config) -> tuple[Config, FirstWeights]:
    """The configuration with the paths that `find_first_weights` finds on the first process."""
    found = agreement.decide_on_first(lambda: find_first_weights(config))
    paths, states = ({name: pair[i] for name, pair in found.items()} for i in (0, 1))
    if any(config.values[name] != path for name, path in paths.items()):
        config = config.replace(**paths)
    key = key_of_first_weights(config)
    return config, FirstWeights(key, config.values[key], states)


def find_first_weights(config: Config) -> dict[str, tuple[str, str]]:
    """The weights that a run begins with, by the keys that give them: the path of one checkpoint
    and its `saved`, or of a Hugging Face folder and "".

    Of another run's folder that is the newest at the first start and the same one at every restart,
    also where that run has moved: a run's first weights do not change when the run that they are of
    trains on. A ConfigError says that they are the run's own.
    """
    return {name: _find(name, config) for name in _KEYS if config.values[name]}


def _find(name: str, config: Config) -> tuple[str, str]:
    given, own = config.values[name], config.run.folder
    path = place(given).absolute()
    position, _ = folder.newest(own / "checkpoints")
    before = position.config[name] if position else _named_at_start(name, own)
    began = place(before).absolute()
    state = position.first.get(name, "") if position and before else _state_at(began)
    names = began, began.parent / folder.BEST, *began.parents[:2]
    if before and (position or state) and path in names:
        return before, state
    if name == _KEYS[0] and released.find(name, given):
        return given, ""
    if own.resolve() in (path.resolve(), *path.resolve().parents):
        remedy = f"give {before}" if before else "leave it out"
        remedy = f"to continue the run {remedy}" if position else "give weights from elsewhere"
        raise ConfigError(
            f"{name}={given}: lies in this run's own folder, whose checkpoints come and go; "
            f"{remedy}, or another run_name"
        )
    try:
        found = folder.find(path)
    except ConfigError as error:
        raise ConfigError(f"{name}={given}: {error}, or that of a released model") from None
    moved = found.with_name(began.name)  # with the other run
    if found != path and state and _state_at(moved) == state:
        return str(moved), state
    return str(found), _state_at(found)


def _named_at_start(name: str, own: Place) -> str:
    """The path of a run's last start, whose snapshots may be there without a checkpoint."""
    files = (own / file for file in ("config.resolved.yml", "config.yml"))
    config = next((file for file in files if file.is_file()), None)
    kept = config and starts.read(own).directory is not None
    return read_yaml(config).get(name, "") if kept else ""


def _state_at(path: Place) -> str:
    with contextlib.suppress(ConfigError):
        return folder.read(path).saved if folder.is_committed(path) else ""
    return ""
