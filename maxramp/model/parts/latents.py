"""Keys and values of whole rows from latents, where devices share out the tokens of a row.

Shapes: B rows, T tokens of a row, t of a device, C devices along `context`, c numbers of a latent,
H heads, n numbers of a head's key without positions, r of those with, h = n + r, v of its value, x
= n + v.
"""

import functools

import jax
import jax.numpy as jnp

from maxramp.parallel.axes import BATCH_AXES, SHARD_AXES, TOKEN_AXES
from maxramp.parallel.collectives import all_gather, map_shards, psum, psum_scatter
from maxramp.parallel.sharding import X_BTD, OWN_KEYS_CBTHh, Spec, gradient_spec


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def expand_latents(
    latent_BTc: jax.Array, rope_BTr: jax.Array, w_cHx: jax.Array, nope: int, strategy: str
) -> tuple[jax.Array, jax.Array]:
    """Returns what each device attends to: keys [C, B, T, H, h] of all tokens, whose first `nope`
    numbers are products, and values [C, B, T, H, v]; by ulysses H is of a part of the heads. Only
    latents and the numbers with positions, which all heads share, travel, and only their gradients
    travel back: a product with one device's gradients is a sum's term."""
    spec = jax.typeof(w_cHx).sharding.spec

    def local(latent_Btc, rope_Btr, w_cHx):
        latent_BTc, rope_BTr = (all_gather(x, TOKEN_AXES, 1) for x in (latent_Btc, rope_Btr))
        own_cHx = _own_heads(_gather(w_cHx, spec), strategy)
        keys_values_BTHx = jnp.einsum("BTc,cHx->BTHx", latent_BTc, own_cHx)
        k_BTHn, v_BTHv = jnp.split(keys_values_BTHx, [nope], axis=-1)
        shape = (*k_BTHn.shape[:3], rope_BTr.shape[-1])
        rope_BTHr = jnp.broadcast_to(rope_BTr[:, :, None], shape)
        return jnp.concatenate([k_BTHn, rope_BTHr], axis=-1)[None], v_BTHv[None]

    return map_shards(local, (X_BTD, X_BTD, spec), (OWN_KEYS_CBTHh, OWN_KEYS_CBTHh))(
        jax.reshard(latent_BTc, X_BTD), jax.reshard(rope_BTr, X_BTD), w_cHx
    )


def _backward(nope, strategy, residuals, gradients):
    latent_BTc, rope_BTr, w_cHx = residuals
    spec = jax.typeof(w_cHx).sharding.spec
    divided = {*jax.tree.leaves((*spec.partitions, *spec.reduced))}
    copies = [axis for axis in BATCH_AXES if axis not in divided]

    def local(latent_Btc, w_cHx, dk_CBTHh, dv_CBTHv):
        dk_BTHh, dv_BTHv = dk_CBTHh[0], dv_CBTHv[0]
        dkv_BTHx = jnp.concatenate([dk_BTHh[..., :nope], dv_BTHv], axis=-1)
        whole_cHx = _gather(w_cHx, spec)
        dlatent_BTc = jnp.einsum("BTHx,cHx->BTc", dkv_BTHx, _own_heads(whole_cHx, strategy))
        drope_BTr = dk_BTHh[..., nope:].astype(jnp.float32).sum(2).astype(dk_BTHh.dtype)
        own = (
            psum(psum_scatter(x, TOKEN_AXES, dimension=1), "tensor")
            for x in (dlatent_BTc, drope_BTr)
        )
        latent_BTc = all_gather(latent_Btc, TOKEN_AXES, 1)
        dw_cHx = jnp.einsum("BTc,BTHx->cHx", latent_BTc, dkv_BTHx).astype(w_cHx.dtype)
        if strategy == "ulysses":
            start = 0, jax.lax.axis_index(TOKEN_AXES) * dw_cHx.shape[1], 0
            zeros_cHx = jnp.zeros(whole_cHx.shape, dw_cHx.dtype)
            dw_cHx = jax.lax.dynamic_update_slice(zeros_cHx, dw_cHx, start)
        if SHARD_AXES in spec.partitions:
            dw_cHx = psum_scatter(dw_cHx, SHARD_AXES, dimension=0)
        return *own, psum(dw_cHx, copies).reshape(w_cHx.shape)

    local = map_shards(
        local, (X_BTD, spec, *(OWN_KEYS_CBTHh,) * 2), (X_BTD, X_BTD, gradient_spec(spec))
    )
    specs = (jax.typeof(x).sharding.spec for x in (latent_BTc, rope_BTr))
    *own, dw = local(jax.reshard(latent_BTc, X_BTD), w_cHx, *gradients)
    return *map(jax.reshard, own, specs), dw


expand_latents.defvjp(lambda *arguments: (expand_latents(*arguments), arguments[:3]), _backward)


def _gather(w_cHx: jax.Array, spec: Spec) -> jax.Array:
    """Gathers the weights of a layer, or of a stage's: [c, H, x]."""
    w_cHx = w_cHx.reshape(w_cHx.shape[-3:])
    return all_gather(w_cHx, SHARD_AXES) if SHARD_AXES in spec.partitions else w_cHx


def _own_heads(w_cHx: jax.Array, strategy: str) -> jax.Array:
    """Returns the weights of the heads that the device attends with."""
    if strategy != "ulysses":
        return w_cHx
    own = w_cHx.shape[1] // jax.lax.axis_size(TOKEN_AXES)
    return jax.lax.dynamic_slice_in_dim(w_cHx, jax.lax.axis_index(TOKEN_AXES) * own, own, 1)
