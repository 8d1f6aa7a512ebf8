"""Cross-entropy as a sum over tokens, so that any split of the rows adds up to the same.

Shapes: B rows, T tokens, V vocabulary.
"""

import jax
import jax.numpy as jnp

PADDING = -1  # a token id that stands for no token: never a target


def cross_entropy_sums(
    logits_BTV: jax.Array, targets_BT: jax.Array, z_loss_multiplier: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums over the tokens that are targets.

    Args:
      logits_BTV: float32.
      targets_BT: token ids, PADDING where there is no target.
      z_loss_multiplier: weight of log(Z)^2 (PaLM, arXiv 2204.02311, section 5).

    Returns:
      (objective, cross_entropy, tokens), float32 scalars: what training minimizes (cross-entropy
      plus the z-loss) and the cross-entropy alone, both in nats, and the number of targets.
    """
    counts_BT = targets_BT >= 0
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    # The target's logit by a masked sum: a gather would move a vocabulary that is sharded.
    is_target_BTV = jnp.arange(logits_BTV.shape[-1]) == targets_BT[..., None]
    target_logit_BT = jnp.where(is_target_BTV, logits_BTV, 0).sum(-1)
    cross_entropy = jnp.where(counts_BT, log_z_BT - target_logit_BT, 0).sum()
    objective = cross_entropy
    if z_loss_multiplier:
        objective += z_loss_multiplier * jnp.where(counts_BT, log_z_BT**2, 0).sum()
    return objective, cross_entropy, counts_BT.sum(dtype=jnp.float32)
