"""Multi-head latent attention as a layer's mixer (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Shapes: B rows, T tokens, D model width, S slots of the state, c numbers of a latent, H heads, n
numbers of a head's query and key without positions, r of those with, h = n + r, v of its value, x
several of these behind each other.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from maxramp.model.families.family import Family
from maxramp.model.keys import ModelKeys
from maxramp.model.mixers.attention import move_slots, visible_slots, write_slots
from maxramp.model.parts.attention import LANES, AttentionMask, attend, attend_plainly, strategy_for
from maxramp.model.parts.latents import expand_latents
from maxramp.model.parts.norm import RMSNorm
from maxramp.model.parts.positions import Pass, rotate_neighbours
from maxramp.model.parts.weights import Adapted, Weight, dense, merge_adapter, normal
from maxramp.model.pattern import Mixing
from maxramp.parallel.collectives import map_shards
from maxramp.parallel.sharding import (
    ROWS_B,
    STREAM_BTD,
    X_BTD,
    HEADS_IN_DHh,
    HEADS_OUT_HhD,
    LATENT_IN_Dc,
    LATENTS_B1Sc,
    X_BTHh,
)

_EPSILON = 1e-6  # of the latents' norms, whatever that of the others is, as in released models


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Latents:
    """A layer's cache: the latent of each token and its rotated key, in slots as those of
    `KeysAndValues`."""

    latents_B1Sx: jax.Array

    def write(self, latents_BT1x: jax.Array) -> None:
        """Writes the tokens of all slots, as many as there are, from position 0 on."""
        self.latents_B1Sx = jax.reshard(latents_BT1x.swapaxes(1, 2), LATENTS_B1Sc)

    def attend(
        self, q_BTHx: jax.Array, latents_BT1x: jax.Array, first_B: jax.Array, mask: AttentionMask
    ) -> jax.Array:
        """Writes a few more tokens of every row, from position first_B on, into their slots, in
        place, and returns the sums of the latents and keys that they attend to: [B, T, H, x]."""
        specs = X_BTHh, LATENTS_B1Sc, LATENTS_B1Sc, ROWS_B
        write_and_attend = functools.partial(_write_and_attend, mask=mask)
        out_BTHx, self.latents_B1Sx = map_shards(write_and_attend, specs, (X_BTHh, LATENTS_B1Sc))(
            q_BTHx, jax.reshard(latents_BT1x, LATENTS_B1Sc), self.latents_B1Sx, first_B
        )
        return out_BTHx

    def resize(self, slots: int, mixing: Mixing, lengths_B: jax.Array, ahead: int) -> "Latents":
        return Latents(move_slots(self.latents_B1Sx, slots, lengths_B, LATENTS_B1Sc))

    def keep(self, counts_B: jax.Array) -> "Latents":
        """As that of `KeysAndValues`."""
        return self


def _write_and_attend(q_BTHx, new_BT1x, latents_B1Sx, first_B, *, mask):
    latents_B1Sx = write_slots(latents_B1Sx, new_BT1x, first_B)
    visible = visible_slots(mask, first_B, q_BTHx.shape[1], latents_B1Sx.shape[2])
    out = attend_plainly(q_BTHx, latents_B1Sx, latents_B1Sx, "BKSh", mask, visible)
    return out, latents_B1Sx


class LatentAttention(nnx.Module):
    """Attention whose keys and values are products of a latent of each token, but for the numbers
    of a key that rotate, which all heads share. With `q_lora_rank`, so are queries of another."""

    def __init__(self, keys: ModelKeys, key: jax.Array, family: Family):
        D, H, dtype = keys.base_emb_dim, keys.base_num_query_heads, keys.weight_dtype
        q, c, r = keys.q_lora_rank, keys.kv_lora_rank, keys.qk_rope_head_dim
        h, v = family.head_widths(keys)
        self.widths = h - r, r, v  # n, r, v
        drawn = iter(jax.random.split(key, 5))

        def matrix(axes: str, *shape: int) -> Weight:
            spec = LATENT_IN_Dc if len(shape) == 2 else HEADS_IN_DHh
            return normal("matrix", axes, next(drawn), shape, spec, shape[0] ** -0.5, dtype)

        self.has_query_latent = q > 0
        if self.has_query_latent:
            self.query_Dc = matrix("D c", D, q)
            self.query_norm = RMSNorm((q,), _EPSILON, dtype, "c")
            self.query_cHh = matrix("c Hh", q, H, h)
        else:
            self.query_DHh = matrix("D Hh", D, H, h)
        self.latent_Dx = matrix("D x", D, c + r)
        self.latent_norm = RMSNorm((c,), _EPSILON, dtype, "c")
        self.key_value_cHx = matrix("c Hx", c, H, h - r + v)
        form = (H, v, D), HEADS_OUT_HhD, (H * v) ** -0.5, dtype
        self.out_HvD = normal("matrix", "Hv D", next(drawn), *form)

    def __call__(
        self, x_BTD: jax.Array, mixing: Mixing, shared: Pass, state: Latents | None = None
    ) -> jax.Array:
        """Maps [B, T, D] to [B, T, D]; with a state, for tokens from `shared.first_B` on, which it
        adds to the state in place: all of its slots, or fewer."""
        n, r, _ = self.widths
        angles, execution = shared.angles[mixing.rope], shared.execution
        x_BTD = jax.reshard(x_BTD, X_BTD)
        q_BTHh = self._query(x_BTD)
        q_BTHh = jnp.concatenate(
            [q_BTHh[..., :n], rotate_neighbours(q_BTHh[..., n:], angles)], axis=-1
        )
        latent_BTx = dense(x_BTD, self.latent_Dx, X_BTD)
        latent_BTc = self.latent_norm(latent_BTx[..., :-r])
        rope_BT1r = rotate_neighbours(latent_BTx[:, :, None, -r:], angles)
        scale = mixing.score_factor * (n + r) ** -0.5
        mask = AttentionMask(shared.positions, scale=scale)
        kernel, strategy = execution.attention, execution.context_parallel_strategy
        if state is not None:
            latents_BT1x = jnp.concatenate([latent_BTc[:, :, None], rope_BT1r], axis=-1)
            if x_BTD.shape[1] != state.latents_B1Sx.shape[2]:
                out_BTHv = self._attend_absorbed(q_BTHh, latents_BT1x, shared.first_B, mask, state)
                return dense(out_BTHv, self.out_HvD, STREAM_BTD)
            state.write(latents_BT1x)
            kernel = "dot_product" if x_BTD.shape[1] % LANES else kernel
        strategy = strategy_for(strategy, q_BTHh.shape[2], q_BTHh.shape[2])
        keys_values = self._expand(latent_BTc, rope_BT1r[:, :, 0], strategy)
        out_BTHv = attend(q_BTHh, *keys_values, mask, kernel, strategy)
        return dense(out_BTHv, self.out_HvD, STREAM_BTD)

    def _query(self, x_BTD: jax.Array) -> jax.Array:
        if not self.has_query_latent:
            return dense(x_BTD, self.query_DHh, X_BTHh)
        q_BTc = self.query_norm(dense(x_BTD, self.query_Dc, X_BTD))
        return dense(q_BTc, self.query_cHh, X_BTHh)

    def _expand(
        self, latent_BTc: jax.Array, rope_BTr: jax.Array, strategy: str
    ) -> tuple[jax.Array, jax.Array]:
        """Returns keys and values for `attend`: with a strategy those of all tokens
        (`expand_latents`), but not for a weight with adapters."""
        (n, r, _), weight = self.widths, self.key_value_cHx
        if strategy and not isinstance(weight, Adapted):
            w_cHx = weight[...].astype(latent_BTc.dtype)
            return expand_latents(latent_BTc, rope_BTr, w_cHx, n, strategy)
        keys_values_BTHx = dense(latent_BTc, weight, X_BTHh)
        shape = (*keys_values_BTHx.shape[:3], r)
        rope_BTHr = jax.lax.broadcast_in_dim(rope_BTr, shape, (0, 1, 3), out_sharding=X_BTHh)
        k_BTHh = jnp.concatenate([keys_values_BTHx[..., :n], rope_BTHr], axis=-1)
        return k_BTHh, keys_values_BTHx[..., n:]

    def _attend_absorbed(
        self,
        q_BTHh: jax.Array,
        latents_BT1x: jax.Array,
        first_B: jax.Array,
        mask: AttentionMask,
        state: Latents,
    ) -> jax.Array:
        """Attends to latents as if to keys of one head, and makes values of what it sums: so no key
        is ever made. Returns [B, T, H, v]."""
        (n, r, _), weight = self.widths, self.key_value_cHx
        w_cHx = merge_adapter(weight) if isinstance(weight, Adapted) else weight[...]
        w_cHx = w_cHx.astype(q_BTHh.dtype)
        multiply = functools.partial(jnp.einsum, out_sharding=X_BTHh)
        q_BTHc = multiply("BTHn,cHn->BTHc", q_BTHh[..., :n], w_cHx[..., :n])
        q_BTHx = jnp.concatenate([q_BTHc, q_BTHh[..., n:]], axis=-1)
        out_BTHx = state.attend(q_BTHx, latents_BT1x, first_B, mask)
        return multiply("BTHc,cHv->BTHv", out_BTHx[..., :-r], w_cHx[..., n:])

    @staticmethod
    def empty_state(keys: ModelKeys, rows: int, slots: int) -> Latents:
        shape = rows, 1, slots, keys.kv_lora_rank + keys.qk_rope_head_dim
        return Latents(jax.reshard(jnp.zeros(shape, keys.dtype), LATENTS_B1Sc))
