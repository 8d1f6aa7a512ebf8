"""Answers to prompts, what they are worth, and the rows to learn from.

Shapes: P prompts, G answers to each, R = P * G answers, F reward functions, T tokens of a row.
"""

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from maxramp.data.batch import PADDING, Batch
from maxramp.errors import StepError, TrainingError
from maxramp.generation.generator import Answer, Generator, Writing
from maxramp.generation.loading import PromptTokenizer
from maxramp.generation.sampling import Sampling
from maxramp.model.keys import ModelKeys
from maxramp.processes.agreement import all_gather_json, raise_everywhere
from maxramp.rampup.spec import Field
from maxramp.rl.keys import RolloutKeys
from maxramp.rl.prompts import Prompt
from maxramp.rl.rewards import Rewards
from maxramp.training.keys import PolicyKeys
from maxramp.training.policy import advantages, shares


def policy_fields(tokens: int) -> tuple[Field, ...]:
    """The arrays of a batch, of T tokens a row."""
    ids, numbers = ("tokens", "targets"), ("weights", "shares", "sampled_log_probs")
    dtypes = {**dict.fromkeys(ids, "int32"), **dict.fromkeys(numbers, "float32")}
    return tuple(Field(name, dtype, (tokens,)) for name, dtype in dtypes.items())


def writing(
    keys: RolloutKeys, policy: PolicyKeys, model: ModelKeys, tokenizer: PromptTokenizer
) -> Writing:
    """How answers are written, with the same programs whatever the prompts' lengths."""
    return Writing(
        keys.max_completion_length,
        Sampling(policy.decode_sampling_temperature, vocab_size=tokenizer.tokenizer.vocab_size),
        keys.rollout_seed,
        tuple(tokenizer.ends),
        room=model.max_target_length - keys.max_completion_length,
    )


@dataclasses.dataclass
class Part:
    """Prompts and the answers to them, whose rewards are on their way until they are there."""

    prompts: list[Prompt]  # of each answer
    ids: list[np.ndarray]  # of each answer's prompt
    answers: list[Answer]  # as they were written, prompt after prompt
    texts: list[str]  # of the answers
    pending: concurrent.futures.Future | None = None  # their rewards, on process 0 alone
    rewards_RF: np.ndarray | None = None  # of each function, when they are there
    reward_seconds: float = 0.0  # what the functions took

    @classmethod
    def joined(cls, parts: Sequence["Part"], count: int | None = None) -> "Part":
        """Parts whose rewards are there as one, or the first `count` answers of them."""
        lists = (
            [x for part in parts for x in getattr(part, name)][:count]
            for name in ("prompts", "ids", "answers", "texts")
        )
        rewards_RF = np.concatenate([part.rewards_RF for part in parts])[:count]
        return cls(*lists, None, rewards_RF, sum(part.reward_seconds for part in parts))


class Scorer:
    """Has prompts answered, and answers rewarded elsewhere meanwhile."""

    def __init__(
        self,
        keys: RolloutKeys,
        policy: PolicyKeys,
        generator: Generator,
        tokenizer: PromptTokenizer,
        rewards: Rewards | None,
    ):
        """`rewards` are the reward functions; None but on process 0."""
        self._keys, self._policy, self._generator = keys, policy, generator
        self._tokenizer, self._rewards = tokenizer, rewards

    def ask(self, weights: list[jax.Array], prompts: Sequence[Prompt], first: int) -> Part:
        """Answers to prompts; their rewards are being worked out when this returns.

        Args:
          weights: from `Generator.prepare`.
          prompts: each gets as many answers.
          first: number of the first answer: with `rollout_seed`, numbers decide what is drawn.
        """
        encoded = self._tokenizer.encode([prompt.text for prompt in prompts])
        each = range(self._policy.num_generations)
        asked, ids = ([x for x in given for _ in each] for given in (prompts, encoded))
        samples = [(first + i) % 2**32 for i in range(len(ids))]
        answers = self._generator.answer(weights, ids, samples)
        decode = self._tokenizer.tokenizer.decode  # but for the token that stopped it
        texts = [decode(a.tokens[: len(a.tokens) - (not a.truncated)]) for a in answers]
        part = Part(asked, ids, answers, texts)
        if self._rewards:
            lists = [prompt.text for prompt in asked], texts, [prompt.truth for prompt in asked]
            part.pending = self._rewards.submit(*lists)
        return part

    def wait(self, part: Part) -> None:
        """Waits for the rewards of a part, which process 0 tells the others.

        Raises:
          StepError: one of them failed.
        """
        ours = part.pending
        try:
            found = raise_everywhere(lambda: ours.result() if ours else (np.zeros(0), 0.0))
        except TrainingError as error:
            raise StepError(str(error)) from None
        rewards, part.reward_seconds = all_gather_json([found[0].tolist(), found[1]])[0]
        part.rewards_RF = np.array(rewards, np.float64)

    def batch(self, part: Part, tokens: int) -> Batch:
        """Rows to learn from, [R, T]: a prompt, its answer, which is the targets, and padding.

        Args:
          part: with its rewards.
          tokens: T.
        """
        policy, shape = self._policy, (len(part.answers), tokens)
        total_PG = self._total(part).reshape(-1, policy.num_generations)
        advantages_R = advantages(total_PG, policy.grpo_normalize_advantages).ravel()
        share_R = shares([len(a.tokens) for a in part.answers], policy.grpo_normalization)
        tokens_RT, targets_RT = (np.full(shape, PADDING, np.int32) for _ in range(2))
        weights_RT, shares_RT, log_probs_RT = (np.zeros(shape, np.float32) for _ in range(3))
        for row, (prompt, answer) in enumerate(zip(part.ids, part.answers, strict=True)):
            begin, end = len(prompt), len(prompt) + len(answer.tokens)
            tokens_RT[row, :begin], tokens_RT[row, begin:end] = prompt, answer.tokens
            predicting = row, slice(begin - 1, end - 1)
            targets_RT[predicting], log_probs_RT[predicting] = answer.tokens, answer.log_probs
            weights_RT[predicting], shares_RT[predicting] = advantages_R[row], share_R[row]
        return Batch(
            *(tokens_RT, targets_RT),
            **{"weights": weights_RT, "shares": shares_RT, "sampled_log_probs": log_probs_RT},
        )

    def summary(self, part: Part) -> dict[str, float]:
        """What the answers of a part are like, by name."""
        total_R = self._total(part)
        found = {
            "reward": total_R.mean(),
            "reward_std": total_R.reshape(-1, self._policy.num_generations).std(1).mean(),
            "answer_length": np.mean([len(answer.tokens) for answer in part.answers]),
            "truncated": np.mean([answer.truncated for answer in part.answers]),
        }
        for name, mean in zip(self._keys.rewards, part.rewards_RF.mean(0), strict=True):
            found[f"reward {name}"] = mean
        return {name: float(value) for name, value in found.items()}

    def best_and_worst(self, part: Part) -> list[dict[str, Any]]:
        """The `log_answers` answers of most reward and those of least, the best first."""
        rewards, number = self._total(part), self._keys.log_answers
        order = np.argsort(-rewards, kind="stable").tolist()
        if 2 * number < len(order):
            order = order[:number] + order[-number:]
        return [
            {"reward": float(rewards[i]), "prompt": part.prompts[i].text, "answer": part.texts[i]}
            for i in order
        ]

    def _total(self, part: Part) -> np.ndarray:
        """The weighted sum of each answer's rewards: [R]."""
        weights_F = self._keys.reward_weights or [1.0] * part.rewards_RF.shape[1]
        return part.rewards_RF @ np.asarray(weights_F, np.float64)
