"""What a step trains on: rows of tokens, and what stands beside each token.

Between a file and a batch a row is one array of integers, in which marks say where documents begin
(`marks`); here they are taken apart.

Shapes: A gradient accumulation steps, B rows of a micro batch, S tokens of a row and the next one.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from maxramp.data.marks import START


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Arrays of one shape: [A, B, S] of a step, [B, S] of a micro batch.

    Every field lies and travels as the tokens do. One that is None is in no program.

    Attributes:
      tokens: int32 ids; PADDING (-1) is no token.
      begins: bool, whether a document begins with the token; None where rows are read as one text.
      loss_mask: bool, whether the token may be a target; None = all may.
      weights: float32, what an objective multiplies the token's term by; None = 1.
      shares: float32, what the token adds to the divisor of all terms; None = 1.
      sampled_log_probs: float32, of the token when it was sampled; None where none was.
      reference_log_probs: float32, of the token under a policy to stay near; None without one.
    """

    tokens: jax.Array | np.ndarray
    begins: jax.Array | np.ndarray | None = None
    loss_mask: jax.Array | np.ndarray | None = None
    weights: jax.Array | np.ndarray | None = None
    shares: jax.Array | np.ndarray | None = None
    sampled_log_probs: jax.Array | np.ndarray | None = None
    reference_log_probs: jax.Array | np.ndarray | None = None


def take_apart(rows: np.ndarray, packed: bool) -> Batch:
    """The batch of rows, which carry marks where they are packed."""
    if not packed:
        return Batch(rows)
    begins = rows >= START
    return Batch(np.where(begins, rows - START, rows), begins)


def abstract_batch(shape: tuple[int, ...], packed: bool, sharding: NamedSharding) -> Batch:
    """Shapes, dtypes and shardings of what `take_apart` makes of rows."""

    def of(dtype: jnp.dtype) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    return Batch(of(jnp.int32), of(jnp.bool_) if packed else None)
