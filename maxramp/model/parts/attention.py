"""Causal grouped-query attention, by the best implementation for the hardware.

Shapes: B rows, T tokens, S tokens attended to (= T), H query heads, K key/value heads, G
query heads per key/value head (H = K * G), h head width.
"""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp

from maxramp.errors import ConfigError
from maxramp.model.keys import ModelKeys, key_copies, select_strategy
from maxramp.model.parts.balanced_order import run_length
from maxramp.model.parts.positions import Positions
from maxramp.model.parts.splash_attention import LANES, splash_attention
from maxramp.model.parts.weights import static
from maxramp.parallel.axes import TOKEN_AXES
from maxramp.parallel.collectives import all_gather, all_to_all, map_shards
from maxramp.parallel.mesh import axis_size
from maxramp.parallel.sharding import ROWS_BT, X_BTHh

_NO_TRITON = "this version of jax has no Pallas for Triton; use jax 0.10.2 to 0.12"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rule:
    """Which tokens a token sees, of those up to its own, and what its scores are."""

    positions: Positions = Positions()
    # tokens that each sees, itself included; 0 = all (Mistral 7B, arXiv 2310.06825)
    window: int = static(default=0)
    # what products of queries and keys are multiplied by; 0 = 1 / sqrt(h)
    scale: float = static(default=0.0)
    # scores are cap * tanh(score / cap); 0 = as they are (Gemma 2, arXiv 2408.00118)
    cap: float = static(default=0.0)

    def sees(self, at_T: jax.Array, at_S: jax.Array) -> jax.Array:
        """[..., T, S]: whether tokens at positions T of a text see those at positions S of it."""
        at_T1, at_1S = at_T[..., None], at_S[..., None, :]
        seen_TS = at_1S <= at_T1
        if self.window:
            seen_TS &= at_1S > at_T1 - self.window
        return seen_TS

    def mask(self, tokens: int, places_Bt: jax.Array | None = None) -> jax.Array:
        """Whether each token of a row, or those at places of each row, see each of it: [T, S], or
        of each row [B, 1, 1, T, S]."""

        def pick(x: jax.Array) -> jax.Array:
            return x if places_Bt is None else _pick(x, places_Bt)

        at, segments_BS = self.positions.order(tokens), self.positions.segments_BT
        seen = self.sees(pick(at), at)
        seen = seen if seen.ndim == 2 else seen[:, None, None]
        if segments_BS is not None:
            same_BTS = pick(segments_BS)[:, :, None] == segments_BS[:, None]
            seen = seen & same_BTS[:, None, None]
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
    rule: Rule,
    kernel: str = "dot_product",
    strategy: str = "autoselected",
) -> jax.Array:
    """softmax(q k * scale) v over the tokens that the rule lets each see: [B, T, H, h], as X_BTHh.
    Scores and softmax are float32. Kernels that end in "_interpreted" need no accelerator.
    `strategy` is how tokens attend to those of other devices along `context`."""

    def local(q_BTHh: jax.Array, k_BSKh: jax.Array, v_BSKh: jax.Array, rule: Rule) -> jax.Array:
        devices, heads = axis_size(*TOKEN_AXES), (q_BTHh.shape[2], k_BSKh.shape[2])
        if devices == 1:
            return KERNELS[kernel](q_BTHh, k_BSKh, v_BSKh, rule)
        way = select_strategy(strategy, *heads, devices)
        if way == "ulysses":
            return _attend_by_heads(q_BTHh, k_BSKh, v_BSKh, rule, kernel)
        order = "in_order" if rule.positions.places_BT is None else "balanced"
        with jax.named_scope(f"attention_of_{devices}_devices_{order}"):  # planning/hlo.py reads it
            return _attend_to_gathered(q_BTHh, k_BSKh, v_BSKh, rule, kernel)

    # A kernel sees the rows and heads of one device; attention needs no others.
    arrays = (q_BTHh, k_BSKh, v_BSKh, rule)
    specs = (*(X_BTHh,) * 3, jax.tree.map(lambda _: ROWS_BT, rule))
    arrays = jax.tree.map(jax.reshard, arrays, specs)
    return map_shards(local, specs, X_BTHh)(*arrays)


def _attend_by_heads(q_BtHh, k_BtKh, v_BtKh, rule, kernel):
    """Each device gets whole rows of some of the heads, and what these attend to goes back
    (DeepSpeed Ulysses, arXiv 2309.14509): all have as much to do, whatever tokens see."""
    copies = key_copies(q_BtHh.shape[2], k_BtKh.shape[2], axis_size(*TOKEN_AXES))
    k_BtKh, v_BtKh = (jnp.repeat(x, copies, 2) if copies > 1 else x for x in (k_BtKh, v_BtKh))
    whole = (all_to_all(x, TOKEN_AXES, split=2, join=1) for x in (q_BtHh, k_BtKh, v_BtKh))
    return all_to_all(KERNELS[kernel](*whole, rule), TOKEN_AXES, split=1, join=2)


