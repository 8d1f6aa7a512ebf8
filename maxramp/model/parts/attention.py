"""Causal grouped-query attention, by the best implementation for the hardware.

A row of the cache with S slots holds its last S tokens, the one at position p in slot p % S: all,
or those of a window. Behind a shorter prompt stands padding; each slot is written before a token
sees it.

Shapes: B rows, T tokens, S tokens attended to (= T) or slots, H query heads, K key/value heads, G
query heads per key/value head (H = K * G), h head width.
"""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp

from maxramp.errors import ConfigError
from maxramp.model.keys import ModelKeys
from maxramp.model.parts.positions import Positions
from maxramp.parallel.collectives import map_shards
from maxramp.parallel.sharding import ROWS_B, TOKENS_BT, CACHE_BKSh, X_BTHh, X_BTKGh

LANES = 128  # what a splash block is a multiple of
_LARGEST_BLOCK = 512
CONTEXT = "context"  # what remat_policy=minimal_with_context keeps: a kernel's result and sums


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("positions",),
    meta_fields=("window", "scale", "cap"),
)
@dataclasses.dataclass(frozen=True)
class Rule:
    """Which tokens a token sees, of those up to its own, and what its scores are."""

    positions: Positions = Positions()
    # tokens that each sees, itself included; 0 = all (Mistral 7B, arXiv 2310.06825)
    window: int = 0
    scale: float = 0.0  # what products of queries and keys are multiplied by; 0 = 1 / sqrt(h)
    # scores are cap * tanh(score / cap); 0 = as they are (Gemma 2, arXiv 2408.00118)
    cap: float = 0.0

    def sees(self, at_T: jax.Array, at_S: jax.Array) -> jax.Array:
        """[..., T, S]: whether tokens at positions T of a text see those at positions S of it."""
        at_T1, at_1S = at_T[..., None], at_S[..., None, :]
        seen_TS = at_1S <= at_T1
        if self.window:
            seen_TS &= at_1S > at_T1 - self.window
        return seen_TS

    def mask(self, tokens: int) -> jax.Array:
        """Whether each token of a row sees each: [T, S], or of each row [B, 1, 1, T, S]."""
        at = self.positions.order(tokens)
        seen = self.sees(at, at)
        if not self.positions.is_ordered:
            seen = seen[:, None, None]
        if self.positions.segments_BT is not None:
            seen = seen & self.positions.same_segment[:, None, None]
        return seen

    def weights(self, scores_BKGTS: jax.Array, seen: jax.Array) -> jax.Array:
        """The softmax [B, K, G, T, S] of float32 scores, (queries * `scale_of` them) keys."""
        if self.cap:
            scores_BKGTS = self.cap * jnp.tanh(scores_BKGTS / self.cap)
        scores_BKGTS = jnp.where(seen, scores_BKGTS, jnp.finfo(jnp.float32).min)
        return jax.nn.softmax(scores_BKGTS, axis=-1)

    def scale_of(self, q: jax.Array) -> float:
        return self.scale or q.shape[-1] ** -0.5


def select(
    asked: str, platform: str | None, dtype: str, head_dim: int, tokens: int, in_order: bool = True
) -> str:
    """The implementation that was asked for; under autoselected the best that can. `in_order`:
    tokens of a row lie in the order of their positions. `platform` is None where unknown."""
    there, length = f"{platform or 'unknown'} devices", "max_target_length or row_length"
    order = {"needs tokens that lie in order, and these do not": not in_order}
    obstacles = {
        "cudnn_flash": {
            **order,
            f"needs NVIDIA GPUs, not {there}": platform not in ("gpu", "cuda"),
            f"needs dtype=bfloat16, not {dtype}": dtype != "bfloat16",
            f"needs a head_dim that is a multiple of 8 up to 256, not {head_dim}": (
                head_dim % 8 or head_dim > 256
            ),
        },
        "splash": {
            **order,
            f"needs TPUs, not {there}": platform != "tpu",
            f"needs a {length} that is a multiple of {LANES}, not {tokens}": tokens % LANES,
        },
        "dot_product": {},
    }
    return choose("attention", asked, obstacles)


