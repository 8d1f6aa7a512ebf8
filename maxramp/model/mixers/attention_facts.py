"""What other rooms ask of attention (`table.MixerFacts`). Imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Self

from maxramp.keys.section import Relations
from maxramp.model.families.family import Family
from maxramp.model.keys import BYTES, ModelKeys, key_copies
from maxramp.model.pattern import Mixing
from maxramp.parallel.keys import MeshKeys
from maxramp.stage import StageSpec


@dataclasses.dataclass(frozen=True)
class AttentionFacts:
    """Facts of `mixers.attention`."""

    whole: ClassVar[tuple[str, ...]] = ()
    tensor_keys: ClassVar[tuple[str, ...]] = ("base_num_query_heads", "base_num_kv_heads")
    shard_keys: ClassVar[tuple[str, ...]] = ()
    needs_order: ClassVar[bool] = False
    reads: Mapping[str, int]
    writes: Mapping[str, int]
    heads: int  # of queries
    width: int  # of all heads
    inside: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_keys(cls, keys: ModelKeys, family: Family) -> Self:
        width, kv = (
            heads * keys.head_dim for heads in (keys.base_num_query_heads, keys.base_num_kv_heads)
        )
        reads = {"q_proj": width * (1 + family.gates_heads), "k_proj": kv, "v_proj": kv}
        return cls(reads, {"o_proj": width}, keys.base_num_query_heads, width)

    def row_products(self, tokens: int, mixing: Mixing) -> float:
        """Counts 2 T h multiplications for each head and token, halved for causality (PaLM, arXiv
        2204.02311, appendix B); a window of W tokens leaves W (2 T - W) / T^2 of that."""
        W = min(mixing.window or tokens, tokens)
        return self.width * W * (2 * tokens - W)

    def kept_bytes(
        self, keys: ModelKeys, spec: StageSpec, platform: str | None
    ) -> tuple[float, float]:
        tokens, itemsize = spec.device_tokens / spec.mesh.sizes["tensor"], BYTES[keys.dtype]
        result = tokens * self.width * itemsize
        # A kernel stores no scores; plain products store all, whatever the window. "autoselected"
        # has a kernel for an accelerator's dtype.
        kernel = keys.attention in ("cudnn_flash", "splash")
        kernel |= keys.attention == "autoselected" and keys.dtype != "float32"
        if kernel:
            return result, result
        return 0, result + tokens * spec.row_length * self.heads * (4 + itemsize)

    @staticmethod
    def context_bytes(keys: ModelKeys, spec: StageSpec, again: float) -> float:
        context, tensor = spec.mesh.sizes["context"], spec.mesh.sizes["tensor"]
        heads, key_heads = keys.base_num_query_heads, keys.base_num_kv_heads
        if keys.context_strategy(tensor, context) == "ulysses":
            copies = key_copies(heads // tensor, key_heads // tensor, context)
            exchanged, times = 2 * (heads + copies * key_heads), 2 + again
        else:
            exchanged, times = 2 * key_heads * context, 2.5 + again
        return times * spec.device_tokens * exchanged * keys.head_dim / tensor * BYTES[keys.dtype]

    @staticmethod
    def check_context(keys: ModelKeys, mesh: MeshKeys, row_length: int) -> Relations:
        size, tensor = mesh.sizes["context"], mesh.sizes["tensor"]
        heads, key_heads = (
            n // tensor for n in (keys.base_num_query_heads, keys.base_num_kv_heads)
        )
        able = [n for n in range(1, heads + 1) if key_copies(heads, key_heads, n)]
        yield (
            keys.context_strategy(tensor, size) == "ulysses" and size not in able,
            f"context_parallel_strategy=ulysses shares out the {heads} query and {key_heads} "
            f"key/value heads of a device (ici_tensor_parallelism={tensor}) over "
            f"{mesh.command_line('context')} = {size} devices; use {', '.join(map(str, able))} of "
            "them, or context_parallel_strategy=all_gather",
        )
