"""What other rooms ask of latent attention (`table.MixerFacts`). Imports no JAX."""

import dataclasses
from typing import ClassVar, Self

from maxramp.model.families.family import Family
from maxramp.model.keys import BYTES, ModelKeys
from maxramp.model.mixers.attention_facts import AttentionFacts
from maxramp.model.pattern import Mixing
from maxramp.stage import StageSpec


@dataclasses.dataclass(frozen=True)
class LatentAttentionFacts(AttentionFacts):
    """Facts of `mixers.latent_attention`; `width` is that of all heads' values."""

    whole: ClassVar[tuple[str, ...]] = ("q_a_proj", "kv_a_proj_with_mqa")
    tensor_keys: ClassVar[tuple[str, ...]] = ("base_num_query_heads",)
    shard_keys: ClassVar[tuple[str, ...]] = ("q_lora_rank", "kv_lora_rank")
    query_width: int = 0  # of all heads

    @classmethod
    def from_keys(cls, keys: ModelKeys, family: Family) -> Self:
        H, r = keys.base_num_query_heads, keys.qk_rope_head_dim
        h, v = family.head_widths(keys)
        reads = {"kv_a_proj_with_mqa": keys.kv_lora_rank + r}
        inside = {"kv_b_proj": (keys.kv_lora_rank, H * (h - r + v))}
        if keys.q_lora_rank:
            reads["q_a_proj"] = keys.q_lora_rank
            inside["q_b_proj"] = keys.q_lora_rank, H * h
        else:
            reads["q_proj"] = H * h
        return cls(reads, {"o_proj": H * v}, H, H * v, inside, H * h)

    def row_products(self, tokens: int, mixing: Mixing) -> float:
        """Counts T (h + v) multiplications for each head and token, halved for causality."""
        return (self.query_width + self.width) * tokens * tokens / 2

    def kept_bytes(
        self, keys: ModelKeys, spec: StageSpec, platform: str | None
    ) -> tuple[float, float]:
        context, everything = super().kept_bytes(keys, spec, platform)
        tokens = spec.device_tokens / spec.mesh.sizes["tensor"]
        # Queries and keys with what positions turn in them.
        return context, everything + 2 * tokens * self.query_width * BYTES[keys.dtype]

    @staticmethod
    def context_bytes(keys: ModelKeys, spec: StageSpec, again: float) -> float:
        """Counts all tokens' latents, which every device gets; by ulysses also queries of its
        heads."""
        context, tensor = spec.mesh.sizes["context"], spec.mesh.sizes["tensor"]
        latents = (keys.kv_lora_rank + keys.qk_rope_head_dim) * context
        exchanged = (2.5 + again) * latents
        if keys.context_strategy(tensor, context) == "ulysses":
            head = keys.qk_nope_head_dim + keys.qk_rope_head_dim + keys.v_head_dim
            exchanged += (2 + again) * keys.base_num_query_heads // tensor * head
        return spec.device_tokens * exchanged * BYTES[keys.dtype]
