"""How a pass through a model is computed: what changes no weight. Imports no JAX."""

import dataclasses
from typing import NamedTuple

from maxramp.model.keys import ModelKeys


class Pipeline(NamedTuple):
    """How layers are cut into the stages of a mesh that has several.

    Attributes:
      microbatches: m, a multiple of the stages.
      repeats: R.
      layers: l, of a stage in a turn; S * R * l are all.
      gather_once: whether a pass gathers weights over fsdp once, and not in every turn.
    """

    microbatches: int
    repeats: int
    layers: int
    gather_once: bool


@dataclasses.dataclass(frozen=True)
class Execution:
    """How a pass is computed. The same weights run under any of them.

    Attributes:
      dtype: of products with weights, and of what lies between layers.
      attention: the kernel that was asked for (`attention.select`).
      remat_policy: what a layer keeps for its backward pass.
      unroll: whether the layers are no loop.
      pipeline: how layers are cut into stages, where the mesh has several.
    """

    dtype: str
    attention: str
    remat_policy: str
    unroll: bool
    pipeline: Pipeline

    @classmethod
    def of(cls, keys: ModelKeys) -> "Execution":
        """What resolved keys ask for."""
        pipeline = Pipeline(
            keys.num_pipeline_microbatches,
            keys.num_pipeline_repeats,
            keys.num_layers_per_pipeline_stage,
            keys.pipeline_fsdp_ag_once,
        )
        return cls(keys.dtype, keys.attention, keys.remat_policy, not keys.scan_layers, pipeline)
