"""In which order a family's layers stand, and what each is beside its weights."""

import dataclasses
from collections.abc import Iterator

from maxramp.model.parts.rotary import Rope


@dataclasses.dataclass(frozen=True)
class Layer:
    """What a layer is.

    Attributes:
      kind: of its weights: layers of one kind are one stack.
      rope: how its queries and keys turn.
      window: tokens that each token sees, itself included; 0 = all before it.
      sums: names of those that its block minimizes or shows (`Aux`).
      counts: names and shapes of what its block counts of a row.
    """

    kind: str
    rope: Rope
    window: int = 0
    sums: tuple[str, ...] = ()
    counts: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Layers in the order in which a row meets them.

    Attributes:
      period: layers that come again and again, as one loop.
      repeats: how often.
      prefix, remainder: layers before and behind them.
    """

    period: tuple[Layer, ...]
    repeats: int
    prefix: tuple[Layer, ...] = ()
    remainder: tuple[Layer, ...] = ()

    def __iter__(self) -> Iterator[Layer]:
        yield from (*self.prefix, *self.period * self.repeats, *self.remainder)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of the stacks, in the order of their first layers."""
        return tuple(dict.fromkeys(layer.kind for layer in self))

    def count(self, kind: str) -> int:
        """How many layers are of a kind."""
        return sum(layer.kind == kind for layer in self)

    @property
    def sums(self) -> tuple[str, ...]:
        """The names of all sums that are minimized or shown."""
        return tuple(dict.fromkeys(name for layer in self for name in layer.sums))

    @property
    def counts(self) -> dict[str, tuple[int, ...]]:
        """What layers count: names and shapes [L, ...], of those layers that count it."""
        shapes = [of_layer for layer in self for of_layer in layer.counts]
        return {name: (shapes.count((name, shape)), *shape) for name, shape in shapes}

    def of_stage(self, layers: int) -> "Pattern":
        """So many layers of a pipeline's stage: of all stages the same, and so all in the loop."""
        assert not (self.prefix or self.remainder), "layers outside of the loop, in a pipeline"
        return Pattern(self.period, layers // len(self.period))

    def places(self) -> Iterator[tuple[Layer, int]]:
        """Every layer, and its place in the stack of its kind."""
        counts = dict.fromkeys(self.kinds, 0)
        for layer in self:
            yield layer, counts[layer.kind]
            counts[layer.kind] += 1
