"""The sizes of attention, from which the plan counts FLOPs and memory. Imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Self

from maxramp.model.families.family import Family
from maxramp.model.keys import BYTES, ModelKeys
from maxramp.model.pattern import Mixing
from maxramp.stage import StageSpec


@dataclasses.dataclass(frozen=True)
class AttentionSizes:
    """Widths of a mixer's weights, by their Hugging Face names, and the work without weights."""

    reads: Mapping[str, int]  # weights that read the residual stream: their output widths
    writes: Mapping[str, int]  # weights that write to it: their input widths
    heads: int  # of queries
    width: int  # of all heads

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

    def kept_bytes(self, keys: ModelKeys, spec: StageSpec) -> tuple[float, float]:
        """Returns bytes of a pass on a device beside its products with weights: those that
        remat_policy=minimal_with_context keeps, and all."""
        tokens, itemsize = spec.device_tokens / spec.mesh.sizes["tensor"], BYTES[keys.dtype]
        result = tokens * self.width * itemsize
        # A kernel stores no scores; plain products store all, whatever the window. "autoselected"
        # has a kernel for an accelerator's dtype.
        kernel = keys.attention in ("cudnn_flash", "splash")
        kernel |= keys.attention == "autoselected" and keys.dtype != "float32"
        if kernel:
            return result, result
        return 0, result + tokens * spec.row_length * self.heads * (4 + itemsize)