def choose(key: str, asked: str, obstacles: dict[str, dict[str, object]]) -> str:
    """The value of a key that was asked for, or an error that names an obstacle that stands; under
    autoselected the first value that has none. The last one never has any."""
    if asked == "autoselected":
        return next(name for name, found in obstacles.items() if not any(found.values()))
    for obstacle, stands in obstacles[asked].items():
        if stands:
            others = f"{key}=autoselected or {[*obstacles][-1]}"
            raise ConfigError(f"{key}={asked} {obstacle}; use {others}")
    return asked


def select_for(keys: ModelKeys, platform: str | None) -> str:
    return select(keys.attention, platform, keys.dtype, keys.head_dim, keys.max_target_length)


def cost_of_packing(implementation: str) -> str | None:
    """A line for the log on what packed rows cost an implementation; None if nothing."""
    if implementation != "cudnn_flash" or _has_packed_kernel():
        return None
    return (
        "packed rows take cuDNN a mask of T x T a row: this version of jax has no Pallas for "
        "Triton; use jax 0.10.2 to 0.12, or separate_documents=False"
    )


def _has_packed_kernel() -> bool:
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def attend(
    q_BTHh: jax.Array, k_BSKh: jax.Array, v_BSKh: jax.Array, rule: Rule, kernel: str = "dot_product"
) -> jax.Array:
    """softmax(q k * scale) v over the tokens that the rule lets each see: [B, T, H, h], as X_BTHh.
    Scores and softmax are float32. Kernels that end in "_interpreted" need no accelerator."""
    arrays = (q_BTHh, k_BSKh, v_BSKh, rule)
    if kernel == "dot_product":
        return _dot_product(*arrays)
    # A kernel sees the rows and heads of one device; attention needs no others.
    specs = (*(X_BTHh,) * 3, jax.tree.map(lambda _: TOKENS_BT, rule))
    arrays = jax.tree.map(jax.reshard, arrays, specs)
    return map_shards(_KERNELS[kernel], specs, X_BTHh)(*arrays)


def _dot_product(q_BTHh, k_BSKh, v_BSKh, rule):
    B, T, H, h = q_BTHh.shape
    K = k_BSKh.shape[2]
    q_BTKGh = jax.lax.reshape(q_BTHh, (B, T, K, H // K, h), out_sharding=X_BTKGh)
    out_BTKGh = _products(q_BTKGh, k_BSKh, v_BSKh, "BSKh", rule, rule.mask(T))
    return jax.lax.reshape(out_BTKGh, (B, T, H, h), out_sharding=X_BTHh)


def _products(q_BTKGh, k, v, axes, rule, seen):
    q = q_BTKGh * rule.scale_of(q_BTKGh)
    scores_BKGTS = jnp.einsum(f"BTKGh,{axes}->BKGTS", q, k, preferred_element_type=jnp.float32)
    weights_BKGTS = rule.weights(scores_BKGTS, seen).astype(v.dtype)
    return jnp.einsum(f"BKGTS,{axes}->BTKGh", weights_BKGTS, v)


def _gpu_flash(q_BTHh, k_BSKh, v_BSKh, rule, interpret=False):
    """cuDNN's flash attention, or our own for packed rows, which cost cuDNN a dense mask."""
    assert not (rule.scale or rule.cap), "no family has them with this kernel"
    mask = None
    if rule.positions.segments_BT is not None:
        if _has_packed_kernel():
            from maxramp.model.parts.packed_attention import packed_attention  # only where it is

            first_BT = rule.positions.first_seen(rule.window)
            return packed_attention(q_BTHh, k_BSKh, v_BSKh, first_BT, interpret)
        mask = rule.positions.same_segment[:, None]
    return jax.nn.dot_product_attention(
        q_BTHh,
        k_BSKh,
        v_BSKh,
        mask=mask,
        is_causal=True,
        local_window_size=(rule.window - 1, 0) if rule.window else None,
        implementation="cudnn",
    )


def _splash(q_BTHh, k_BSKh, v_BSKh, rule, interpret=False):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # only where it is used

    T, H = q_BTHh.shape[1:3]
    block = next(n for n in range(_LARGEST_BLOCK, 0, -LANES) if T % n == 0)
    names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    mask = splash.CausalMask((T, T))
    if rule.window:
        mask = splash.LocalMask((T, T), (rule.window - 1, 0), 0)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * H),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=splash.BlockSizes(**{f"block_{name}": block for name in names}),
        residual_checkpoint_name=CONTEXT,
        attn_logits_soft_cap=rule.cap or None,
        interpret=interpret,
    )

    def row(q_THh, k_SKh, v_SKh, segments_T=None):
        segments = None if segments_T is None else splash.SegmentIds(segments_T, segments_T)
        q_THh = q_THh * rule.scale_of(q_THh)
        q_HTh, k_KSh, v_KSh = (x.swapaxes(0, 1) for x in (q_THh, k_SKh, v_SKh))
        return kernel(q_HTh, k_KSh, v_KSh, segment_ids=segments).swapaxes(0, 1)

    return jax.vmap(row)(q_BTHh, k_BSKh, v_BSKh, *jax.tree.leaves(rule))


