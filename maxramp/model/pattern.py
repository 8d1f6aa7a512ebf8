"""The layers of a model in their order, and what their tokens see. Imports no JAX."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from maxramp.stage import RopeKeys

DRAFT = "draft"  # the kind of layers that predict tokens further ahead
DRAFT_LOSS = "mtp_loss"  # the sum that they add
# in evaluations, how many of their tokens the model itself would write, and how many were compared
ACCEPTANCE, DRAFT_TOKENS = "mtp_acceptance_rate", "mtp_tokens"


def yarn_amplitude(factor: float, share: float = 1.0) -> float:
    """Returns YaRN's factor for queries and keys (arXiv 2309.00071, section 3.4); a model may have
    a share of its logarithm."""
    return 0.1 * share * math.log(factor) + 1


@dataclasses.dataclass(frozen=True, order=True)  # a key of trees
class Rope:
    """How fast the pairs of a head's numbers rotate with the position (`parts.positions`)."""

    # pair i rotates by position / (factor * max_timescale^(2i/h)) (Su et al., arXiv 2104.09864)
    max_timescale: float
    factor: float = 1.0
    # Except for "default", pairs with more than `high` rotations in `length` tokens have a factor
    # of 1, those with fewer than `low` the whole factor, and between them it blends
    # (`parts.positions`).
    kind: str = "default"
    low: float = 1.0
    high: float = 4.0
    length: int = 1  # tokens of the texts before training went on with longer ones
    truncate: bool = True  # yarn: round the pairs with `low` and `high` rotations to whole ones
    amplitude: float = 1.0  # factor of queries and keys

    @classmethod
    def from_keys(cls, keys: RopeKeys) -> "Rope":
        """Reads the keys. "dynamic" scales nothing: no row is longer than the length from which it
        would."""
        base, length = keys.rope_max_timescale, keys.original_max_position_embeddings
        if keys.rope_type == "dynamic":  # up to `length` tokens, and rows are no longer
            return cls(base)
        if keys.rope_type == "default":
            return cls(base, keys.rope_linear_scaling_factor)
        scaling = base, keys.rope_factor, keys.rope_type
        if keys.rope_type == "llama3.1":
            return cls(*scaling, keys.rope_low_freq_factor, keys.rope_high_freq_factor, length)
        amplitude = keys.rope_attention_factor
        if amplitude == -1:
            amplitude = yarn_amplitude(keys.rope_factor)
        low, high = keys.beta_slow, keys.beta_fast
        return cls(*scaling, low, high, length, keys.rope_truncate, amplitude)

    @classmethod
    def from_local_keys(cls, keys: RopeKeys) -> "Rope":
        """Returns the rope of layers that see a window: it is not scaled."""
        local = keys.local_rope_max_timescale
        return cls(keys.rope_max_timescale if local == -1 else local)


class Mixing(NamedTuple):
    """What a pass asks of a layer's mixer, beyond its weights."""

    rope: Rope | None = None  # None: without positions
    window: int = 0  # tokens that each token sees, itself included; 0 = all before it
    score_factor: float = 1.0  # of latent attention's scores


@dataclasses.dataclass(frozen=True)
class Layer:
    """One layer of a model."""

    kind: str  # layers of one kind have weights of the same shapes, in one stack
    mixing: Callable[[RopeKeys], Mixing]  # from the keys of a pass, which phases may change
    sums: tuple[str, ...] = ()  # names of the sums that its block minimizes or shows (`Aux`)
    # names and shapes of the counts that its block returns for a row
    counts: tuple[tuple[str, tuple[int, ...]], ...] = ()
    mixer: str = "attention"  # the kind of its mixer (`mixers.table`)

    @property
    def is_sparse(self) -> bool:
        """Whether its MLP is a mixture of experts, which counts its tokens."""
        return bool(self.counts)


@dataclasses.dataclass(frozen=True)
class Pattern:
    """The layers of a model in order."""

    period: tuple[Layer, ...]  # layers that repeat, as one loop
    repeats: int  # how often
    prefix: tuple[Layer, ...] = ()  # layers before the loop
    remainder: tuple[Layer, ...] = ()  # layers after it
    drafts: tuple[Layer, ...] = ()  # behind the output norm (`model.draft`), the last in order

    @classmethod
    def repeat(cls, layers: tuple[Layer, ...], count: int) -> "Pattern":
        """Returns the pattern of these layers in turn, `count` in all."""
        if count < len(layers):
            return cls(layers[:count], 1)
        return cls(layers, count // len(layers), remainder=layers[: count % len(layers)])

    def add_drafts(self, count: int) -> "Pattern":
        """Returns the pattern with `count` drafts, layers as the last of the period."""
        last = self.period[-1]
        draft = dataclasses.replace(last, kind=DRAFT, sums=(*last.sums, DRAFT_LOSS))
        return dataclasses.replace(self, drafts=(draft,) * count)

    @property
    def main(self) -> "Pattern":
        """The pattern without drafts."""
        return dataclasses.replace(self, drafts=())

    def __iter__(self) -> Iterator[Layer]:
        yield from (*self.prefix, *self.period * self.repeats, *self.remainder, *self.drafts)

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(layer.kind for layer in self))

    def count(self, kind: str) -> int:
        return sum(layer.kind == kind for layer in self)

    @property
    def sums(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for layer in self for name in layer.sums))

    @property
    def counts(self) -> dict[str, tuple[int, ...]]:
        """Names of the layers' counts, with shapes [L, ...] for the L layers that have them."""
        shapes = [count for layer in self for count in layer.counts]
        return {name: (shapes.count((name, shape)), *shape) for name, shape in shapes}

    def stage_pattern(self, layers: int) -> "Pattern":
        """Returns the pattern of a pipeline's stage: the same on all stages, so all in the loop."""
        assert not (self.prefix or self.remainder), "layers outside of the loop, in a pipeline"
        return Pattern(self.period, layers // len(self.period))

    def stack_indices(self) -> Iterator[tuple[Layer, int]]:
        """Yields the layers but drafts in order, each with its index in the stack of its kind."""
        counts = dict.fromkeys(self.kinds, 0)
        for layer in self.main:
            yield layer, counts[layer.kind]
            counts[layer.kind] += 1
