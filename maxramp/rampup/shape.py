"""The keys that give a step its shape, without the number of its rows. Imports no JAX."""

import dataclasses
from collections.abc import Callable

from maxramp.errors import ConfigError
from maxramp.keys.numbers import nearest_divisors, nearest_multiples
from maxramp.keys.section import minimum, positive_or_open
from maxramp.parallel.keys import MeshKeys
from maxramp.stage import Fields, RopeKeys, StageSpec

# The mesh by the number of devices and the first sample of a threshold, where there is one.
Meshes = Callable[[int, int], MeshKeys | None]


@dataclasses.dataclass(frozen=True)
class ShapeKeys(MeshKeys, RopeKeys):
    """The keys that give a step its shape, without the number of its rows."""

    max_target_length: int = minimum(1)
    row_length: int = positive_or_open("max_target_length")
    remat_policy: str  # `ModelKeys` checks it: MaxText's configuration has others
    num_pipeline_microbatches: int = positive_or_open()

    @property
    def open_pipeline(self) -> str:
        """Key, with its value, that leaves the pipeline's stages open; "" where none does."""
        names = ("ici_pipeline_parallelism", "dcn_pipeline_parallelism")
        return next((f"{name}=-1" for name in names if getattr(self, name) == -1), "")

    @property
    def rows_multiple(self) -> int:
        """Number that divides a rank's rows of a pass: its share of the micro batches."""
        count, stages = self.num_pipeline_microbatches, self.pipeline_stages
        if count == -1:
            return 1
        if self.open_pipeline:
            raise ConfigError(
                f"num_pipeline_microbatches={count} has to be a multiple of the stages, and "
                f"{self.open_pipeline} leaves their number open; give it"
            )
        if stages == 1 and count > 1:
            raise ConfigError(
                f"num_pipeline_microbatches={count} is for a pipeline, and "
                f"{self.command_line('stage')} is none; use -1, or 2 or more stages"
            )
        if count % stages:
            raise ConfigError(
                f"num_pipeline_microbatches={count} is not a multiple of the {stages} stages that "
                f"{self.command_line('stage')} make; use {nearest_multiples(count, stages)}"
            )
        return count // stages

    @property
    def rows_of_sample(self) -> int:
        """Number of rows into which a step cuts a sample."""
        row, sample = self.row_length, self.max_target_length
        if row == -1:
            return 1
        if row > sample or sample % row:
            raise ConfigError(
                f"row_length={row} does not divide max_target_length={sample}: a step cuts each "
                f"sample into rows of equal length; use {nearest_divisors(row, sample)}"
            )
        return sample // row

    @property
    def rope_keys(self) -> RopeKeys:
        return RopeKeys.from_values(vars(self))

    def spec(self, passes: int, rows: int, mesh: MeshKeys | None, fields: Fields) -> StageSpec:
        tokens, held = self.max_target_length, (self.remat_policy, self.num_pipeline_microbatches)
        shape = passes, rows, tokens, fields(tokens)
        return StageSpec(*shape, mesh, *held, self.rope_keys, self.rows_of_sample)
