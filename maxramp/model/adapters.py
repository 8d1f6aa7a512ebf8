"""Low-rank adapters of a model's weights: LoRA (arXiv 2106.09685). An `Adapted` replaces a
`Weight`. Shapes: B rows, L layers."""

import dataclasses
import itertools
import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxramp.model.families.table import FAMILIES
from maxramp.model.keys import ModelKeys
from maxramp.model.parts.weights import (
    Adapted,
    Weight,
    hash_bits,
    is_weight,
    merge_adapter,
    new_weight,
    part_of,
    weights_of,
)
from maxramp.parallel.sharding import axes_spec, stack_spec

_DTYPE = "float32"  # whatever the base's dtype: updates are small beside the weights


def add_adapters(make_block: Callable[[jax.Array], Any], kind: str, keys: ModelKeys) -> Callable:
    """Wraps `make_block`, which makes a layer of this `Layer.kind` from a random key: its matrices
    in keys.lora_modules get adapters of keys.lora_rank, which must be above 0. As in PEFT, `down`
    begins uniform within 1 / sqrt(inputs) and `up` at zero: the model begins as the base."""
    tensors = FAMILIES[keys.decoder_block].tensors

    def make(key: jax.Array) -> Any:
        def adapt(path: Any, weight: Weight) -> Weight | Adapted:
            path = jax.tree_util.keystr(path, simple=True, separator=".")
            name = tensors[f"layers.{kind}.{path}"]
            if (
                weight.role not in ("matrix", "gate")
                or name.split(".")[-2] not in keys.lora_modules
            ):
                return weight
            return _adapt(weight, keys, jax.random.fold_in(key, zlib.crc32(path.encode())))

        return jax.tree_util.tree_map_with_path(adapt, make_block(key), is_leaf=is_weight)

    return make


def _adapt(weight: Weight, keys: ModelKeys, key: jax.Array) -> Adapted:
    """Puts LoRA's factors beside a weight, sharded as it is; the second one begins at 0, so that
    training begins with the weight alone."""
    sizes = dict(zip(weight.axes, weight.shape, strict=True))
    spec = jax.typeof(weight[...]).sharding.spec.partitions
    parts = dict(zip(weight.axes, (*spec, *(None,) * (weight.ndim - len(spec))), strict=True))
    sizes["r"], parts["r"] = keys.lora_rank, None

    def factor(inputs: str, outputs: str, values: Callable, blocks: tuple = ()) -> Weight:
        shape = tuple(map(sizes.get, inputs + outputs))
        x = values(shape, out_sharding=axes_spec(*map(parts.get, inputs + outputs)))
        return new_weight(x.astype(_DTYPE), "adapter", f"{inputs} {outputs}", blocks=blocks)

    def uniform(shape: tuple[int, ...], out_sharding: Any) -> jax.Array:
        bound = (jnp.prod(jnp.array(shape[:-1])) ** -0.5).astype(jnp.float32)
        return bound * jax.random.uniform(key, shape, jnp.float32, -1, 1, out_sharding=out_sharding)

    down = factor(weight.inputs, "r", uniform)
    up = factor("r", weight.outputs, jnp.zeros, weight.blocks)
    return Adapted(weight, down, up, keys.lora_scale, keys.lora_dropout)


def _is_adapted(x: Any) -> bool:
    return isinstance(x, Adapted)


def is_adapter(weight: Weight) -> bool:
    return weight.role == "adapter"


def has_adapters(model: Any) -> bool:
    return any(map(is_adapter, weights_of(model)))


def stored_part(model: Any) -> Any:
    """Returns the part that checkpoints store: the adapters if there are any, else all weights."""
    return part_of(model, is_adapter) if has_adapters(model) else model


def without_adapters(model: Any) -> Any:
    """Returns the base model, with the same arrays."""
    return jax.tree.map(lambda x: x.weight if _is_adapted(x) else x, model, is_leaf=_is_adapted)


def attach_adapters(adapters: Any, base: Any) -> Any:
    """Returns the model of `adapters`, a model or its `stored_part`, on the weights of `base`, one
    without adapters."""

    def attach(x: Any, weight: Weight) -> Any:
        return dataclasses.replace(x, weight=weight) if _is_adapted(x) else weight

    return jax.tree.map(
        attach, adapters, base, is_leaf=lambda x: x is None or _is_adapted(x) or is_weight(x)
    )


def merge_adapters(model: Any, dtype: str) -> Any:
    """Returns the model with weights W + scale * down @ up, in float32, rounded once to `dtype`;
    weights without adapters stay as they are. Dropout has no part in it."""

    def merge(x: Any) -> Any:
        return x.weight.replace(merge_adapter(x).astype(dtype)) if _is_adapted(x) else x

    return jax.tree.map(merge, model, is_leaf=_is_adapted)


def dropout_of(model: Any) -> float:
    """Returns the rate of dropout of a model's adapters, 0.0 without any."""
    leaves = jax.tree.leaves(model, is_leaf=_is_adapted)
    return next((x.dropout for x in leaves if _is_adapted(x)), 0.0)


def add_dropout(model: Any, row_ids_B3: jax.Array) -> Any:
    """Returns the model with dropout in its adapters, seeded by the number of each row in the run
    (`step.row_ids`, of one pass): the same for any split, mesh or restart. Not in a pipeline.
    Without adapters, or with a rate of 0, it is the same model."""
    numbers = itertools.count(1)

    def add_seeds(x: Any) -> Any:
        if not _is_adapted(x) or not x.dropout:
            return x
        number, layers = next(numbers), x.down.shape[0]
        salt = jnp.uint32(number * 0x9E3779B9 % 2**32)  # differs from adapter to adapter
        low_B, high_B, place_B = (row_ids_B3[:, i] for i in range(3))
        seeds_B = hash_bits((hash_bits(hash_bits(low_B) ^ high_B) ^ place_B) + salt)
        layers_L1 = jnp.arange(layers, dtype=jnp.uint32)[:, None]
        spec = stack_spec(jax.typeof(seeds_B).sharding.spec)
        seeds_1B = jax.lax.reshape(seeds_B, (1, len(seeds_B)), out_sharding=spec)
        return dataclasses.replace(
            x, seeds_B=hash_bits(seeds_1B + layers_L1 * jnp.uint32(0x9E3779B9))
        )

    return jax.tree.map(add_seeds, model, is_leaf=_is_adapted)
