"""Causal grouped-query attention, by the best implementation for the hardware.

Shapes: B rows, T tokens, S tokens attended to (= T), H query heads, K key/value heads, G
query heads per key/value head (H = K * G), h head width; that of values may be another.
"""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp

from maxramp.errors import ConfigError
from maxramp.model.families.table import FAMILIES
from maxramp.model.keys import ModelKeys, key_copies, select_strategy
from maxramp.model.parts.positions import Positions, run_length
from maxramp.model.parts.splash_attention import LANES, splash_attention
from maxramp.model.parts.weights import static
from maxramp.parallel.axes import TOKEN_AXES
from maxramp.parallel.collectives import all_gather, all_to_all, map_shards
from maxramp.parallel.mesh import axis_size, platform
from maxramp.parallel.sharding import ROWS_BT, OWN_KEYS_CBTHh, X_BTHh

_NO_TRITON = "this version of jax has no Pallas for Triton; use jax 0.10.2 to 0.12"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionMask:
    """Which earlier tokens a token sees, and how their scores are scaled."""

    positions: Positions = Positions()
    # how many tokens each sees, itself included; 0 = all (Mistral 7B, arXiv 2310.06825)
    window: int = static(default=0)
    # what products of queries and keys are multiplied by; 0 = 1 / sqrt(h)
    scale: float = static(default=0.0)
    # scores are cap * tanh(score / cap); 0 = as they are (Gemma 2, arXiv 2408.00118)
    cap: float = static(default=0.0)
    # float32, of each query head: one more score, of no token, in its softmax (gpt-oss, arXiv
    # 2508.10925); in a pipeline [S, H]. None if there are none
    sinks_H: jax.Array | None = None

    @property
    def specs(self) -> "AttentionMask":
        """How its arrays lie where each device has whole rows of some heads."""
        specs = jax.tree.map(lambda _: ROWS_BT, self)
        if self.sinks_H is None:
            return specs
        return dataclasses.replace(specs, sinks_H=jax.typeof(self.sinks_H).sharding.spec)

    def sees(self, position_T: jax.Array, position_S: jax.Array) -> jax.Array:
        """Tells whether tokens at positions T of a text see those at positions S: [..., T, S]."""
        position_T1, position_1S = position_T[..., None], position_S[..., None, :]
        sees_TS = position_1S <= position_T1
        if self.window:
            sees_TS &= position_1S > position_T1 - self.window
        return sees_TS

    def materialize(self, tokens: int, index_Bt: jax.Array | None = None) -> jax.Array:
        """Returns the mask [T, S], or one for each row [B, 1, 1, T, S], of rows of S tokens. With
        `index_Bt` the queries are those tokens of each row, else all."""

        def pick(x: jax.Array) -> jax.Array:
            return x if index_Bt is None else _pick(x, index_Bt)

        order, segments_BS = self.positions.order(tokens), self.positions.segments_BT
        mask = self.sees(pick(order), order)
        mask = mask if mask.ndim == 2 else mask[:, None, None]
        if segments_BS is not None:
            same_BTS = pick(segments_BS)[:, :, None] == segments_BS[:, None]
            mask = mask & same_BTS[:, None, None]
        return mask

    def softmax(self, scores_BKGTS: jax.Array, mask: jax.Array) -> jax.Array:
        """Returns attention's weights [B, K, G, T, S] for float32 scores of scaled queries."""
        if self.cap:
            scores_BKGTS = self.cap * jnp.tanh(scores_BKGTS / self.cap)
        scores_BKGTS = jnp.where(mask, scores_BKGTS, jnp.finfo(jnp.float32).min)
        if self.sinks_H is None:
            return jax.nn.softmax(scores_BKGTS, axis=-1)
        sinks_KG11 = self.sinks_H.reshape(*scores_BKGTS.shape[1:3], 1, 1)
        top_BKGT1 = jnp.maximum(scores_BKGTS.max(-1, keepdims=True), sinks_KG11)
        top_BKGT1 = jax.lax.stop_gradient(top_BKGT1)
        weights_BKGTS = jnp.exp(scores_BKGTS - top_BKGT1)
        sum_BKGT1 = weights_BKGTS.sum(-1, keepdims=True) + jnp.exp(sinks_KG11 - top_BKGT1)
        return weights_BKGTS / sum_BKGT1

    def query_scale(self, head_dim: int) -> float:
        return self.scale or head_dim**-0.5


