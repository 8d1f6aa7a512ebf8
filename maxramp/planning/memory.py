"""Memory per device: what the shapes decide, and what a pass is estimated to need."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from maxramp.model.size import pass_bytes
from maxramp.parallel.mesh import abstract_mesh
from maxramp.rampup.spec import StageSpec
from maxramp.training.device_memory import GIB
from maxramp.training.keys import Recipe
from maxramp.training.state import abstract_state


def bytes_per_device(tree: Any) -> int:
    """Bytes that a device holds of a tree of abstract arrays on a mesh."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def estimate(recipe: Recipe, spec: StageSpec) -> dict[str, float]:
    """GiB per device in a stage.

    Returns:
      `weights` and `optimizer` exactly as they lie on the mesh; `gradients`: their sums in float32
      and the weights in the arithmetic's dtype; `activations`: an estimate of what one pass keeps
      for its backward pass, plus a block of logits; `total`.
    """
    sizes, model = spec.mesh.sizes, recipe.model
    state = abstract_state(recipe, abstract_mesh(sizes))
    weights = bytes_per_device(state.model)
    count = weights // jnp.dtype(model.weight_dtype).itemsize
    copies = count * jnp.dtype(model.dtype).itemsize
    parts = {
        "weights": weights,
        "optimizer": bytes_per_device(state.opt_state),
        "gradients": 4 * count + (copies if model.dtype != model.weight_dtype else 0),
        "activations": pass_bytes(model, spec, recipe.objective.loss_block_tokens),
    }
    parts["total"] = sum(parts.values())
    return {name: size / GIB for name, size in parts.items()}
