"""What a step trains on: prompts with their answers, as rows.

Shapes: P prompts, G answers to each, R = P * G rows, S tokens of a row and the one after it.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from maxramp.data.batch import Batch
from maxramp.data.marks import PADDING
from maxramp.training.policy import shares


@dataclasses.dataclass(frozen=True)
class Scored:
    """Answers, prompt after prompt, and what they were worth.

    Attributes:
      prompts: ids of each answer's prompt, so each prompt G times.
      answers: ids of each.
      log_probs: of the answers' tokens when they were sampled.
      advantages_PG: of each answer (`policy.advantages`).
    """

    prompts: Sequence[np.ndarray]
    answers: Sequence[np.ndarray]
    log_probs: Sequence[np.ndarray]
    advantages_PG: np.ndarray


def to_batch(scored: Scored, row_length: int, grpo_normalization: str) -> Batch:
    """Rows of a micro batch, [R, S]: a prompt, its answer, and padding.

    Args:
      scored: R answers.
      row_length: S.
      grpo_normalization: how tokens share the divisor (`policy.shares`).
    """
    shape = len(scored.answers), row_length
    tokens_RS = np.full(shape, PADDING, np.int32)
    mask_RS = np.zeros(shape, bool)
    weights_RS, shares_RS, log_probs_RS = (np.zeros(shape, np.float32) for _ in range(3))
    share_R = shares([len(answer) for answer in scored.answers], grpo_normalization)
    for row, (prompt, answer) in enumerate(zip(scored.prompts, scored.answers, strict=True)):
        begin, end = len(prompt), len(prompt) + len(answer)
        tokens_RS[row, :begin], tokens_RS[row, begin:end] = prompt, answer
        mask_RS[row, begin:end] = True
        weights_RS[row, begin:end] = scored.advantages_PG.ravel()[row]
        shares_RS[row, begin:end] = share_R[row]
        log_probs_RS[row, begin:end] = scored.log_probs[row]
    return Batch(
        tokens_RS,
        loss_mask=mask_RS,
        weights=weights_RS,
        shares=shares_RS,
        sampled_log_probs=log_probs_RS,
    )
