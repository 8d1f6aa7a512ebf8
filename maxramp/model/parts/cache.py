"""Keys and values of the tokens that a decoder has read, so that it reads each of them once.

Slot s of a row holds its token at position s, whatever the other rows hold. So prompts of different
lengths begin at slot 0 like every row in training, with padding behind them: a token sees the slots
up to its own, and each is written before a token that sees it.

Shapes: B rows, T tokens, S slots, H query heads, K key/value heads, G query heads per key/value
head (H = K * G), h head width.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from maxramp.model.parts.attention import Rule, attend
from maxramp.parallel.sharding import ROWS_B, CACHE_BKSh, X_BTHh


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("keys_BKSh", "values_BKSh", "positions_B"),
    meta_fields=(),
)
@dataclasses.dataclass
class Cache:
    """What a layer remembers of every row.

    Attributes:
      keys_BKSh: turned by their positions.
      values_BKSh: in the dtype of the arithmetic, as the keys are.
      positions_B: int32, of the next token of each row.
    """

    keys_BKSh: jax.Array
    values_BKSh: jax.Array
    positions_B: jax.Array

    def attend(
        self, q_BTHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array, rule: Rule, kernel: str
    ) -> jax.Array:
        """Puts T more tokens of every row into their slots, and attends to all up to each.

        The arrays of this object are replaced: it lives as long as the pass that is being traced.

        Args:
          q_BTHh: queries, sharded as X_BTHh like keys and values.
          k_BTKh: keys.
          v_BTKh: values.
          rule: which tokens each sees; a row is one segment.
          kernel: of `attend`, for rows that are read from their beginning.

        Returns:
          [B, T, H, h], as `attend` gives it.
        """
        tokens, slots = q_BTHh.shape[1], self.keys_BKSh.shape[2]
        if tokens == slots:
            self.keys_BKSh, self.values_BKSh = (
                jax.reshard(x.swapaxes(1, 2), CACHE_BKSh) for x in (k_BTKh, v_BTKh)
            )
            return attend(q_BTHh, k_BTKh, v_BTKh, rule, kernel)
        specs = (X_BTHh,) * 3 + (CACHE_BKSh,) * 2 + (ROWS_B,)
        a_BTHh, self.keys_BKSh, self.values_BKSh = jax.shard_map(
            functools.partial(_write_and_attend, rule=rule),
            in_specs=specs,
            out_specs=(X_BTHh, CACHE_BKSh, CACHE_BKSh),
            check_vma=False,
        )(q_BTHh, k_BTKh, v_BTKh, self.keys_BKSh, self.values_BKSh, self.positions_B)
        return a_BTHh

    def grown(self, slots: int) -> "Cache":
        """The same with so many slots, empty ones behind those that there are."""

        def pad(x_BKSh: jax.Array) -> jax.Array:
            return jnp.pad(x_BKSh, ((0, 0), (0, 0), (0, slots - x_BKSh.shape[2]), (0, 0)))

        return Cache(pad(self.keys_BKSh), pad(self.values_BKSh), self.positions_B)


def _write_and_attend(q_BTHh, k_BTKh, v_BTKh, keys_BKSh, values_BKSh, positions_B, *, rule):
    """`Cache.attend` on one device, with its rows and heads."""
    B, T, H, h = q_BTHh.shape
    K, S = keys_BKSh.shape[1:3]

    def write(slots_KSh, new_TKh, position):
        return jax.lax.dynamic_update_slice(slots_KSh, new_TKh.swapaxes(0, 1), (0, position, 0))

    keys_BKSh = jax.vmap(write)(keys_BKSh, k_BTKh, positions_B)
    values_BKSh = jax.vmap(write)(values_BKSh, v_BTKh, positions_B)
    q_BTKGh = q_BTHh.reshape(B, T, K, H // K, h)
    own_BT = positions_B[:, None] + jnp.arange(T)
    seen_BTS = rule.sees(own_BT, jnp.arange(S))
    scores_BKGTS = jnp.einsum(
        "BTKGh,BKSh->BKGTS",
        q_BTKGh * rule.scale_of(q_BTKGh),
        keys_BKSh,
        preferred_element_type=jnp.float32,
    )
    weights_BKGTS = rule.weights(scores_BKGTS, seen_BTS[:, None, None])
    weights_BKGTS = weights_BKGTS.astype(values_BKSh.dtype)
    out_BTKGh = jnp.einsum("BKGTS,BKSh->BTKGh", weights_BKGTS, values_BKSh)
    return out_BTKGh.reshape(B, T, H, h), keys_BKSh, values_BKSh