def select(
    requested: str,
    platform: str | None,
    dtype: str,
    head_dim: int,
    tokens: int,
    in_order: bool = True,
) -> str:
    """Returns the requested implementation; for "autoselected" the best one that works.

    `tokens` is the length of a row; `in_order` tells whether its tokens lie in the order of their
    positions; `platform` is None if unknown. A ConfigError if the requested one does not work.
    """
    devices, length = f"{platform or 'unknown'} devices", "max_target_length or row_length"
    order = {"needs tokens that lie in order, and these do not": not in_order}
    obstacles = {
        "cudnn_flash": {
            **order,
            f"needs NVIDIA GPUs, not {devices}": platform not in ("gpu", "cuda"),
            f"needs dtype=bfloat16, not {dtype}": dtype != "bfloat16",
            f"needs a head_dim that is a multiple of 8 up to 256, not {head_dim}": (
                head_dim % 8 or head_dim > 256
            ),
        },
        "splash": {
            **order,
            f"needs TPUs, not {devices}": platform != "tpu",
            f"needs a {length} that is a multiple of {LANES}, not {tokens}": tokens % LANES,
        },
        "dot_product": {},
    }
    return choose("attention", requested, obstacles)


def choose(key: str, requested: str, obstacles: dict[str, dict[str, object]]) -> str:
    """Returns the requested value of a key, or for "autoselected" the first without an obstacle.

    `obstacles` has for each value the reasons that may rule it out, and whether they do; the last
    value has none. Raises a ConfigError if one rules the requested value out.
    """
    if requested == "autoselected":
        return next(name for name, reasons in obstacles.items() if not any(reasons.values()))
    for reason, applies in obstacles.get(requested, {}).items():
        if applies:
            others = f"{key}=autoselected or {[*obstacles][-1]}"
            raise ConfigError(f"{key}={requested} {reason}; use {others}")
    return requested


def select_for(keys: ModelKeys, platform: str | None) -> str:
    width, _ = FAMILIES[keys.decoder_block].head_widths(keys)
    return select(keys.attention, platform, keys.dtype, width, keys.max_target_length)


def cost_of_packing(implementation: str) -> str | None:
    """Returns the log's line on what packed rows cost an implementation, None if nothing."""
    if implementation != "cudnn_flash" or has_triton():
        return None
    return (
        f"packed rows take cuDNN a mask of T x T a row: {_NO_TRITON}, or separate_documents=False"
    )


def has_triton() -> bool:
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def attend(
    q_BTHh: jax.Array,
    k_BSKh: jax.Array,
    v_BSKh: jax.Array,
    mask: AttentionMask,
    kernel: str = "autoselected",
    strategy: str = "autoselected",
) -> jax.Array:
    """Returns softmax(q k * scale) v over the tokens that each token sees: [B, T, H, h], as X_BTHh.
    Keys and values lie as queries, or as OWN_KEYS_CBTHh, each device's by its strategy.

    Args:
      kernel: as in `select`, or a name of KERNELS that ends in "_interpreted" and needs no
        accelerator. Scores and softmax are float32 in all.
      strategy: the key `context_parallel_strategy`.
    """
    devices = axis_size(*TOKEN_AXES)
    strategy = strategy_for(strategy, q_BTHh.shape[2], k_BSKh.shape[-2])
    _, T, _, h = q_BTHh.shape
    are_whole = k_BSKh.ndim == 5
    keys_spec = OWN_KEYS_CBTHh if are_whole else X_BTHh
    own_tokens = T // devices if strategy == "all_gather" else T
    has_order = mask.positions.has_order
    kernel = select(kernel, platform(), q_BTHh.dtype.name, h, own_tokens, has_order)

    def local(q_BTHh, k_BSKh, v_BSKh, mask: AttentionMask) -> jax.Array:
        if are_whole:
            k_BSKh, v_BSKh = k_BSKh[0], v_BSKh[0]
        if devices == 1:
            return KERNELS[kernel](q_BTHh, k_BSKh, v_BSKh, mask)
        if strategy == "ulysses":
            return _attend_by_heads(q_BTHh, k_BSKh, v_BSKh, mask, kernel, are_whole)
        order = "in_order" if mask.positions.index_BT is None else "balanced"
        with jax.named_scope(f"attention_of_{devices}_devices_{order}"):  # planning/hlo.py reads it
            return _attend_to_gathered(q_BTHh, k_BSKh, v_BSKh, mask, kernel, are_whole)

    # A kernel sees the rows and heads of one device; attention needs no others.
    arrays = (q_BTHh, k_BSKh, v_BSKh, mask)
    specs = (X_BTHh, keys_spec, keys_spec, mask.specs)
    arrays = jax.tree.map(jax.reshard, arrays, specs)
    return map_shards(local, specs, X_BTHh)(*arrays)


