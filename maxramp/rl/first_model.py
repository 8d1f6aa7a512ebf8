"""Weights to begin with: those that are given, or of a first model of the sums, trained once.

The first model is a run of its own beside the run that begins with it, of the same sizes.
"""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from maxramp.checkpoints import folder as folder_lib
from maxramp.checkpoints.folder import TornError
from maxramp.commandline import print_note
from maxramp.config.checks import check
from maxramp.config.keys import Config
from maxramp.errors import EXIT_PREEMPTED, ConfigError, TrainingError
from maxramp.folders.place import Place, place, write_whole
from maxramp.generation.loading import TrainedRun
from maxramp.keys import base
from maxramp.model.keys import SHAPE_KEYS, ModelKeys
from maxramp.parallel import agreement
from maxramp.parallel.keys import BackendKeys, MeshKeys
from maxramp.run.preemption import Preemption

_DOCUMENTS = 40_000
_SHARE_ANSWERED = 0.15  # of the sums that the first model reads

# What weights were trained as: the model that they make, and the documents with their tokenizer.
_MODEL = (
    *SHAPE_KEYS,
    "mlp_activations",
    "normalization_layer_epsilon",
    "rope_max_timescale",
)
_DATA = (
    *("dataset_type", "text_files", "grain_train_files", "grain_file_type", "hf_path", "hf_name"),
    *("tokenizer_type", "tokenizer_path", "tokenize_train_data", "add_bos", "add_eos"),
)


def is_ours(config: Config) -> bool:
    """Whether no weights are given."""
    keys = config.checkpoints
    return not (keys.load_parameters_path or keys.load_full_state_path)


def weights_of(config: Config) -> Place:
    """Where a run's first weights are; the folder of its first model where none are given.

    Raises:
      ConfigError: the prompts are the user's, and no weights are given.
    """
    if not is_ours(config):
        keys = config.checkpoints
        return place(keys.load_parameters_path or keys.load_full_state_path)
    if config.rollout.prompt_file or not config.rollout.pretrain_steps:
        raise ConfigError(
            "load_parameters_path is empty: reinforcement learning begins with the weights of a "
            "model that can answer at times; give a run or a checkpoint"
        )
    name = f"{config.run.run_name or config.run.model_name}-first-model"
    return place(config.run.base_output_directory).expanduser() / name


def with_weights(
    config: Config, weights: Place, note: Callable[[str], None] = print_note
) -> Config:
    """The configuration with these first weights, the sizes they have and the tokenizer they know.

    Args:
      config: loaded.
      weights: a checkpoint, or a run's folder.
      note: takes a line about sizes that the keys give otherwise.

    Raises:
      ConfigError: there is no such checkpoint, or it does not suit the keys.
    """
    there = TrainedRun(weights, []).checkpoint.config
    of_weights = {name: there[name] for name in (*_MODEL, *_DATA) if name in there}
    if other := _other_sizes(config, there):
        note(f"{weights} has {other}; these sizes are taken")
    if not config.checkpoints.load_full_state_path:
        of_weights["load_parameters_path"] = str(weights)
    config = config.replace(**of_weights, eval_interval=-1)  # there is no text to hold out
    check(config)
    return config


def settled(config: Config, run: Place) -> Config:
    """The configuration with the checkpoint that a run begins with, where it gives a folder.

    That is the folder's newest at the first start, and the same one at every restart: the weights
    to stay near do not move when the other run trains on. All processes take that of the first.

    Args:
      config: with first weights.
      run: the folder of the run that begins with them.

    Raises:
      ConfigError: there is no checkpoint, or the one that is needed is gone.
    """
    keys = config.checkpoints
    name = "load_full_state_path" if keys.load_full_state_path else "load_parameters_path"
    given = place(getattr(keys, name)).expanduser().absolute()

    def find() -> str:
        if jax.process_index():
            return ""
        found = folder_lib.find(given)
        if found == given or not (began := _begun_with(run, name)):
            return str(found)
        if (
            config.policy.grpo_beta
            and began.exists()
            and began.parent.resolve() != found.parent.resolve()
        ):
            raise ConfigError(
                f"{name}={given}: the run began with {began}, which its KL divergence is from; "
                "give that, or the checkpoint that it shall be from now on"
            )
        found = found.with_name(began.name)  # also where all of them were moved
        if config.policy.grpo_beta and not found.is_dir():
            raise ConfigError(
                f"{name}={given}: the run began with its checkpoint {began.name}, which is gone; "
                "put it back, or give the checkpoint that the KL divergence shall be from"
            )
        return str(found)

    path = agreement.all_gather_json(agreement.raise_everywhere(find))[0]
    return config.replace(**{name: path})


