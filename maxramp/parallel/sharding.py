"""Every PartitionSpec, named once: how each kind of array lies on the mesh's axes. Other modules
build none.

Shapes: A accumulation steps, B rows, T tokens, N tokens of all rows, D model width, H query heads,
K key/value heads, G query heads per key/value head, h head width, F MLP width, V vocabulary, L
layers, E experts, k of a token, M rows of a device's experts, C copies of the weights, m micro
batches of a pipeline.
"""

from collections.abc import Iterable

from jax.sharding import PartitionSpec as P

from maxramp.parallel.axes import (
    AROUND_STAGES,
    AXES,
    BATCH_AXES,
    COPY_AXES,
    ROW_AXES,
    SHARD_AXES,
    SHARDS_OF_EXPERT,
    STACK_AXES,
    TOKEN_AXES,
    WITHIN_STAGES,
)

Spec = P  # the type, for annotations in other modules

REPLICATED = P()
BY_DEVICE = P(AXES)  # one number of each device

# The batch and what follows from it
_COPIES = tuple(axis for axis in ROW_AXES if axis in COPY_AXES)
_IN_COPY = tuple(axis for axis in ROW_AXES if axis not in COPY_AXES)
BATCH_ABT = P(None, ROW_AXES)  # whole rows: what a token sees may be anywhere in its row
ROWS_BT = P(ROW_AXES, None)
TOKENS_BT = P(ROW_AXES, TOKEN_AXES)  # of each token, where it lies in the stream
ROWS_B = P(ROW_AXES)
ROWS_ACB = P(None, _COPIES, _IN_COPY)  # rows by the copy of the weights that reads them
SLOTS_fANT = P(None, None, AXES, None)  # rows on their way to the devices that need them
ROWS_mBT = P(None, AROUND_STAGES + WITHIN_STAGES, None)  # of micro batches, on all stages

# Activations: rows and tokens as in the batch; heads, MLP, vocabulary and the residual stream over
# tensor
STREAM_BTD = P(ROW_AXES, TOKEN_AXES, "tensor")  # the residual stream
STREAM_BTND = P(ROW_AXES, TOKEN_AXES, None, "tensor")  # N of them side by side
STREAM_BD = P(ROW_AXES, "tensor")  # a vector of that width for each row
HEAD_Bh = P(ROW_AXES, None)  # one of a head's width, or a latent's
HEADS_BHh = P(ROW_AXES, "tensor", None)  # one of all heads' for each row
X_BTD = P(ROW_AXES, TOKEN_AXES, None)  # the stream as a product with a weight reads it
X_BTF = P(ROW_AXES, TOKEN_AXES, "tensor")  # the MLP's inside, and logits
X_BTHh = P(ROW_AXES, TOKEN_AXES, "tensor", None)  # queries, keys, values
CACHE_BKSh = P(ROW_AXES, "tensor", None, None)  # keys and values by slot
LATENTS_B1Sc = P(ROW_AXES, None, None, None)  # the same of latents, which all heads share
OWN_KEYS_CBTHh = P(TOKEN_AXES, ROW_AXES, None, "tensor", None)  # what each device attends to
CHOICES_BTk = P(ROW_AXES, TOKEN_AXES, None)  # numbers of each token for each of its experts
SORTED_M = P(AXES)  # tokens of each device's experts, expert after expert

