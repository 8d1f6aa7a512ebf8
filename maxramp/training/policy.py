"""Group relative policy optimization (Shao et al., arXiv 2402.03300) as an objective.

Shapes: P prompts, G answers to each, B rows, T tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np

from maxramp.data.batch import Batch
from maxramp.model.decoder import Decoder
from maxramp.model.keys import Execution
from maxramp.model.parts.aux import Aux
from maxramp.objectives.rewards import PolicyKeys
from maxramp.parallel.collectives import delay, delay_gradient
from maxramp.training.log_probs import token_log_probs
from maxramp.training.loss import Loss, with_layers

_LEAST_SPREAD = 1e-4  # added to a group's standard deviation


def advantages(rewards_PG: np.ndarray, normalize: bool) -> np.ndarray:
    """Returns rewards less their group's mean, float32 [P, G], divided by its standard deviation as
    in GRPO, or not (Liu et al., arXiv 2503.20783)."""
    rewards_PG = np.asarray(rewards_PG, np.float64)
    centred_PG = rewards_PG - rewards_PG.mean(1, keepdims=True)
    if normalize:
        centred_PG /= rewards_PG.std(1, keepdims=True) + _LEAST_SPREAD
    return centred_PG.astype(np.float32)


def shares(lengths_B: np.ndarray, grpo_normalization: str) -> np.ndarray:
    """Returns what each token of an answer, of 1 or more, adds to a step's divisor, float32 [B].
    "token" weighs all tokens alike (DAPO, Yu et al., arXiv 2503.14476), "sequence" all answers, as
    in GRPO."""
    if grpo_normalization == "token":
        return np.ones(len(lengths_B), np.float32)
    return (1 / np.asarray(lengths_B, np.float64)).astype(np.float32)


def policy_gradient(keys: PolicyKeys, execution: Execution) -> Loss:
    """Makes the loss of GRPO, a clipped surrogate with a penalty for leaving the reference policy.

    For a token of an answer with the ratio r = exp(log p - log p when sampled) and the advantage A
    (in the batch's weights) it is -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A) + beta
    (exp(d) - d - 1), where d = log p of the reference - log p (the k3 estimator of Schulman,
    joschu.net/blog/kl-approx.html). The two bounds are DAPO's. A batch needs `weights`, `shares`
    and `sampled_log_probs`, with grpo_beta also `reference_log_probs`.
    """

    def sums(model: Decoder, batch: Batch) -> tuple[jax.Array, Aux]:
        how = keys.loss_block_tokens, keys.decode_sampling_temperature
        mask_BT = batch.targets >= 0
        share_BT = jnp.where(mask_BT, batch.shares, 0)
        log_p_BT, entropy_BT, aux = token_log_probs(
            model, execution, batch, *how, divisors_B=share_BT.sum(1)
        )
        advantage_BT = batch.weights
        change_BT = jnp.where(mask_BT, log_p_BT - batch.sampled_log_probs, 0)
        ratio_BT = jnp.exp(change_BT)
        clipped_BT = jnp.clip(ratio_BT, 1 - keys.grpo_epsilon, 1 + keys.grpo_epsilon_high)
        surrogate_BT = jnp.minimum(ratio_BT * advantage_BT, clipped_BT * advantage_BT)
        cut_BT = surrogate_BT < ratio_BT * advantage_BT
        loss_BT = -surrogate_BT
        shown = {}
        if keys.grpo_beta:
            ahead_BT = jnp.where(mask_BT, batch.reference_log_probs - log_p_BT, 0)
            kl_BT = jnp.exp(ahead_BT) - ahead_BT - 1
            loss_BT += keys.grpo_beta * kl_BT
            shown["kl"] = (share_BT * kl_BT).sum()
        loss = (share_BT * loss_BT).sum()
        shown |= {
            "loss": loss,
            "tokens": delay(share_BT, loss).sum(),  # or its sum could run beside the layers
            "entropy": (share_BT * entropy_BT).sum(),
            "clip_share": (share_BT * cut_BT).sum(),
            "sampler_difference": (share_BT * jnp.abs(change_BT)).sum(),
        }
        # All sums come before the layers' backward pass, or they could run beside it.
        loss_BT = delay_gradient(loss_BT, sum(shown.values()))
        return with_layers((share_BT * loss_BT).sum(), shown, aux)

    return sums
