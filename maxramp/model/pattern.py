"""Which layers a model has, in which order, and what their tokens see. Imports no JAX."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from maxramp.stage import SightKeys


def yarn_amplitude(factor: float) -> float:
    """What YaRN multiplies queries and keys by (arXiv 2309.00071, section 3.4)."""
    return 0.1 * math.log(factor) + 1


@dataclasses.dataclass(frozen=True, order=True)  # a key of trees
class Rope:
    """How fast the pairs of a head's numbers turn with the position (`parts.rotary`)."""

    # pair i turns by position / (factor * max_timescale^(2i/h)) (Su et al., arXiv 2104.09864)
    max_timescale: float
    factor: float = 1.0
    # But for "default" pairs that turn more than `high` times in `length` tokens are as fast as
    # with a factor of 1, those that turn fewer than `low` times have the factor, and in between it
    # goes from one to the other (`parts.rotary`).
    kind: str = "default"
    low: float = 1.0
    high: float = 4.0
    length: int = 1  # tokens of the texts that a model read before it was given longer ones
    truncate: bool = True  # yarn: whether the pairs that turn `low` and `high` times are whole ones
    amplitude: float = 1.0  # what queries and keys are multiplied by

    @classmethod
    def from_keys(cls, keys: SightKeys) -> "Rope":
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
        turns = keys.beta_slow, keys.beta_fast
        return cls(*scaling, *turns, length, keys.rope_truncate, amplitude)

    @classmethod
    def from_local_keys(cls, keys: SightKeys) -> "Rope":
        """Of layers that see a window: without scaling."""
        local = keys.local_rope_max_timescale
        return cls(keys.rope_max_timescale if local == -1 else local)


class Mixing(NamedTuple):
    """What the mixer of a layer does in a pass, beyond what its weights say."""

    rope: Rope | None = None  # how queries and keys turn; None where none do
    window: int = 0  # tokens that each token sees, itself included; 0 = all before it


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a layer is."""

    kind: str  # of its weights: layers of one kind are one stack
    mixing: Callable[[SightKeys], Mixing]  # by the keys of a pass, which a run may change
    sums: tuple[str, ...] = ()  # names of those that its block minimizes or shows (`Aux`)
    # names and shapes of what its block counts of a row
    counts: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Layers in the order in which a row meets them."""

    period: tuple[Layer, ...]  # layers that come again and again, as one loop
    repeats: int  # how often
    prefix: tuple[Layer, ...] = ()  # layers before them
    remainder: tuple[Layer, ...] = ()  # layers behind them

    def __iter__(self) -> Iterator[Layer]:
        yield from (*self.prefix, *self.period * self.repeats, *self.remainder)

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
        """Names of what layers count, with the shapes [L, ...] of those layers that count it."""
        shapes = [of_layer for layer in self for of_layer in layer.counts]
        return {name: (shapes.count((name, shape)), *shape) for name, shape in shapes}

    def stage_pattern(self, layers: int) -> "Pattern":
        """These layers of a pipeline's stage: the same on all stages, so all in the loop."""
        assert not (self.prefix or self.remainder), "layers outside of the loop, in a pipeline"
        return Pattern(self.period, layers // len(self.period))

    def stack_indices(self) -> Iterator[tuple[Layer, int]]:
        counts = dict.fromkeys(self.kinds, 0)
        for layer in self:
            yield layer, counts[layer.kind]
            counts[layer.kind] += 1