# Weights: one side over fsdp, expert and context, one over tensor; experts over expert
EMBEDDING_VD = P("tensor", SHARD_AXES)
HEAD_DV = P(SHARD_AXES, "tensor")
HEADS_IN_DHh = P(SHARD_AXES, "tensor", None)
LATENT_IN_Dc = P(SHARD_AXES, None)
HEADS_Hh = P("tensor", None)
SPLIT_D = P("tensor")  # a number of each head, or of each of the stream's dimensions
TAPS_1tHh = P(None, None, "tensor", None)
HEADS_OUT_HhD = P("tensor", None, SHARD_AXES)
MLP_IN_DF = P(SHARD_AXES, "tensor")
MLP_OUT_FD = P("tensor", SHARD_AXES)
ROUTER_DE = P(SHARD_AXES, None)
EXPERTS_IN_EDF = P("expert", SHARDS_OF_EXPERT, "tensor")
EXPERTS_OUT_EFD = P("expert", "tensor", SHARDS_OF_EXPERT)
EXPERT_BIASES_EF = P("expert", "tensor")
BIASES_OUT_ED = P(None, SHARD_AXES)
LAYERS_L = P("stage")  # the layers of a pipeline, each on its stage


def axes_spec(*partitions: str | tuple[str, ...] | None) -> P:
    return P(*partitions)


def without_axis(spec: P, axis: str) -> P:
    """Returns the spec of an array that is whole in every dimension that this axis shards."""
    whole = (None if axis in _tuple(part) else part for part in spec.partitions)
    return P(*whole, reduced=spec.reduced)


def _tuple(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return part if isinstance(part, tuple) else (part,)


# Gradients that travel once: over the axes in the `reduced` of a weight's spec its gradient stays
# apart (`unreduced`): each device holds the sum over its own rows, until a reshard adds them up.


def weight_spec(spec: P, apart: Iterable[str]) -> P:
    """Returns the spec of a weight whose gradient stays apart over the axes of `apart` that do not
    shard it."""
    return P(*spec.partitions, reduced={*apart}.difference(spec.partitions))


def gradient_spec(spec: P) -> P:
    """Returns the spec of the gradient of a weight with this spec."""
    return P(*spec.partitions, unreduced=spec.reduced)


def own_gradient_spec(spec: P) -> P:
    """Returns the spec of a gradient that stays apart over all axes that shard the batch. The rows
    of a stage's or an expert's weight are on its devices already."""
    batch = {*BATCH_AXES}.difference({*STACK_AXES} & {*spec.partitions})
    whole = (None if batch & {*_tuple(part)} else part for part in spec.partitions)
    return P(*whole, unreduced=batch)


def summed_at_once(spec: P) -> tuple[str, ...]:
    """Returns the axes over which the gradient of a weight outside the layers is summed at once."""
    return tuple(axis for axis in COPY_AXES if axis not in spec.reduced)


def factor_spec(spec: P, own: P = REPLICATED) -> P:
    """Returns the spec of an array, by default a scalar, with the partitions of `own`, that
    multiplies one with this spec."""
    return P(*own.partitions, reduced=spec.unreduced)


def unmarked_spec(spec: P) -> P:
    """Returns the spec without what it says of gradients."""
    return P(*spec.partitions)


def stack_spec(spec: P, axes: int = 1) -> P:
    """Adds axes in front: [...] -> [k, ...]."""
    return P(*(None,) * axes, *spec.partitions, reduced=spec.reduced, unreduced=spec.unreduced)


def unstack_spec(spec_k: P, axes: int = 1) -> P:
    """Drops axes in front: [k, ...] -> [...]."""
    return P(*spec_k.partitions[axes:], reduced=spec_k.reduced, unreduced=spec_k.unreduced)


def merge_spec(spec_BT: P) -> P:
    """Merges rows and tokens: [B, T, ...] -> [N, ...]."""
    return P(BATCH_AXES, *spec_BT[2:])


def staged_rows_spec(spec_B: P) -> P:
    """Splits rows: [B] -> [d, S, B], by copies, stages and other axes."""
    within = tuple(axis for axis in spec_B[0] if axis not in (*AROUND_STAGES, "stage"))
    return P(AROUND_STAGES, "stage", within, *spec_B[1:])


def staged_layers_spec(spec: P) -> P:
    """Adds layers in front, each on its stage: [...] -> [L, ...]."""
    return P(*LAYERS_L, *spec.partitions, reduced=spec.reduced)
