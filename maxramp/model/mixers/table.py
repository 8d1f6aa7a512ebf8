"""The facts of mixers by `Layer.mixer`, from which other rooms plan and check. Imports no JAX."""

from collections.abc import Mapping
from typing import ClassVar, Protocol, Self

from maxramp.keys.section import Relations
from maxramp.model.families.family import Family
from maxramp.model.keys import ModelKeys
from maxramp.model.mixers.attention_facts import AttentionFacts
from maxramp.model.mixers.gated_delta_facts import GatedDeltaFacts
from maxramp.model.mixers.latent_attention_facts import LatentAttentionFacts
from maxramp.model.pattern import Mixing, Pattern
from maxramp.parallel.keys import MeshKeys
from maxramp.stage import StageSpec


class MixerFacts(Protocol):
    """Widths of a mixer's weights, by their Hugging Face names, and what it does besides."""

    reads: Mapping[str, int]  # weights that read the residual stream: their output widths
    writes: Mapping[str, int]  # weights that write to it: their input widths
    inside: Mapping[str, tuple[int, int]]  # other weights: their input and output widths
    whole: ClassVar[tuple[str, ...]]  # of `reads`, whose results all devices along `tensor` have
    tensor_keys: ClassVar[tuple[str, ...]]  # whose values `tensor` must divide
    shard_keys: ClassVar[tuple[str, ...]]  # whose values the axes that shard weights must divide
    needs_order: ClassVar[bool]  # whether devices along `context` must have tokens in order

    @classmethod
    def from_keys(cls, keys: ModelKeys, family: Family) -> Self: ...

    def row_products(self, tokens: int, mixing: Mixing) -> float:
        """Counts the multiplications of a row that no weight takes part in."""

    def kept_bytes(
        self, keys: ModelKeys, spec: StageSpec, platform: str | None
    ) -> tuple[float, float]:
        """Returns bytes of a pass on a platform's device beside its products with weights: those
        that remat_policy=minimal_with_context keeps, and all."""

    @staticmethod
    def context_bytes(keys: ModelKeys, spec: StageSpec, again: float) -> float:
        """Returns the bytes that a device exchanges along `context` in a pass; `again` is the share
        of its products that the backward pass computes again."""

    @staticmethod
    def check_context(keys: ModelKeys, mesh: MeshKeys, row_length: int) -> Relations:
        """Yields the relations that more than one device along `context` asks for."""


MIXER_FACTS: dict[str, type[MixerFacts]] = {
    "attention": AttentionFacts,
    "gated_delta": GatedDeltaFacts,
    "latent_attention": LatentAttentionFacts,
}


def balances_order(pattern: Pattern, keys: ModelKeys, tensor: int, context: int) -> bool:
    """Tells whether tokens lie in an order that gives devices along `context` equal work: where
    they attend to gathered keys, unless a mixer needs them in order."""
    is_gathered = context > 1 and keys.context_strategy(tensor, context) == "all_gather"
    may_move = not any(MIXER_FACTS[layer.mixer].needs_order for layer in pattern)
    return is_gathered and keys.context_parallel_load_balance and may_move
