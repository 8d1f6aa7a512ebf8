"""Weights of 4 and 8 bits in a folder, which are read as bfloat16. Imports no JAX.

MXFP4 (OCP Microscaling Formats, version 1.0): pairs of 4-bit floats in a byte, the lower half
first, and a power of two for every 32; DeepSeek-V3's fp8 (arXiv 2412.19437, section 3.3): a factor
for every block of a matrix.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from maxramp.errors import ConfigError
from maxramp.huggingface.safetensors import DTYPES, Tensor

_BLOCKS, _SCALES, _FACTORS = "_blocks", "_scales", "_scale_inv"
_MXFP4_BYTES = 16  # of a block


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mxfp4(Tensor):
    """A tensor [E, R, C] by blocks [E, R, C / 32, 16] and scales [E, R, C / 32]; it is read as
    [E * R, C]."""

    blocks: Tensor
    scales: Tensor

    def read(self, first: int, stop: int) -> np.ndarray:
        (blocks, scales), groups = (self.blocks, self.scales), self.shape[-1] // 32
        bytes_RGb = blocks.read_bytes(first, stop, groups * _MXFP4_BYTES)
        scales_RG1 = scales.read_bytes(first, stop, groups).reshape(stop - first, groups, 1)
        bytes_RGb = bytes_RGb.reshape(stop - first, groups, _MXFP4_BYTES)
        pairs = _pairs()[scales_RG1, bytes_RGb]
        return pairs.view(ml_dtypes.bfloat16).reshape(stop - first, -1)


@functools.cache
def _pairs() -> np.ndarray:
    """Returns two bfloat16, as uint32, for every scale and byte: [256, 256]."""
    halves = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float64)
    halves = np.concatenate([halves, -halves])
    byte = np.arange(256)
    values = np.ldexp(halves[np.stack([byte & 15, byte >> 4], -1)], byte[:, None, None] - 127)
    with np.errstate(over="ignore"):
        return values.astype(ml_dtypes.bfloat16).view(np.uint32)[..., 0]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fp8Blocks(Tensor):
    """A matrix of 8-bit floats, and the factors of its blocks."""

    weights: Tensor
    factors: Tensor
    block: tuple[int, int]

    def read(self, first: int, stop: int) -> np.ndarray:
        rows, columns = self.block
        x = self.weights.read_bytes(first, stop, self.shape[1]).view(ml_dtypes.float8_e4m3fn)
        x = x.reshape(stop - first, -1).astype(np.float32)
        before = first // rows
        factors = self.factors.read(before, max(before, -(-stop // rows))).astype(np.float32)
        factors = factors[np.arange(first, stop) // rows - before]
        x *= np.repeat(factors, columns, axis=1)[:, : x.shape[1]]
        return x.astype(ml_dtypes.bfloat16)


def dequantize(
    tensors: Mapping[str, Tensor], quantization: Mapping[str, Any] | None
) -> dict[str, Tensor]:
    """Returns a folder's tensors with one for each quantized weight; `quantization` is what its
    config.json says of them, of which `is_readable` is true. A ConfigError for a scale of another
    shape."""
    result = dict(tensors)
    for name, tensor in tensors.items():
        whole, scales = name.removesuffix(_BLOCKS), tensors.get(f"{name}{_FACTORS}")
        if name.endswith(_BLOCKS) and tensor.dtype == "U8" and len(tensor.shape) == 4:
            scales = tensors.get(f"{whole}{_SCALES}")
            *rows, groups, width = tensor.shape
            fits = scales and scales.dtype == "U8" and scales.shape == (*rows, groups)
            _refuse_unless(bool(fits) and width == _MXFP4_BYTES, tensor, scales)
            del result[name], result[f"{whole}{_SCALES}"]
            shape, own = (*rows, groups * 32), {"blocks": tensor, "scales": scales}
            result[whole] = Mxfp4(whole, tensor.file, "BF16", shape, tensor.start, **own)
        elif scales and tensor.dtype == "F8_E4M3" and len(tensor.shape) == 2:
            block = tuple((quantization or {}).get("weight_block_size") or (128, 128))
            counts = tuple(-(-n // size) for n, size in zip(tensor.shape, block, strict=True))
            fits = scales.shape == counts and scales.dtype in DTYPES
            _refuse_unless(fits, tensor, scales)
            del result[f"{name}{_FACTORS}"]
            own = {"weights": tensor, "factors": scales, "block": block}
            result[name] = Fp8Blocks(name, tensor.file, "BF16", tensor.shape, tensor.start, **own)
    return result


def _refuse_unless(fits: bool, tensor: Tensor, scales: Tensor | None) -> None:
    """Refuses a tensor whose `scales` (None: it has none) do not fit it; the error names both."""
    if not fits:
        shape = f"{scales.name}, {scales.dtype} of {list(scales.shape)}" if scales else "none"
        raise ConfigError(
            f"{tensor.file}: {tensor.name} of {list(tensor.shape)} has scales of another form "
            f"({shape}); fetch it again"
        )


def is_readable(quantization: Any) -> bool:
    """Tells whether weights of a config.json's quantization_config can be read."""
    if not isinstance(quantization, dict):
        return quantization is None
    method, block = (quantization.get(name) for name in ("quant_method", "weight_block_size"))
    if method == "fp8":
        is_pair = isinstance(block, list) and len(block) == 2
        return is_pair and all(type(n) is int and n > 0 for n in block)
    return method == "mxfp4"


def describe(folder: str, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yields a line for each kind of quantized weights."""
    for kind, form in (("MXFP4", Mxfp4), ("fp8", Fp8Blocks)):
        own = {x.name for x in map(source_of, tensors.values()) if isinstance(x, form)}
        if own:
            yield (
                f"{folder}: {len(own)} tensors of {kind} are read as bfloat16, and an export has "
                f"them so: {', '.join(sorted(own)[:3])}"
            )


def source_of(tensor: Tensor) -> Tensor:
    """Returns the tensor of a file that a part of it is read from."""
    return getattr(tensor, "base", tensor)
