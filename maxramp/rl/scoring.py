"""Answers to prompts, and what they are worth.

Shapes: P prompts, G answers to each, R = P x G answers, F reward functions.
"""

import concurrent.futures
import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from maxramp.errors import StepError, TrainingError
from maxramp.generation.generator import Answer
from maxramp.generation.loading import PromptTokenizer
from maxramp.processes.agreement import all_gather_json, raise_everywhere
from maxramp.rl.keys import RolloutKeys
from maxramp.rl.prompts import Prompt
from maxramp.rl.rewards import Rewards
from maxramp.rl.rollout import Rollout


@dataclasses.dataclass
class Part:
    """Prompts and the answers to them, whose rewards are on their way until they are there.

    Attributes:
      prompts: of each answer.
      ids: of each answer's prompt.
      answers: as they were written.
      texts: of the answers.
      pending: their rewards, on process 0 alone.
      rewards_RF: of each function, when they are there.
      reward_seconds: what the functions took.
    """

    prompts: list[Prompt]
    ids: list[np.ndarray]
    answers: list[Answer]
    texts: list[str]
    pending: concurrent.futures.Future | None
    rewards_RF: np.ndarray | None = None
    reward_seconds: float = 0.0


class Scorer:
    """Has prompts answered, and answers rewarded elsewhere meanwhile."""

    def __init__(
        self,
        keys: RolloutKeys,
        num_generations: int,
        rollout: Rollout,
        tokenizer: PromptTokenizer,
        rewards: Rewards | None,
    ):
        """
        Args:
          keys: what answers are worth.
          num_generations: answers to each prompt.
          rollout: writes them.
          tokenizer: of the model.
          rewards: the reward functions; None but on process 0.
        """
        self._keys, self._count, self._rollout = keys, num_generations, rollout
        self._tokenizer, self._rewards = tokenizer, rewards

    def ask(self, weights: list[jax.Array], prompts: Sequence[Prompt], first: int) -> Part:
        """Answers to prompts; their rewards are being worked out when this returns.

        Args:
          weights: from `Rollout.prepare`.
          prompts: each gets as many answers.
          first: number of the first answer: with `rollout_seed`, numbers decide what is drawn.
        """
        G = self._count
        ids = self._tokenizer.encode([prompt.text for prompt in prompts])
        ids = [of_prompt for of_prompt in ids for _ in range(G)]
        samples = [(first + i) % 2**32 for i in range(len(ids))]
        answers = self._rollout.answer(weights, ids, samples)
        asked = [prompt for prompt in prompts for _ in range(G)]
        texts = list(map(self._text, answers))
        pending = None
        if self._rewards:
            truths = [prompt.truth for prompt in asked]
            pending = self._rewards.submit([prompt.text for prompt in asked], texts, truths)
        return Part(asked, ids, answers, texts, pending)

    def wait(self, part: Part) -> None:
        """Waits for the rewards of a part, which process 0 tells the others.

        Raises:
          StepError: one of them failed.
        """

        def result() -> list | None:
            if part.pending is None:
                return None
            rewards_RF, took = part.pending.result()
            return [rewards_RF.tolist(), took]

        try:
            found = raise_everywhere(result)
        except TrainingError as error:
            raise StepError(str(error)) from None
        rewards, part.reward_seconds = all_gather_json(found)[0]
        part.rewards_RF = np.array(rewards, np.float64)

    def total(self, rewards_RF: np.ndarray) -> np.ndarray:
        """The weighted sum of each answer's rewards: [R]."""
        weights_F = self._keys.reward_weights or [1.0] * rewards_RF.shape[1]
        return rewards_RF @ np.asarray(weights_F, np.float64)

    def summary(self, parts: Sequence[Part], prompts: int) -> dict[str, float]:
        """What the answers to the first `prompts` prompts of some parts are like, by name."""
        count = prompts * self._count
        answers = [answer for part in parts for answer in part.answers][:count]
        rewards_RF = np.concatenate([part.rewards_RF for part in parts])[:count]
        total_R = self.total(rewards_RF)
        found = {
            "reward": total_R.mean(),
            "reward_std": total_R.reshape(-1, self._count).std(1).mean(),
            "answer_length": np.mean([len(answer.tokens) for answer in answers]),
            "truncated": np.mean([answer.truncated for answer in answers]),
        }
        for name, mean in zip(self._keys.rewards, rewards_RF.mean(0), strict=True):
            found[f"reward {name}"] = mean
        return {name: float(value) for name, value in found.items()}

    def best_and_worst(self, parts: Sequence[Part], number: int) -> list[dict[str, Any]]:
        """The answers of most reward and those of least, so many of each, the best first."""
        rewards = np.concatenate([self.total(part.rewards_RF) for part in parts])
        order = np.argsort(-rewards, kind="stable")
        if 2 * number < len(order):
            order = np.concatenate([order[:number], order[-number:]])
        asked = [prompt.text for part in parts for prompt in part.prompts]
        texts = [text for part in parts for text in part.texts]
        return [
            {"reward": float(rewards[i]), "prompt": asked[i], "answer": texts[i]} for i in order
        ]

    def _text(self, answer: Answer) -> str:
        tokens = answer.tokens if answer.truncated else answer.tokens[:-1]
        return self._tokenizer.tokenizer.decode(tokens)
