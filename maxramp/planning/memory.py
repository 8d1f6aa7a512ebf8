"""Memory per device: what the shapes decide, and what a pass is estimated to need."""

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from maxramp.model.size import pass_bytes
from maxramp.parallel.axes import BATCH_AXES
from maxramp.parallel.mesh import AXIS_TYPE
from maxramp.rampup.schedule import Stage
from maxramp.training.device_memory import GIB
from maxramp.training.keys import Recipe
from maxramp.training.state import TrainState, init_state


def state_without_devices(recipe: Recipe, sizes: Mapping[str, int]) -> TrainState:
    """Shapes and shardings of the train state on a mesh of these sizes, without devices."""
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AXIS_TYPE,) * len(sizes))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.eval_shape(functools.partial(init_state, recipe))


def bytes_per_device(tree: Any, sizes: Mapping[str, int]) -> int:
    """Bytes that a device holds of a tree of abstract arrays on a mesh of these sizes."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        spec = leaf.sharding.spec if leaf.sharding else ()
        axes = [
            axis for part in spec if part for axis in ([part] if isinstance(part, str) else part)
        ]
        total += leaf.size * leaf.dtype.itemsize // math.prod(sizes[axis] for axis in axes)
    return total


def estimate(recipe: Recipe, sizes: Mapping[str, int], stage: Stage) -> dict[str, float]:
    """GiB per device in a stage, on a mesh of these sizes.

    Returns:
      `weights` and `optimizer` exactly as they lie on the mesh; `gradients`: their sums in float32
      and the weights in the arithmetic's dtype; `activations`: an estimate of what one pass keeps
      for its backward pass, plus a block of logits; `total`.
    """
    state, model = state_without_devices(recipe, sizes), recipe.model
    weights = bytes_per_device(state.model, sizes)
    count = weights // jnp.dtype(model.weight_dtype).itemsize
    copies = count * jnp.dtype(model.dtype).itemsize
    rows = stage.micro_batch_size / math.prod(sizes[axis] for axis in BATCH_AXES)
    parts = {
        "weights": weights,
        "optimizer": bytes_per_device(state.opt_state, sizes),
        "gradients": 4 * count + (copies if model.dtype != model.weight_dtype else 0),
        "activations": pass_bytes(
            model, rows, sizes["tensor"], recipe.objective.loss_block_tokens, sizes["stage"]
        ),
    }
    parts["total"] = sum(parts.values())
    return {name: size / GIB for name, size in parts.items()}
