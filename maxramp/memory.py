"""Memory per device: what the shapes decide, what a pass is estimated to need, what a compiler
says."""

import functools
import math
from typing import Any

import jax
from jax.sharding import AbstractMesh

from maxramp.config import Config, mesh_sizes
from maxramp.mesh import AXIS_TYPE
from maxramp.rampup import Stage
from maxramp.step import TrainState, init_state

GIB = 2**30


def abstract_train_state(config: Config) -> tuple[TrainState, dict[str, int]]:
    """Shapes and shardings of the train state on the mesh of a resolved config, without devices."""
    sizes = mesh_sizes(config)
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AXIS_TYPE,) * len(sizes))
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.eval_shape(functools.partial(init_state, config)), sizes


def bytes_per_device(tree: Any, sizes: dict[str, int]) -> int:
    """Bytes that a device holds of a tree of abstract arrays on a mesh of these sizes."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        spec = leaf.sharding.spec if leaf.sharding else ()
        axes = [
            axis for part in spec if part for axis in ([part] if isinstance(part, str) else part)
        ]
        total += leaf.size * leaf.dtype.itemsize // math.prod(sizes[axis] for axis in axes)
    return total


def estimate(config: Config, stage: Stage) -> dict[str, float]:
    """GiB per device in a stage, on the mesh that `config` is resolved for.

    Returns:
      `weights` and `optimizer` exactly as they lie on the mesh; `gradients`: their sums in float32
      and the weights in the arithmetic's dtype; `activations`: an estimate of what one pass keeps
      for its backward pass, plus a block of logits; `total`.
    """
    state, sizes = abstract_train_state(config)
    weights = bytes_per_device(state.model, sizes)
    optimizer = bytes_per_device(state.opt_state, sizes)
    count = weights // jax.numpy.dtype(config.weight_dtype).itemsize
    copies = count * jax.numpy.dtype(config.dtype).itemsize
    parts = {
        "weights": weights,
        "optimizer": optimizer,
        "gradients": 4 * count + (copies if config.dtype != config.weight_dtype else 0),
        "activations": _activation_bytes(config, stage, sizes),
    }
    parts["total"] = sum(parts.values())
    return {name: size / GIB for name, size in parts.items()}


def _activation_bytes(config: Config, stage: Stage, sizes: dict[str, int]) -> float:
    """The tensors that a layer's backward pass reads, by what remat keeps of them."""
    itemsize, tensor = jax.numpy.dtype(config.dtype).itemsize, sizes["tensor"]
    rows = stage.micro_batch_size / (sizes["data"] * sizes["fsdp"])
    T, D, F = config.max_target_length, config.base_emb_dim, config.base_mlp_dim / tensor
    heads = config.base_num_query_heads / tensor
    kv_heads = config.base_num_kv_heads / tensor
    tokens = rows * T
    stream = tokens * D * itemsize
    products = tokens * ((2 * heads + 2 * kv_heads) * config.head_dim + 2 * F) * itemsize
    # A kernel makes no scores; autoselected is taken to find one for an accelerator's dtype.
    kernel = config.attention in ("cudnn_flash", "splash")
    kernel |= config.attention == "autoselected" and config.dtype != "float32"
    scores = 0 if kernel else rows * heads * T * T * (4 + itemsize)
    everything = 4 * stream + 2 * tokens * D * 4 + products + tokens * 2 * F * itemsize + scores
    kept = {"full": stream, "minimal": 3 * stream + products, "none": everything}
    one_layer = 0 if config.remat_policy == "none" else everything
    block = min(tokens, config.loss_block_tokens or tokens)
    logits = (block * (2 * 4 + itemsize) + D * 4) * config.vocab_size / tensor
    layers = config.base_num_decoder_layers
    return layers * kept[config.remat_policy] + max(one_layer, logits)


def device_memory(config: Config) -> int:
    """Bytes of a device: `device_memory_gib`, or what the device reports; 0 where it does not."""
    if config.device_memory_gib != -1:
        return int(config.device_memory_gib * GIB)
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)


def compiled_bytes(compiled: Any) -> int:
    """Peak bytes per device of a compiled program, by the compiler's own account."""
    analysis = compiled.memory_analysis()
    return (
        analysis.argument_size_in_bytes
        + analysis.output_size_in_bytes
        - analysis.alias_size_in_bytes
        + analysis.temp_size_in_bytes
    )
