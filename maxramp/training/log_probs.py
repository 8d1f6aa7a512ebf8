"""Log-probabilities of given tokens, and the entropy they were drawn with, with their gradients.

Shapes: B rows, T tokens, t tokens of a block, D model width, V vocabulary.
"""

import jax
import jax.numpy as jnp

from maxramp.model.layers import dense
from maxramp.parallel.sharding import TOKENS_BT, X_BTD, X_BTF


def log_probs(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    temperature: float,
    block_tokens: int,
) -> tuple[jax.Array, jax.Array]:
    """Of softmax(x @ head / temperature) in float32, the target's logarithm and the entropy.

    Args:
      x_BTD: the last layer's output.
      head_DV: output weights of x's dtype, sharded as HEAD_DV; its gradient may stay apart.
      targets_BT: token ids; negative ones read as token 0.
      temperature: above 0.
      block_tokens: of a row, whose logits exist at a time; 0 = all.

    Returns:
      Two arrays [B, T], float32, in nats.
    """
    B, T, D = x_BTD.shape
    count = -(-T // min(block_tokens or T, T))
    size = -(-T // count)
    padding = ((0, 0), (0, count * size - T))
    x_BTD = jnp.pad(jax.reshard(x_BTD, X_BTD), (*padding, (0, 0)))
    targets_BT = jnp.pad(jax.reshard(targets_BT, TOKENS_BT), padding)

    # As float32: logits are rounded nowhere, as in the sampler.
    head_DV = head_DV.astype(jnp.float32)

    @jax.checkpoint
    def block(head_DV: jax.Array, x_BtD: jax.Array, targets_Bt: jax.Array):
        logits_BtV = dense(x_BtD.astype(jnp.float32), "BTD,DV->BTV", head_DV, X_BTF) / temperature
        log_z_Bt = jax.nn.logsumexp(logits_BtV, axis=-1)
        is_target_BtV = jnp.arange(logits_BtV.shape[-1]) == jnp.maximum(targets_Bt, 0)[..., None]
        chosen_Bt = jnp.where(is_target_BtV, logits_BtV, 0).sum(-1)
        probabilities_BtV = jnp.exp(logits_BtV - log_z_Bt[..., None])
        entropy_Bt = log_z_Bt - (probabilities_BtV * logits_BtV).sum(-1)
        return chosen_Bt - log_z_Bt, jax.lax.stop_gradient(entropy_Bt)

    found = [
        block(head_DV, x_BTD[:, i : i + size], targets_BT[:, i : i + size])
        for i in range(0, count * size, size)
    ]
    return tuple(jnp.concatenate(parts, axis=1)[:, :T] for parts in zip(*found, strict=True))