def _begun_with(run: Place, name: str) -> Place | None:
    """The checkpoint that a run began with; None where it has not begun, or is older."""
    folder = run / "checkpoints"
    for step in reversed(folder_lib.steps_in(folder)):
        with contextlib.suppress(TornError):
            began = place(folder_lib.read(folder / str(step)).config.get(name, ""))
            return began if folder_lib.is_step(began.name) else None
    return None


def train(config: Config, folder: Place, preemption: Preemption) -> int:
    """Trains the first model with `maxramp.train`, unless it is there: several processes of a job
    train it together, as they train what follows.

    Args:
      config: of the run that begins with it.
      folder: of the first model's run.
      preemption: hands signals on to it.

    Returns:
      0, or after a signal EXIT_PREEMPTED, or what it ended with.

    Raises:
      ConfigError: the folder holds a model of other documents.
      TrainingError: it was not trained.
    """
    documents, text = folder / "sums.jsonl", _documents(config.rollout.sums_below)
    if documents.exists() and documents.read_bytes() == text:
        if _is_trained(config, folder):
            return 0
    elif _has_checkpoint(folder):  # of what was there, which these documents would hide
        raise ConfigError(
            f"sums_below={config.rollout.sums_below}: {folder} holds a model of other data; take "
            "another run_name, or move it away"
        )
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(documents, text)
    sections = (ModelKeys, BackendKeys, MeshKeys)
    names = [field.name for section in sections for field in dataclasses.fields(section)]
    given = {key: config.values[key] for key in names} | {
        "run_name": folder.name,
        "base_output_directory": str(folder.parent),
        "dataset_type": "grain",
        "grain_train_files": str(documents),
        "global_batch_size": 64,
        "steps": config.rollout.pretrain_steps,
        "num_epoch": 1000,
        "eval_interval": -1,
        "checkpoint_period": config.checkpoints.checkpoint_period,
        "max_num_checkpoints_to_keep": 1,
        "enable_tensorboard": False,
        "log_period": 100,
    }
    arguments = [f"{key}={v if isinstance(v, str) else json.dumps(v)}" for key, v in given.items()]
    command = [sys.executable, "-m", "maxramp.train", str(base.CONFIGS / "base.yml"), *arguments]
    bound = [sys.executable, "-m", "maxramp.launch.bound", str(os.getpid())]
    process = subprocess.Popen([*bound, *command])
    with preemption.handing_on(process) as was_signalled:
        status = process.wait()
    if was_signalled():  # before it listened, or when it was done, it cannot say so itself
        return status if status > 0 else EXIT_PREEMPTED
    if status not in (0, EXIT_PREEMPTED):
        raise TrainingError(
            f"the first model, {folder}, was not trained (exit status {status}; its own line says "
            "why); or give load_parameters_path"
        )
    return status


def _has_checkpoint(folder: Place) -> bool:
    try:
        folder_lib.find(folder)
    except ConfigError:
        return False
    return True


def _is_trained(config: Config, folder: Place) -> bool:
    try:
        found = folder_lib.read(folder_lib.find(folder))
    except (ConfigError, TornError):
        return False
    return found.step >= config.rollout.pretrain_steps and not _other_sizes(config, found.config)


def _other_sizes(config: Config, there: Mapping[str, Any]) -> str:
    """The sizes of weights that differ from those that the keys give, in one line."""
    other = {name: there[name] for name in _MODEL if there.get(name) != config.values[name]}
    return ", ".join(f"{name}={value}" for name, value in other.items())


def _documents(bound: int) -> bytes:
    """Sums as JSON lines, most of them left open: a model of these can answer, and seldom does."""
    random = np.random.default_rng(0)
    lines = []
    for _ in range(_DOCUMENTS):
        a, b = (int(x) for x in random.integers(0, bound, 2))
        answer = a + b if random.random() < _SHARE_ANSWERED else "?"
        lines.append(json.dumps({"text": f"{a}+{b}={answer}"}))
    return "\n".join(lines).encode() + b"\n"
