"""The weights that a run of reinforcement learning begins with, and may stay near to."""

from collections.abc import Callable

from maxramp.checkpoints.fingerprint import fingerprint_of_weights
from maxramp.checkpoints.parameters import load_parameters
from maxramp.commandline import print_note, shell_quote
from maxramp.config.keys import Config
from maxramp.errors import ConfigError
from maxramp.files.place import Place, place
from maxramp.handover.opening import open_model
from maxramp.job.start import Job
from maxramp.keys import base
from maxramp.model.decoder import Decoder
from maxramp.model.keys import MODEL_KEYS
from maxramp.model.order import order_by_layer

# What weights were trained as: the model that they make, and the documents with their tokenizer.
_DATA = (
    *("dataset_type", "text_files", "grain_train_files", "grain_file_type", "hf_path", "hf_name"),
    *("tokenizer_type", "tokenizer_path", "tokenize_train_data", "add_bos", "add_eos"),
)
_SUMS = "configs/pre_train/sums.yml"  # of a model for the prompts that come from no file


def path_of(config: Config) -> Place:
    """Where a run's first weights are: a checkpoint, or a folder of them or of a run.

    Raises:
      ConfigError: no weights are given.
    """
    if path := config.values[_key(config)]:
        return place(path)
    raise ConfigError(
        "load_parameters_path is empty: reinforcement learning begins with the weights of a model "
        "that can answer at times; give a run or a checkpoint"
    )


def with_weights(config: Config, note: Callable[[str], None] = print_note) -> Config:
    """The configuration with the sizes that its first weights have and the tokenizer they know.

    Args:
      config: loaded.
      note: takes a line about sizes that the keys give otherwise.

    Raises:
      ConfigError: there is no such checkpoint, or it does not suit the keys.
    """
    weights = path_of(config)
    try:
        there = open_model(str(weights), []).config.values
    except ConfigError as error:
        if config.rollout.prompt_file:
            raise
        where = shell_quote([f"base_output_directory={weights.parent}", f"run_name={weights.name}"])
        raise ConfigError(
            f"{_key(config)}={weights}: no checkpoint there; this trains one that can add at "
            f"times: python -m maxramp.train {_SUMS} {where}"
        ) from error
    of_weights = {name: there[name] for name in (*MODEL_KEYS, *_DATA)}
    other = [
        f"{name}={there[name]}"
        for name, default in base.base().items()
        if name in MODEL_KEYS and config.values[name] not in (there[name], default)
    ]
    if other:
        note(f"{weights} has {', '.join(other)}; these sizes are taken")
    if not config.rollout.eval_prompt_file:
        of_weights["eval_interval"] = -1
    config = config.replace(**of_weights)
    config.check()
    return config


def load_reference(job: Job, model: Decoder) -> Decoder:
    """The first weights as the reference; every checkpoint of the run keeps their hash.

    Args:
      job: of a run that begins with them.
      model: their shapes, dtypes and shardings.

    Raises:
      ConfigError: they cannot be read, or are not those that the run stayed near to so far.
    """
    config, checkpoints, position = job.config, job.checkpoints, job.span.position
    key, path = _key(config), path_of(config)
    weights = load_parameters(str(path), model, config.values)
    checkpoints.reference = fingerprint_of_weights(order_by_layer(weights))
    here = (job.output.folder / "checkpoints").absolute()
    so_far = position.reference if position and position.path.parent == here else ""
    if so_far not in ("", checkpoints.reference) and key not in config.checkpoints.allow_changed:
        raise ConfigError(
            f"{key}={path}: not the weights that the run's KL divergence is from (hash "
            f"{checkpoints.reference}, was {so_far}); give those, allow_changed=[{key}], or "
            "another run_name"
        )
    return weights


def _key(config: Config) -> str:
    full = config.checkpoints.load_full_state_path
    return "load_full_state_path" if full else "load_parameters_path"