def strategy_for(requested: str, query_heads: int, key_heads: int) -> str:
    """Returns how devices along `context` exchange what they attend to; "" if there is one."""
    devices, tensor = axis_size(*TOKEN_AXES), axis_size("tensor")
    heads = query_heads // tensor, key_heads // tensor
    return select_strategy(requested, *heads, devices) if devices > 1 else ""


def _attend_by_heads(q_BtHh, k_BtKh, v_BtKh, mask, kernel, are_whole):
    """Gives each device whole rows of some of the heads, and sends the results back (DeepSpeed
    Ulysses, arXiv 2309.14509): all devices have equal work, whatever tokens see. `are_whole`:
    keys and values lie so already."""
    devices = axis_size(*TOKEN_AXES)
    copies = key_copies(q_BtHh.shape[2], k_BtKh.shape[2], devices)

    def share_out(x: jax.Array) -> jax.Array:
        return all_to_all(x, TOKEN_AXES, split=2, join=1)

    if not are_whole:
        k_BtKh, v_BtKh = (jnp.repeat(x, copies, 2) if copies > 1 else x for x in (k_BtKh, v_BtKh))
        k_BtKh, v_BtKh = map(share_out, (k_BtKh, v_BtKh))
    if mask.sinks_H is not None:
        sinks_PH = mask.sinks_H.reshape(devices, -1)
        mask = dataclasses.replace(mask, sinks_H=sinks_PH[jax.lax.axis_index(TOKEN_AXES)])
    out_BTHh = KERNELS[kernel](share_out(q_BtHh), k_BtKh, v_BtKh, mask)
    return all_to_all(out_BTHh, TOKEN_AXES, split=1, join=2)


def _attend_to_gathered(q_BtHh, k_BTKh, v_BTKh, mask, kernel, are_whole):
    """Gathers all keys and values on each device, unless they `are_whole`; its own t tokens of a
    row attend to them. `mask` is of whole rows. Called inside `map_shards`."""
    (B, t), index_BT = q_BtHh.shape[:2], mask.positions.index_BT
    first = jax.lax.axis_index(TOKEN_AXES) * t
    if not are_whole:
        k_BTKh, v_BTKh = (all_gather(x, TOKEN_AXES, dimension=1) for x in (k_BTKh, v_BTKh))
    if index_BT is None:
        index_Bt = jnp.broadcast_to(first + jnp.arange(t, dtype=jnp.int32), (B, t))
        return KERNELS[kernel](q_BtHh, k_BTKh, v_BTKh, mask, index_Bt, t)
    order_BT = jnp.argsort(index_BT, axis=1)  # back to the order of the row
    k_BTKh, v_BTKh = (
        jnp.take_along_axis(x, order_BT[..., None, None], 1) for x in (k_BTKh, v_BTKh)
    )
    segments_BT = mask.positions.segments_BT
    if segments_BT is not None:
        segments_BT = jnp.take_along_axis(segments_BT, order_BT, 1)
    mask = dataclasses.replace(mask, positions=Positions(segments_BT))
    index_Bt = jax.lax.dynamic_slice_in_dim(index_BT, first, t, 1)
    return KERNELS[kernel](q_BtHh, k_BTKh, v_BTKh, mask, index_Bt, run_length(t))


def _pick(x: jax.Array, index_Bt: jax.Array) -> jax.Array:
    """Returns the values of rows [T] or [B, T] at the tokens `index_Bt` of each: [B, t]."""
    return jnp.take_along_axis(jnp.broadcast_to(x, (len(index_Bt), x.shape[-1])), index_Bt, 1)


def _dot_product(q_BTHh, k_BSKh, v_BSKh, mask, index_BT=None, run=0):
    visible = mask.materialize(k_BSKh.shape[1], index_BT)
    return attend_plainly(q_BTHh, k_BSKh, v_BSKh, "BSKh", mask, visible)


