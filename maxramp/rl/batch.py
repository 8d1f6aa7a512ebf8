"""What a step trains on: prompts with their answers, as rows.

Shapes: P prompts, G answers to each, R = P * G rows, T tokens.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from maxramp.data.batch import Batch
from maxramp.data.row import PADDING
from maxramp.rampup.spec import Field
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


def policy_fields(tokens: int) -> tuple[Field, ...]:
    """The arrays of a batch, of T tokens a row."""
    dtypes = {"tokens": "int32", "targets": "int32", "weights": "float32", "shares": "float32"}
    dtypes["sampled_log_probs"] = "float32"
    return tuple(Field(name, dtype, (tokens,)) for name, dtype in dtypes.items())


def to_batch(scored: Scored, tokens: int, grpo_normalization: str) -> Batch:
    """Rows of a micro batch, [R, T]: a prompt, its answer, and padding; answers are the targets.

    Args:
      scored: R answers.
      tokens: T.
      grpo_normalization: how tokens share the divisor (`policy.shares`).
    """
    shape = len(scored.answers), tokens
    tokens_RT, targets_RT = (np.full(shape, PADDING, np.int32) for _ in range(2))
    weights_RT, shares_RT, log_probs_RT = (np.zeros(shape, np.float32) for _ in range(3))
    share_R = shares([len(answer) for answer in scored.answers], grpo_normalization)
    for row, (prompt, answer) in enumerate(zip(scored.prompts, scored.answers, strict=True)):
        begin, end = len(prompt), len(prompt) + len(answer)
        tokens_RT[row, :begin], tokens_RT[row, begin:end] = prompt, answer
        predicting = slice(begin - 1, end - 1)
        targets_RT[row, predicting] = answer
        weights_RT[row, predicting] = scored.advantages_PG.ravel()[row]
        shares_RT[row, predicting] = share_R[row]
        log_probs_RT[row, predicting] = scored.log_probs[row]
    return Batch(
        tokens_RT,
        targets_RT,
        weights=weights_RT,
        shares=shares_RT,
        sampled_log_probs=log_probs_RT,
    )
