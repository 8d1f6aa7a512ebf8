"""The weights that a run begins with: which they are, fixed at its first start."""

import contextlib

from maxramp.checkpoints import folder
from maxramp.checkpoints.folder import Checkpoint
from maxramp.checkpoints.weights import Weights, open_weights
from maxramp.config.keys import Config
from maxramp.errors import ConfigError
from maxramp.files.place import Place, place
from maxramp.huggingface import folder as released
from maxramp.processes import agreement

_KEYS = "load_parameters_path", "load_full_state_path"


def key_of_first_weights(config: Config) -> str:
    """A run may also continue from a state, with other weights."""
    return next((name for name in _KEYS if config.values[name]), _KEYS[0])


def check_first_weights(config: Config) -> None:
    """Refuses a run that needs weights to begin with where no key gives them."""
    values, key = config.values, key_of_first_weights(config)
    if config.run.program == "grpo":
        needs = "reinforcement learning begins with the weights of a model that can answer at times"
    elif config.data.use_dpo:
        needs = "use_dpo=True begins with the weights of a model, and stays near to them"
    elif config.model.lora_rank:
        needs = f"lora_rank={config.model.lora_rank} adapts the weights of a model"
    else:
        return
    if not values[key]:
        raise ConfigError(f"{key} is empty: {needs}; give its folder, a run or a checkpoint")


def open_first_weights(config: Config) -> Weights | None:
    key = key_of_first_weights(config)
    return open_weights(config.values[key], key) if config.values[key] else None


def find_first_weights(config: Config) -> dict[str, str]:
    """The weights that a run begins with, by the keys that give them: paths of one checkpoint each,
    or of a Hugging Face folder.

    Of another run's folder that is the newest at the first start and the same one at every restart,
    also where that run has moved: a run's first weights do not change when the run that they are of
    trains on. A ConfigError says that they are the run's own.
    """
    given = {name: config.values[name] for name in _KEYS if config.values[name]}
    own = config.run.folder.absolute()
    for name, path in given.items():
        if own in (within := place(path).absolute(), *within.parents):
            raise ConfigError(
                f"{name}={path}: lies in this run's own folder, whose checkpoints come and go; "
                "leave it out or give what the run began with, which continues the run; or give "
                "another run_name"
            )
    position = folder.newest(own / "checkpoints")[0] if given else None
    return {name: _find(name, path, position) for name, path in given.items()}


def _find(name: str, given: str, position: Checkpoint | None) -> str:
    before, state = (position.config[name], position.first.get(name)) if position else ("", "")
    path, began = place(given).absolute(), place(before).absolute()
    if before and path in (began, began.parent / folder.BEST, *began.parents[:2]):
        return before
    if name == _KEYS[0] and released.find(name, given):
        return given
    try:
        found = folder.find(path)
    except ConfigError as error:
        raise ConfigError(f"{name}={given}: {error}") from None
    moved = found.with_name(began.name)  # with the other run
    return str(moved if found != path and state and _state_at(moved) == state else found)


def _state_at(path: Place) -> str:
    with contextlib.suppress(ConfigError):
        return folder.read(path).saved if folder.is_committed(path) else ""
    return ""


def states_of_first_weights(config: Config, position: Checkpoint | None) -> dict[str, str]:
    """What `Checkpoint.first` keeps of pinned weights; `position` is the run's newest checkpoint,
    as what it began with may be gone.
    """
    given = {name: config.values[name] for name in _KEYS if config.values[name]}
    return {
        name: position.first.get(name, "")
        if position and position.config[name] == path
        else _state_at(place(path))
        for name, path in given.items()
    }


def pin_first_weights(config: Config) -> Config:
    """The configuration with the paths that `find_first_weights` finds on the first process."""
    pinned = agreement.decide_on_first(lambda: find_first_weights(config))
    moved = any(config.values[name] != path for name, path in pinned.items())
    return config.replace(**pinned) if moved else config