def _attend_to_gathered(q_BtHh, k_BtKh, v_BtKh, rule, kernel):
    """Each device gets all keys and values, and its own tokens attend to them."""
    (B, t), places_BT = q_BtHh.shape[:2], rule.positions.places_BT
    first = jax.lax.axis_index(TOKEN_AXES) * t
    k_BTKh, v_BTKh = (all_gather(x, TOKEN_AXES, dimension=1) for x in (k_BtKh, v_BtKh))
    if places_BT is None:
        places_Bt = jnp.broadcast_to(first + jnp.arange(t, dtype=jnp.int32), (B, t))
        return KERNELS[kernel](q_BtHh, k_BTKh, v_BTKh, rule, places_Bt, t)
    order_BT = jnp.argsort(places_BT, axis=1)  # of the row, where its tokens are
    k_BTKh, v_BTKh = (
        jnp.take_along_axis(x, order_BT[..., None, None], 1) for x in (k_BTKh, v_BTKh)
    )
    segments_BT = rule.positions.segments_BT
    if segments_BT is not None:
        segments_BT = jnp.take_along_axis(segments_BT, order_BT, 1)
    rule = dataclasses.replace(rule, positions=Positions(segments_BT))
    places_Bt = jax.lax.dynamic_slice_in_dim(places_BT, first, t, 1)
    return KERNELS[kernel](q_BtHh, k_BTKh, v_BTKh, rule, places_Bt, run_length(t))


def _pick(x: jax.Array, places_Bt: jax.Array) -> jax.Array:
    """What rows [T] or [B, T] have at places of each."""
    return jnp.take_along_axis(jnp.broadcast_to(x, (len(places_Bt), x.shape[-1])), places_Bt, 1)


def _dot_product(q_BTHh, k_BSKh, v_BSKh, rule, places_BT=None, run=0):
    mask = rule.mask(k_BSKh.shape[1], places_BT)
    return attend_plainly(q_BTHh, k_BSKh, v_BSKh, "BSKh", rule, mask)


def attend_plainly(q_BTHh, k, v, axes, rule, seen):
    """On one device."""
    B, T, H, h = q_BTHh.shape
    K = k.shape[axes.index("K")]
    q = q_BTHh.reshape(B, T, K, H // K, h) * rule.scale_of(q_BTHh)
    scores_BKGTS = jnp.einsum(f"BTKGh,{axes}->BKGTS", q, k, preferred_element_type=jnp.float32)
    weights_BKGTS = rule.weights(scores_BKGTS, seen).astype(v.dtype)
    out_BTKGh = jnp.einsum(f"BKGTS,{axes}->BTKGh", weights_BKGTS, v)
    return out_BTKGh.reshape(B, T, H, h)


def _gpu_flash(q_BTHh, k_BSKh, v_BSKh, rule, places_BT=None, run=0, interpret=False):
    """cuDNN's flash attention; our own for packed rows, which cost cuDNN a dense mask, for some
    tokens of rows, for scores with a cap, which cuDNN has not, and for heads that it refuses."""
    packed, mask = rule.positions.segments_BT is not None, None
    only_ours = bool(rule.cap) or places_BT is not None
    only_ours |= not _takes_heads(q_BTHh.shape[-1])
    if has_triton() and (packed or only_ours):
        from maxramp.model.parts.packed_attention import packed_attention  # only where it is

        B, S = k_BSKh.shape[:2]
        if places_BT is None:
            places_BT = jnp.broadcast_to(rule.positions.order(S), (B, S))
        first_BT = _pick(rule.positions.first_seen(S, rule.window), places_BT)
        seen, scale = (first_BT, places_BT), rule.scale_of(q_BTHh)
        with jax.named_scope(f"attention_window_{rule.window}"):  # planning/gpu.py reads it
            return packed_attention(q_BTHh, k_BSKh, v_BSKh, *seen, scale, rule.cap, interpret)
    if only_ours:
        what = "cap of scores" if rule.cap else "part of a row, nor heads over 128 here"
        raise ConfigError(f"attention=cudnn_flash takes no {what}: {_NO_TRITON}, or dot_product")
    if packed:
        mask = rule.positions.same_segment[:, None]
    return jax.nn.dot_product_attention(
        q_BTHh,
        k_BSKh,
        v_BSKh,
        mask=mask,
        scale=rule.scale_of(q_BTHh),
        is_causal=True,
        local_window_size=(rule.window - 1, 0) if rule.window else None,
        implementation="cudnn",
    )


def _takes_heads(width: int) -> bool:
    """Gradients of heads over 128 need a Hopper or newer, and JAX asks the devices here which they
    are, also where it compiles for others."""
    if width <= 128:
        return True
    on_gpus = jax.default_backend() == "gpu"
    return on_gpus and all(float(x.compute_capability) >= 9 for x in jax.local_devices())


def _splash(q_BTHh, k_BSKh, v_BSKh, rule, places_BT=None, run=0, interpret=False):
    q_BTHh = q_BTHh * rule.scale_of(q_BTHh)
    seen = rule.positions, rule.window, rule.cap
    return splash_attention(q_BTHh, k_BSKh, v_BSKh, *seen, places_BT, run, interpret)


# `attend` on one device, of all tokens or of some of each row: those at places, int32, that rise
# along a row in runs of `run` consecutive tokens, from multiples of it on (for splash a multiple of
# 128).
KERNELS = {
    "dot_product": _dot_product,
    "cudnn_flash": _gpu_flash,
    "packed_interpreted": functools.partial(_gpu_flash, interpret=True),
    "splash": _splash,
    "splash_interpreted": functools.partial(_splash, interpret=True),
}
