"""Models of folders on meshes of this process's devices."""

import functools
import pathlib

import jax
import numpy as np
from conftest import make_config, make_mesh

from maxramp.huggingface import folder as released
from maxramp.huggingface import reading
from maxramp.model.decoder import Decoder
from maxramp.training.state import abstract_state


def config_of(folder: pathlib.Path, *keys: str, devices: int = 1):
    """The keys of a folder's config.json, with others."""
    found = released.find("load_parameters_path", str(folder)).keys
    given = [f"{name}={str(value).replace(' ', '')}" for name, value in found.items()]
    constant = ("enable_rampup_batch_size=False", "dataset_type=synthetic")
    constant += ("max_target_length=24", "per_device_batch_size=1")
    return make_config(*constant, *given, *keys, devices=devices)


def load(folder: pathlib.Path, config, note=lambda line: None) -> Decoder:
    """The weights, on the config's mesh."""
    model = abstract_state(config.recipe, make_mesh(config)).model
    found = released.find("load_parameters_path", str(folder))
    rows, block = found.keys["vocab_size"], config.model.decoder_block
    return reading.prepare_load(found.path, found.tensors, rows, model, block, note)()


def logits(model: Decoder, config, tokens_BT: np.ndarray) -> np.ndarray:
    """[B, T, V] of rows, of which there are as many as the mesh takes."""
    forward = functools.partial(Decoder.__call__, execution=config.model)
    with jax.set_mesh(make_mesh(config)):
        return np.asarray(jax.jit(forward)(model, tokens_BT))