_KERNELS = {
    "cudnn_flash": _gpu_flash,
    "packed_interpreted": functools.partial(_gpu_flash, interpret=True),
    "splash": _splash,
    "splash_interpreted": functools.partial(_splash, interpret=True),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Cache:
    """What a layer remembers of every row."""

    keys_BKSh: jax.Array  # turned by their positions
    values_BKSh: jax.Array  # in the dtype of the arithmetic, as the keys are
    positions_B: jax.Array  # int32, of the next token of each row

    def attend(
        self, q_BTHh: jax.Array, k_BTKh: jax.Array, v_BTKh: jax.Array, rule: Rule, kernel: str
    ) -> jax.Array:
        """`attend` of T more tokens of every row (one segment), put into their slots, to all up to
        each. Replaces the arrays of this object: it lives as long as the pass that is traced."""
        tokens, slots = q_BTHh.shape[1], self.keys_BKSh.shape[2]
        if tokens == slots:
            self.keys_BKSh, self.values_BKSh = (
                jax.reshard(x.swapaxes(1, 2), CACHE_BKSh) for x in (k_BTKh, v_BTKh)
            )
            return attend(q_BTHh, k_BTKh, v_BTKh, rule, kernel)
        a_BTHh, self.keys_BKSh, self.values_BKSh = map_shards(
            functools.partial(_write_and_attend, rule=rule),
            (*(X_BTHh,) * 3, *(CACHE_BKSh,) * 2, ROWS_B),
            (X_BTHh, CACHE_BKSh, CACHE_BKSh),
        )(q_BTHh, k_BTKh, v_BTKh, self.keys_BKSh, self.values_BKSh, self.positions_B)
        return a_BTHh

    def resize(self, slots: int, lengths_B: jax.Array) -> "Cache":
        """The cache with other slots, of rows that have these lengths."""

        def move(x_BKSh: jax.Array, lengths_B: jax.Array) -> jax.Array:
            at_BS = _positions(lengths_B, slots)  # below 0: not there yet
            return jax.vmap(lambda x_KSh, at_S: x_KSh.at[:, at_S].get(mode="clip"))(x_BKSh, at_BS)

        move = map_shards(move, (CACHE_BKSh, ROWS_B), CACHE_BKSh)
        moved = (move(x, lengths_B) for x in (self.keys_BKSh, self.values_BKSh))
        return Cache(*moved, self.positions_B)


def _positions(lengths_B: jax.Array, slots: int) -> jax.Array:
    """Of the tokens in the slots of rows with these lengths: [B, S], below 0 for none."""
    last_B1 = lengths_B[:, None] - 1
    return last_B1 - (last_B1 - jnp.arange(slots)) % slots


def _write_and_attend(q_BTHh, k_BTKh, v_BTKh, keys_BKSh, values_BKSh, positions_B, *, rule):
    B, T, H, h = q_BTHh.shape
    K, S = keys_BKSh.shape[1:3]

    def write(slots_KSh, new_TKh, position):
        at = 0, position % S, 0
        return jax.lax.dynamic_update_slice(slots_KSh, new_TKh.swapaxes(0, 1), at)

    keys_BKSh = jax.vmap(write)(keys_BKSh, k_BTKh, positions_B)
    values_BKSh = jax.vmap(write)(values_BKSh, v_BTKh, positions_B)
    q_BTKGh = q_BTHh.reshape(B, T, K, H // K, h)
    at_BS = _positions(positions_B + T, S)
    seen_BTS = rule.sees(positions_B[:, None] + jnp.arange(T), at_BS) & (at_BS >= 0)[:, None]
    seen = seen_BTS[:, None, None]
    out_BTKGh = _products(q_BTKGh, keys_BKSh, values_BKSh, "BKSh", rule, seen)
    return out_BTKGh.reshape(B, T, H, h), keys_BKSh, values_BKSh
