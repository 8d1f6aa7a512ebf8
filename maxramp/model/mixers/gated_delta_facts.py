"""What other rooms ask of a gated delta rule (`table.MixerFacts`). Imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Self

from maxramp.keys.section import Relations
from maxramp.model.families.family import Family
from maxramp.model.keys import BYTES, ModelKeys
from maxramp.model.parts.delta_sizes import chunk_length, has_kernel
from maxramp.model.pattern import Mixing
from maxramp.parallel.keys import MeshKeys
from maxramp.stage import StageSpec

TAPS = 4  # tokens that the convolution sees: a token and those before it
_SQUARES = 6  # float32 numbers of each pair of a chunk's tokens that a backward pass holds
_CONVOLVED = 3  # float32 numbers of each result of the convolution


@dataclasses.dataclass(frozen=True)
class GatedDeltaFacts:
    """Facts of `mixers.gated_delta`."""

    inside: ClassVar[Mapping[str, tuple[int, int]]] = {}
    whole: ClassVar[tuple[str, ...]] = ()
    tensor_keys: ClassVar[tuple[str, ...]] = ("gdn_num_key_heads",)
    shard_keys: ClassVar[tuple[str, ...]] = ()
    needs_order: ClassVar[bool] = True
    reads: Mapping[str, int]
    writes: Mapping[str, int]
    heads: int  # of values
    state: int  # numbers of a head's state

    @staticmethod
    def is_joined(family: Family) -> bool:
        """Returns whether the gates of its output are in one tensor with queries."""
        return any(path.endswith("mixer.qkvz_DKx") for path in family.tensors)

    @classmethod
    def from_keys(cls, keys: ModelKeys, family: Family) -> Self:
        K, H = keys.gdn_num_key_heads, keys.gdn_num_value_heads
        k, v = keys.gdn_key_head_dim, keys.gdn_value_head_dim
        if cls.is_joined(family):
            reads = {"in_proj_qkvz": 2 * (K * k + H * v), "in_proj_ba": 2 * H}
        else:
            reads = {"in_proj_qkv": 2 * K * k + H * v, "in_proj_z": H * v}
            reads |= {"in_proj_b": H, "in_proj_a": H}
        return cls(reads, {"out_proj": H * v}, H, k * v)

    def row_products(self, tokens: int, mixing: Mixing) -> float:
        """Counts what a token's key and query read of every state, and what it writes; chunks of
        tokens take more, by how they are computed."""
        return 3.0 * tokens * self.heads * self.state

    def kept_bytes(
        self, keys: ModelKeys, spec: StageSpec, platform: str | None
    ) -> tuple[float, float]:
        k, v, itemsize = keys.gdn_key_head_dim, keys.gdn_value_head_dim, BYTES[keys.dtype]
        context, R = spec.mesh.sizes["context"], self.heads // keys.gdn_num_key_heads
        # Of a token and a value head, near what the TPU's compiler reports.
        C = chunk_length(platform, spec.row_length // context)
        numbers = 2 * v * 4 + 4 * self.state / C + 4 * _CONVOLVED * (2 * k / R + v)
        if has_kernel(platform, C, k, v, R):
            numbers += (2 * k / R + v) * itemsize
            if context > 1:  # the kernels that find the state before a part
                numbers += (k + v) * (itemsize + 4 + 4 * k / C)
        else:
            numbers += 3 * k * itemsize + C * (itemsize + 4 * _SQUARES)
        return 0, spec.device_tokens * self.heads / spec.mesh.sizes["tensor"] * numbers

    @staticmethod
    def context_bytes(keys: ModelKeys, spec: StageSpec, again: float) -> float:
        sizes, H = spec.mesh.sizes, keys.gdn_num_value_heads
        k, v = keys.gdn_key_head_dim, keys.gdn_value_head_dim
        rows = spec.device_tokens * sizes["context"] / spec.row_length
        return (2 + again) * rows * sizes["context"] * H / sizes["tensor"] * k * (k + v) * 4

    @staticmethod
    def check_context(keys: ModelKeys, mesh: MeshKeys, row_length: int) -> Relations:
        yield from ()  # parts of rows may be as short as they like
