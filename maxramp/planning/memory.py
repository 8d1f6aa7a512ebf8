"""Memory per device: what the shapes decide, and what a pass is estimated to need."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxramp.model.size import pass_bytes
from maxramp.parallel.axes import BATCH_AXES
from maxramp.parallel.mesh import abstract_mesh
from maxramp.rampup.schedule import Stage
from maxramp.training.device_memory import GIB
from maxramp.training.keys import Recipe
from maxramp.training.state import abstract_state


def bytes_per_device(tree: Any) -> int:
    """Bytes that a device holds of a tree of abstract arrays on a mesh."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def estimate(recipe: Recipe, sizes: Mapping[str, int], stage: Stage) -> dict[str, float]:
    """GiB per device in a stage, on a mesh of these sizes.

    Returns:
      `weights` and `optimizer` exactly as they lie on the mesh; `gradients`: their sums in float32
      and the weights in the arithmetic's dtype; `activations`: an estimate of what one pass keeps
      for its backward pass, plus a block of logits; `total`.
    """
    state, model = abstract_state(recipe, abstract_mesh(sizes)), recipe.model
    weights = bytes_per_device(state.model)
    count = weights // jnp.dtype(model.weight_dtype).itemsize
    copies = count * jnp.dtype(model.dtype).itemsize
    rows = stage.micro_batch_size / math.prod(sizes[axis] for axis in BATCH_AXES)
    parts = {
        "weights": weights,
        "optimizer": bytes_per_device(state.opt_state),
        "gradients": 4 * count + (copies if model.dtype != model.weight_dtype else 0),
        "activations": pass_bytes(
            model, rows, sizes["tensor"], recipe.objective.loss_block_tokens, sizes["stage"]
        ),
    }
    parts["total"] = sum(parts.values())
    return {name: size / GIB for name, size in parts.items()}
