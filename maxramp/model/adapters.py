"""Low-rank adapters of a model's weights: LoRA (arXiv 2106.09685).

An adapted weight is an `Adapted` in the place of a `Weight`: the base's weight, and two matrices of
role "adapter", which alone train. Everything else asks for roles, so it needs to know nothing of
them. `without_adapters` is the base alone: the same model with its adapters off, in no more memory.

Shapes: B rows, L layers.
"""

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
    new_weight,
    part_of,
    weights_of,
)
from maxramp.parallel.sharding import axes_spec, stack_spec

_DTYPE = "float32"  # of adapters, whatever the base's: their steps are small beside them


def add_adapters(born: Callable[[jax.Array], Any], kind: str, keys: ModelKeys) -> Callable:
    """A function from a random key to a block -> one that adds adapters, as the keys say.

    `down` begins at random, uniform within 1 / sqrt(inputs), and `up` at zero, as PEFT has it: so
    the model begins as the base.
    """
    tensors = FAMILIES[keys.decoder_block].tensors

    def make(key: jax.Array) -> Any:
        def adapt(path: Any, weight: Weight) -> Weight | Adapted:
            path = jax.tree_util.keystr(path, simple=True, separator=".")
            name = tensors[f"layers.{kind}.{path}"]
            if weight.role != "matrix" or name.split(".")[-2] not in keys.lora_modules:
                return weight
            own = jax.random.fold_in(key, zlib.crc32(path.encode()))
            return _adapt(weight, keys, own)

        return jax.tree_util.tree_map_with_path(adapt, born(key), is_leaf=is_weight)

    return make


def _adapt(weight: Weight, keys: ModelKeys, key: jax.Array) -> Adapted:
    sizes = dict(zip(weight.axes, weight.shape, strict=True))
    spec = jax.typeof(weight[...]).sharding.spec.partitions
    parts = dict(zip(weight.axes, (*spec, *(None,) * (weight.ndim - len(spec))), strict=True))
    sizes["r"], parts["r"] = keys.lora_rank, None

    def factor(inputs: str, outputs: str, values: Callable) -> Weight:
        shape = tuple(map(sizes.get, inputs + outputs))
        x = values(shape, axes_spec(*map(parts.get, inputs + outputs)))
        return new_weight(x.astype(_DTYPE), "adapter", f"{inputs} {outputs}")

    def uniform(shape: tuple[int, ...], sharding: Any) -> jax.Array:
        bound = (jnp.prod(jnp.array(shape[:-1])) ** -0.5).astype(jnp.float32)
        x = jax.random.uniform(key, shape, jnp.float32, -1, 1, out_sharding=sharding)
        return x * bound

    def zeros(shape: tuple[int, ...], sharding: Any) -> jax.Array:
        return jnp.zeros(shape, jnp.float32, out_sharding=sharding)

    down, up = factor(weight.inputs, "r", uniform), factor("r", weight.outputs, zeros)
    return Adapted(weight, down, up, keys.lora_scale, keys.lora_dropout)


def _is_adapted(x: Any) -> bool:
    return isinstance(x, Adapted)


def is_adapter(weight: Weight) -> bool:
    """Whether a weight is an adapter's."""
    return weight.role == "adapter"


def has_adapters(model: Any) -> bool:
    """Whether weights of a model are adapted."""
    return any(map(is_adapter, weights_of(model)))


def stored_part(model: Any) -> Any:
    """What is stored of a model: its adapters where it has some, and else all."""
    return part_of(model, is_adapter) if has_adapters(model) else model


def without_adapters(model: Any) -> Any:
    """The base: the model with its adapters off, the same arrays."""
    return jax.tree.map(lambda x: x.weight if _is_adapted(x) else x, model, is_leaf=_is_adapted)


def attach_adapters(adapters: Any, base: Any) -> Any:
    """A base, with the adapters of another model that is like it."""

    def attach(x: Any, weight: Weight) -> Any:
        return dataclasses.replace(x, weight=weight) if _is_adapted(x) else weight

    return jax.tree.map(
        attach, adapters, base, is_leaf=lambda x: x is None or _is_adapted(x) or is_weight(x)
    )


def merge_adapters(model: Any, dtype: str) -> Any:
    """A model without adapters that is the same: W + scale * down @ up, summed in float32 and
    rounded once, to `dtype`.
    """

    def sum_of(x: Any) -> Any:
        if not _is_adapted(x):
            return x
        weight = x.weight[...]
        change = jnp.einsum(
            f"{x.down.axes},{x.up.axes}->{x.weight.axes}",
            x.down[...].astype(jnp.float32),
            x.up[...].astype(jnp.float32),
            precision="highest",
            out_sharding=jax.typeof(weight).sharding.spec,
        )
        changed = weight.astype(jnp.float32) + x.scale * change
        return x.weight.replace(changed.astype(dtype))

    return jax.tree.map(sum_of, model, is_leaf=_is_adapted)


def dropout_of(model: Any) -> float:
    """The share of inputs that adapters do not see in training; 0 without any."""
    leaves = jax.tree.leaves(model, is_leaf=_is_adapted)
    return next((x.dropout for x in leaves if _is_adapted(x)), 0.0)


def add_dropout(model: Any, places_B2: jax.Array) -> Any:
    """A model whose adapters drop inputs, others for every row and every weight of every layer.

    The numbers of tokens of the run before each row, uint32, low and high word, decide which:
    neither a split of the batch, a mesh nor a restart changes them, and the same row of a later
    epoch has others.
    """
    counted = itertools.count(1)

    def add_seeds(x: Any) -> Any:
        if not _is_adapted(x) or not x.dropout:
            return x
        number, layers = next(counted), x.down.shape[0]
        of_weight = jnp.uint32(number * 0x9E3779B9 % 2**32)
        seeds_B = hash_bits((hash_bits(places_B2[:, 0]) ^ places_B2[:, 1]) + of_weight)
        layers_L1 = jnp.arange(layers, dtype=jnp.uint32)[:, None]
        spec = stack_spec(jax.typeof(seeds_B).sharding.spec)
        seeds_1B = jax.lax.reshape(seeds_B, (1, len(seeds_B)), out_sharding=spec)
        return dataclasses.replace(
            x, seeds_B=hash_bits(seeds_1B + layers_L1 * jnp.uint32(0x9E3779B9))
        )

    return jax.tree.map(add_seeds, model, is_leaf=_is_adapted)
