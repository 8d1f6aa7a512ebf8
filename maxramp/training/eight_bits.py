"""Scales of products in 8 bits: they come from the whole step before.

`TrainState.buffers` holds the largest exponents of what each matrix of the layers met in the last
step. The first batch of a run counts them without an update (`step.count_exponents`).

Shapes: N layers of all matrices, one matrix after the other.
"""

import math
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from maxramp.errors import ConfigError
from maxramp.model.decoder import Decoder, kind_at
from maxramp.model.parts.products import (
    BUCKETS,
    FORMATS,
    counts_spec,
    exponent_of,
    scale_of,
    top_exponents,
)
from maxramp.model.parts.weights import Quantized, Weight, is_weight, new_weight
from maxramp.model.pattern import DRAFT
from maxramp.parallel.sharding import REPLICATED, axes_spec

EXPONENTS = "exponents"  # in buffers: uint32 [N, 2], of rows and of gradients; 0: none

Buffers = dict[str, jax.Array]

# What runs a product of 8 bits no faster than one of bfloat16, or not at all.
_SLOW_DEVICES = {
    r"TPU v[2-6]": "there products of fp8 take 1.07 (v5p) to 1.32 (v6e) times as long as those of "
    "bfloat16, by XLA's own estimate",
    r"\b(P100|V100|T4|A10G?|A30|A40|A100|A800|RTX A\d+|RTX [23]0\d0)\b": "GPUs before Ada and "
    "Hopper multiply no fp8",
}


def no_exponents(trained: Decoder, quantization: str) -> Buffers:
    """Returns the buffers before the first step; {} without products in 8 bits."""
    if not quantization:
        return {}
    number = sum(math.prod(weight.layers) for weight in _matrices(trained))
    return {EXPONENTS: jnp.zeros((number, 2), jnp.uint32)}


def _matrices(trained: Decoder) -> Iterator[Weight]:
    for path, weight in jax.tree_util.tree_leaves_with_path(trained, is_leaf=is_weight):
        if _is_in_8_bits(path, weight):
            yield weight


def _is_in_8_bits(path: Any, weight: Weight) -> bool:
    return weight.role == "matrix" and kind_at(path) not in (None, DRAFT)


def quantize(
    trained: Decoder, stored: Decoder, buffers: Buffers, quantization: str, only_counts: bool
) -> Decoder:
    """Returns a step's weights with matrices that multiply in 8 bits.

    Args:
      trained: the weights in the dtype of the step.
      stored: the same as the state has them.
      buffers: of the last step; without exponents the weights stay as they are.
      only_counts: multiply as without quantization, and count exponents.
    """
    if EXPONENTS not in buffers:
        return trained
    _check_device(quantization)
    formats, first = FORMATS[quantization], 0

    def change(path: Any, weight: Weight, stored: Weight) -> Weight | Quantized:
        nonlocal first
        if not _is_in_8_bits(path, weight):
            return weight
        layers, w = weight.layers, stored[...]
        leading = jax.typeof(w).sharding.spec.partitions[: len(layers)]
        exponents_N2 = buffers[EXPONENTS][first : first + math.prod(layers)]
        exponents = jax.lax.reshape(
            exponents_N2, (*layers, 2), out_sharding=axes_spec(*leading, None)
        )
        first += math.prod(layers)
        own = exponent_of(jnp.abs(w).max(range(len(layers), w.ndim)))
        scales = [
            scale_of(exponents[..., 0], formats.values),
            scale_of(exponents[..., 1], formats.gradients),
            scale_of(own, formats.values),
        ]
        counts = jnp.zeros((*layers, 2, BUCKETS))
        counts = jax.reshard(counts, counts_spec(axes_spec(*leading)))
        beside = [
            new_weight(x, "balance", axes, weight.leading)
            for x, axes in ((jnp.stack(scales, -1), "s"), (counts, "s b"))
        ]
        return Quantized(weight, *beside, None if only_counts else formats)

    return jax.tree_util.tree_map_with_path(change, trained, stored, is_leaf=is_weight)


def split(gradients: Decoder, buffers: Buffers) -> tuple[Decoder, Buffers]:
    """Splits the gradients of a step's weights, from `quantize`, into those of the state's weights
    and the exponents for the next step; where nothing was counted, those of the last step stay."""
    if EXPONENTS not in buffers:
        return gradients, {}

    def is_quantized(x: Any) -> bool:
        return isinstance(x, Quantized)

    leaves = jax.tree.leaves(gradients, is_leaf=is_quantized)
    counts = [jax.reshard(x.counts[...], REPLICATED) for x in leaves if is_quantized(x)]
    new_N2 = top_exponents(jnp.concatenate([x.reshape(-1, 2, BUCKETS) for x in counts]))
    exponents = jnp.where(new_N2 > 0, new_N2, buffers[EXPONENTS])
    gradients = jax.tree.map(
        lambda x: x.weight if is_quantized(x) else x, gradients, is_leaf=is_quantized
    )
    return gradients, {EXPONENTS: exponents}


def is_counted(buffers: Buffers) -> bool:
    """Tells whether a state has what its first step in 8 bits needs."""
    return EXPONENTS not in buffers or bool(jnp.any(buffers[EXPONENTS] > 0))


def _check_device(quantization: str) -> None:
    device = jax.sharding.get_abstract_mesh().abstract_device
    for pattern, why in _SLOW_DEVICES.items():
        if device and re.search(pattern, device.device_kind):
            raise ConfigError(
                f"quantization={quantization} on {device.device_kind}: {why}; leave it out"
            )