def attend_plainly(q_BTHh, k, v, axes, mask, visible):
    """Computes attention [B, T, H, h] on one device as two products and a softmax; k and v have
    `axes`, such as "BSKh", and `visible` is a bool mask that fits [B, K, G, T, S]."""
    B, T, H, h = q_BTHh.shape
    K = k.shape[axes.index("K")]
    q = q_BTHh.reshape(B, T, K, H // K, h) * mask.query_scale(q_BTHh.shape[-1])
    scores_BKGTS = jnp.einsum(f"BTKGh,{axes}->BKGTS", q, k, preferred_element_type=jnp.float32)
    weights_BKGTS = mask.softmax(scores_BKGTS, visible).astype(v.dtype)
    out_BTKGh = jnp.einsum(f"BKGTS,{axes}->BTKGh", weights_BKGTS, v)
    return out_BTKGh.reshape(B, T, H, -1)


def _gpu_flash(q_BTHh, k_BSKh, v_BSKh, mask, index_BT=None, run=0, interpret=False):
    """Runs cuDNN's flash attention, or our own kernel for what cuDNN lacks: packed rows (which cost
    it a dense mask), some tokens of a row, scores with a cap, sinks, and some widths of heads. A
    ConfigError where ours is needed and this jax has no Triton."""
    segments_BT = mask.positions.segments_BT
    packed = segments_BT is not None
    only_ours = bool(mask.cap) or index_BT is not None or mask.sinks_H is not None
    width = q_BTHh.shape[-1]
    only_ours |= not _cudnn_supports(width) or width != v_BSKh.shape[-1]
    if has_triton() and (packed or only_ours):
        from maxramp.model.parts.packed_attention import packed_attention  # only where it is

        B, S = k_BSKh.shape[:2]
        if index_BT is None:
            index_BT = jnp.broadcast_to(mask.positions.order(S), (B, S))
        first_BT = _pick(mask.positions.first_seen(S, mask.window), index_BT)
        visible, scale = (first_BT, index_BT), mask.query_scale(q_BTHh.shape[-1])
        with jax.named_scope(f"attention_window_{mask.window}"):  # planning/gpu.py reads it
            return packed_attention(
                *(q_BTHh, k_BSKh, v_BSKh, *visible, scale, mask.cap, _own_sinks(mask)),
                interpret=interpret,
            )
    if only_ours:
        what = "cap of scores" if mask.cap else "part of a row, nor heads over 128 here"
        what = what if mask.sinks_H is None else "sinks"
        raise ConfigError(f"attention=cudnn_flash takes no {what}: {_NO_TRITON}, or dot_product")
    return jax.nn.dot_product_attention(
        q_BTHh,
        k_BSKh,
        v_BSKh,
        mask=(segments_BT[:, :, None] == segments_BT[:, None])[:, None] if packed else None,
        scale=mask.query_scale(q_BTHh.shape[-1]),
        is_causal=True,
        local_window_size=(mask.window - 1, 0) if mask.window else None,
        implementation="cudnn",
    )


def _cudnn_supports(head_dim: int) -> bool:
    """Tells whether cuDNN has gradients for heads of this width: over 128 they need a Hopper or
    newer, and JAX asks the local devices, even when it compiles for others."""
    if head_dim <= 128:
        return True
    on_gpus = jax.default_backend() == "gpu"
    return on_gpus and all(float(x.compute_capability) >= 9 for x in jax.local_devices())


def _splash(q_BTHh, k_BSKh, v_BSKh, mask, index_BT=None, run=0, interpret=False):
    q_BTHh = q_BTHh * mask.query_scale(q_BTHh.shape[-1])
    visible = mask.positions, mask.window, mask.cap, _own_sinks(mask)
    return splash_attention(q_BTHh, k_BSKh, v_BSKh, *visible, index_BT, run, interpret)


def _own_sinks(mask: AttentionMask) -> jax.Array | None:
    """Returns the sinks of one device's heads: [H]."""
    return None if mask.sinks_H is None else mask.sinks_H.reshape(-1)


# Attention on one device. The queries are all tokens of a row, or those of `index_BT` (int32),
# which rise along the row in runs of `run` consecutive tokens that begin at multiples of `run` (for
# splash a multiple of 128).
KERNELS = {
    "dot_product": _dot_product,
    "cudnn_flash": _gpu_flash,
    "packed_interpreted": functools.partial(_gpu_flash, interpret=True),
    "splash": _splash,
    "splash_interpreted": functools.partial(_splash, interpret=True),
}
