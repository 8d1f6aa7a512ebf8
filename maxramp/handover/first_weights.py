"""The weights that a run begins with: which they are, fixed at its first start."""

from maxramp.checkpoints import folder
from maxramp.checkpoints.folder import Checkpoint
from maxramp.checkpoints.weights import Weights, open_weights
from maxramp.config.keys import Config
from maxramp.errors import ConfigError
from maxramp.files.place import place
from maxramp.huggingface import folder as released
from maxramp.processes import agreement

_KEYS = "load_parameters_path", "load_full_state_path"


def key_of_first_weights(config: Config) -> str:
    """The key that gives them: a run may also continue from a state, with other weights."""
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
    """The weights that a run begins with (`pin_first_weights`); None for new ones."""
    key = key_of_first_weights(config)
    return open_weights(config.values[key], key) if config.values[key] else None


def pin_first_weights(config: Config) -> Config:
    """The configuration with the checkpoint that a run begins with, where the keys give a folder.

    That is the folder's newest at the first start and the same one at every restart: a run's first
    weights do not move when the run that they are of trains on. All processes take that of the
    first, before anything that takes long.
    """

    def find(name: str, position: Checkpoint | None) -> str:
        given, before = config.values[name], position.config[name] if position else ""
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
        return str(moved if found != path and folder.is_committed(moved) else found)

    def find_all() -> dict[str, str]:
        given = [name for name in _KEYS if config.values[name]]
        position = folder.newest(config.run.folder / "checkpoints")[0] if given else None
        return {name: find(name, position) for name in given}

    pinned = agreement.decide_on_first(find_all)
    moved = any(config.values[name] != path for name, path in pinned.items())
    return config.replace(**pinned) if moved else config
