"""The shape of a stage's steps: batch, mesh, how a pass is computed, what a token sees. Imports no
JAX.

Shapes: A gradient accumulation steps, B samples of a pass over all devices, T tokens of a sample.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple, Self

from maxramp.keys.section import Keys, above_zero, above_zero_or_open, minimum
from maxramp.parallel.keys import MeshKeys


class Field(NamedTuple):
    """An array of a batch, [A, B, *suffix]."""

    name: str
    dtype: str
    suffix: tuple[int, ...]


Fields = Callable[[int], tuple[Field, ...]]  # the arrays of a batch by T


def text_fields(tokens: int, separate: bool = False) -> tuple[Field, ...]:
    """Returns the arrays of text; `separate` for rows of documents that do not see each other."""
    names = ("tokens", "targets", "segments")[: 3 if separate else 2]
    return *(Field(name, "int32", (tokens,)) for name in names), Field("hashes", "uint32", (2,))


@dataclasses.dataclass(frozen=True)
class RopeKeys(Keys):
    """Rotary positions and the window: what a token sees of those before it."""

    rope_max_timescale: float = above_zero()
    rope_type: str  # `Execution` checks it: MaxText's configuration has others
    rope_factor: float = minimum(1)
    rope_low_freq_factor: float = above_zero()
    rope_high_freq_factor: float = above_zero()
    original_max_position_embeddings: int = minimum(1)
    beta_fast: float = above_zero()
    beta_slow: float = above_zero()
    rope_truncate: bool
    rope_attention_factor: float = above_zero_or_open()
    mscale: float = minimum(0)
    rope_linear_scaling_factor: float = minimum(1)
    local_rope_max_timescale: float = above_zero_or_open()
    sliding_window_size: int = minimum(0)


ROPE_KEYS = RopeKeys.names()


@dataclasses.dataclass(frozen=True)
class StageSpec:
    """The shape of a stage's steps, the key of their program."""

    accumulation: int  # A
    rows: int  # B, samples
    tokens: int  # T, of a sample
    fields: tuple[Field, ...]  # the arrays of a batch
    mesh: MeshKeys | None  # None where the devices make no such mesh, so nothing can run
    remat_policy: str  # what a layer keeps for its backward pass
    pipeline_microbatches: int  # of a pass in a pipeline; 1 without one
    rope_keys: RopeKeys  # what a token sees
    rows_of_sample: int = 1  # into how many rows a step cuts a sample

    @property
    def row_length(self) -> int:
        """Tokens of a row as the model reads it."""
        return self.tokens // self.rows_of_sample

    @property
    def device_tokens(self) -> float:
        """Tokens of a pass on a device, which has its part of a row that `context` shares."""
        return self.rows * self.tokens / self.mesh.ranks / self.mesh.sizes["context"]

    @property
    def samples(self) -> int:
        return self.accumulation * self.rows

    @property
    def rows_multiple(self) -> int:
        return max(1, self.pipeline_microbatches // self.mesh.pipeline_stages)

    def resize(self, accumulation: int, rows: int) -> Self:
        return dataclasses.replace(self, accumulation=accumulation, rows=rows)

    def single_pass(self, rows: int) -> Self:
        """Returns the shape of one pass over this many samples that nothing cuts."""
        return dataclasses.replace(self.resize(1, rows), rows_of_sample=1)
