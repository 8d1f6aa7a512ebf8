"""Models of folders on meshes of this process's devices."""

import functools
import pathlib

import jax
import numpy as np
from conftest import make_config, make_mesh

from maxramp.huggingface import folder as released
from maxramp.huggingface import reading
from maxramp.huggingface.names import name_tensors
from maxramp.huggingface.safetensors import find_tensors
from maxramp.model.decoder import Decoder
from maxramp.training.state import abstract_state


def config_of(folder: pathlib.Path, *keys: str, devices: int = 1):
    """The keys of a folder's config.json, with others."""
    folder_keys = released.find("load_parameters_path", str(folder)).keys
    arguments = [f"{name}={str(value).replace(' ', '')}" for name, value in folder_keys.items()]
    constant = ("enable_rampup_batch_size=False", "dataset_type=synthetic")
    constant += ("max_target_length=24", "per_device_batch_size=1", "head_dim=32")
    return make_config(*constant, *arguments, *keys, devices=devices)


def load(folder: pathlib.Path, config, note=lambda line: None) -> Decoder:
    """The weights, on the config's mesh."""
    model = abstract_state(config.recipe, make_mesh(config)).model
    source = released.find("load_parameters_path", str(folder))
    rows, block = source.keys["vocab_size"], config.model.decoder_block
    return reading.prepare_load(source.path, source.tensors, rows, model, block, note)()


def logits(model: Decoder, config, tokens_BT: np.ndarray) -> np.ndarray:
    """[B, T, V] of rows, of which there are as many as the mesh takes."""
    forward = functools.partial(Decoder.__call__, execution=config.model)
    with jax.set_mesh(make_mesh(config)):
        return np.asarray(jax.jit(forward)(model, tokens_BT))


def contents(folder) -> dict[str, np.ndarray]:
    """The tensors of a folder's files."""
    return {name: x.read(0, x.rows) for name, x in find_tensors(str(folder)).items()}


def assert_equal(folder, other) -> None:
    """The tensors of two folders must have the same names and bits."""
    jax.tree.map(np.testing.assert_array_equal, contents(folder), contents(other))


def named_arrays(model: Decoder, decoder_block: str) -> dict[str, np.ndarray]:
    """The weights of a model, or their gradients, by the names and in the form of its tensors."""
    arrays = {}
    for weight in name_tensors(model, decoder_block):
        (stack,) = map(np.asarray, jax.tree.leaves(weight.weight))
        for index, name in weight.names.items():
            x = stack[index].transpose(weight.form.order).reshape(weight.form.tensor_shape)
            arrays[name] = x[np.argsort(weight.form.rows)] if weight.form.blocks else x
    return arrays
