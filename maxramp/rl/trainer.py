"""The steps of GRPO: roll out, score, learn.

A step's prompts come in parts, as the passes of the stage's gradient accumulation. The answers to
one part are written while the rewards of the part before it are worked out elsewhere; then that
part's gradients are added up. They are sums over tokens, divided once when all parts are in, so the
update does not depend on the cutting; and a prompt's answers are never in two parts.

Until the first update a step can be given up: the weights are those before it, and what it draws
depends on the prompts' numbers, so a restart repeats it to the last bit.

Shapes: P prompts of a part, G answers to each.
"""

import concurrent.futures
import dataclasses
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxramp.data.batch import Batch
from maxramp.generation.generator import Answer
from maxramp.generation.loading import PromptTokenizer
from maxramp.parallel.agreement import all_gather_json, raise_everywhere
from maxramp.parallel.sharding import TOKENS_BT
from maxramp.rampup.schedule import Stage
from maxramp.rl.batch import Scored, to_batch
from maxramp.rl.keys import RolloutKeys
from maxramp.rl.programs import PolicyPrograms
from maxramp.rl.prompts import Prompt, Prompts
from maxramp.rl.rewards import Rewards
from maxramp.training.policy import advantages
from maxramp.training.state import TrainState


@dataclasses.dataclass
class _Part:
    """Prompts and their answers, whose rewards are on their way."""

    prompts: list[Prompt]
    ids: list[np.ndarray]  # of each answer's prompt
    answers: list[Answer]
    rewards: concurrent.futures.Future | None  # on process 0


class PolicyTrainer:
    """Takes the steps of GRPO, on the mesh that is set."""

    def __init__(
        self,
        programs: PolicyPrograms,
        keys: RolloutKeys,
        prompts: Prompts,
        tokenizer: PromptTokenizer,
        rewards: Rewards | None,
        reference: Any,
        beat: Callable[[], None],
        stopping: Callable[[], bool],
    ):
        """
        Args:
          programs: what a step computes.
          keys: what is asked, and what answers are worth.
          prompts: of the run.
          tokenizer: of the model.
          rewards: what answers are worth; None but on process 0.
          reference: the weights to stay near; None where grpo_beta = 0.
          beat: called whenever answers, rewards or gradients of a part are there.
          stopping: called after the answers to each part; whether to give the step up.
        """
        self._programs, self._keys, self._reference = programs, keys, reference
        self._policy, self._rollout = programs.policy, programs.rollout
        self._prompts, self._tokenizer, self._rewards = prompts, tokenizer, rewards
        self._beat, self._stopping = beat, stopping
        self._sharding = NamedSharding(jax.sharding.get_mesh(), TOKENS_BT)

    def step(
        self, state: TrainState, stage: Stage, first_prompt: int
    ) -> tuple[TrainState, dict[str, Any] | None]:
        """One rollout batch and the updates on it.

        Args:
          state: donated.
          stage: how many prompts, in how many parts.
          first_prompt: of the step.

        Returns:
          The next state and the step's metrics; the same state and None if the step was given up.

        Raises:
          TrainingError: a reward function failed, or the weights are no numbers.
        """
        begin, seconds = time.perf_counter(), defaultdict(float)
        seconds["compile"] = self._programs.wait(stage)
        with self._phase(seconds, "rollout"):
            weights = self._rollout.prepare(state.model)
        count, parts = stage.micro_batch_size, stage.gradient_accumulation_steps
        batches: list[Batch] = []
        found: list[tuple[_Part, np.ndarray]] = []
        sums, before = None, None
        for part in range(parts):
            with self._phase(seconds, "rollout"):
                new = self._roll_out(weights, first_prompt + part * count, count)
            if self._stopping():
                return state, None
            if before:
                sums = self._learn(state, sums, before, batches, found, seconds)
            before = new
        sums = self._learn(state, sums, before, batches, found, seconds)
        del weights
        with self._phase(seconds, "training"):
            differences = []  # of the sampler, before an update moves the weights
            for again in range(self._policy.num_iterations):
                if again:
                    sums = self._programs.zeros(state.model)
                    for batch in batches:
                        sums = jax.block_until_ready(self._programs.add(sums, state.model, batch))
                        self._beat()
                samples = np.uint32(stage.global_batch_size)
                state, metrics = self._programs.update(state, sums, samples, again=again > 0)
                differences.append(metrics.pop("sampler_difference"))
            read = jax.device_get({**metrics, "sampler_difference": differences[0]})
        read = {name: float(value) for name, value in read.items()}
        total = time.perf_counter() - begin
        return state, {**read, **self._summary(found, seconds, total)}

    def raise_failure(self) -> None:
        """Says why a program did not compile, if there is one.

        Raises:
          TrainingError: there is one.
        """
        self._programs.raise_failure()

    def _roll_out(self, weights: list[jax.Array], first: int, count: int) -> _Part:
        """Answers to `count` prompts from number `first` on; their rewards are being worked out."""
        G = self._policy.num_generations
        prompts = [self._prompts[first + i] for i in range(count)]
        ids = self._tokenizer.encode([prompt.text for prompt in prompts])
        ids = [prompt for prompt in ids for _ in range(G)]
        samples = [(first * G + i) % 2**32 for i in range(count * G)]
        answers = self._rollout.answer(weights, ids, samples)
        prompts = [prompt for prompt in prompts for _ in range(G)]
        texts = [self._text(prompt, answer) for prompt, answer in zip(ids, answers, strict=True)]
        asked, truths = [prompt.text for prompt in prompts], [prompt.truth for prompt in prompts]
        future = self._rewards.submit(asked, texts, truths) if self._rewards else None
        return _Part(prompts, ids, answers, future)

    def _text(self, prompt: np.ndarray, answer: Answer) -> str:
        tokens = answer.tokens if answer.truncated else answer.tokens[:-1]
        return self._tokenizer.tokenizer.decode(tokens)

    def _learn(
        self,
        state: TrainState,
        sums: Any,
        part: _Part,
        batches: list[Batch],
        found: list[tuple[_Part, np.ndarray]],
        seconds: dict[str, float],
    ) -> Any:
        """Adds the gradients of a part, when its rewards are there."""
        with self._phase(seconds, "reward_wait"):
            rewards, took = self._rewards_of(part)
        seconds["reward"] += took
        found.append((part, rewards))
        with self._phase(seconds, "training"):
            total_PG = self._total(rewards).reshape(-1, self._policy.num_generations)
            scored = Scored(
                part.ids,
                [answer.tokens for answer in part.answers],
                [answer.log_probs for answer in part.answers],
                advantages(total_PG, self._policy.grpo_normalize_advantages),
            )
            batch = to_batch(scored, self._programs.row_length, self._policy.grpo_normalization)
            batch = self._place(batch)
            if self._reference is not None:
                log_probs = self._programs.reference(self._reference, batch)
                batch = dataclasses.replace(batch, reference_log_probs=log_probs)
            batches.append(batch)
            if sums is None:
                sums = self._programs.zeros(state.model)
            sums = self._programs.add(sums, state.model, batch)
            # Or the answers to the next part, which take the devices next, would pay for it.
            jax.block_until_ready(sums)
        return sums

    @contextmanager
    def _phase(self, seconds: dict[str, float], name: str) -> Iterator[None]:
        """Counts the seconds of a phase of the step."""
        start = time.perf_counter()
        yield
        seconds[name] += time.perf_counter() - start
        self._beat()

    def _rewards_of(self, part: _Part) -> tuple[np.ndarray, float]:
        """The rewards of a part, from process 0: [answers, functions], and what they took."""

        def wait() -> list | None:
            if part.rewards is None:
                return None
            rewards, took = part.rewards.result()
            return [rewards.tolist(), took]

        rewards, took = all_gather_json(raise_everywhere(wait))[0]
        return np.array(rewards, np.float64), took

    def _total(self, rewards: np.ndarray) -> np.ndarray:
        """The weighted sum of each answer's rewards."""
        weights = self._keys.reward_weights or [1.0] * rewards.shape[1]
        return rewards @ np.asarray(weights, np.float64)

    def _place(self, batch: Batch) -> Batch:
        def place(x: np.ndarray) -> jax.Array:
            return jax.make_array_from_callback(x.shape, self._sharding, lambda index: x[index])

        return jax.tree.map(place, batch)

    def _summary(
        self, found: list[tuple[_Part, np.ndarray]], seconds: dict[str, float], total: float
    ) -> dict[str, Any]:
        """What a step's answers were like."""
        answers = [answer for part, _ in found for answer in part.answers]
        asked = [ids for part, _ in found for ids in part.ids]
        rewards = np.concatenate([rewards for _, rewards in found])
        lengths = np.array([len(answer.tokens) for answer in answers])
        total_R = self._total(rewards)
        G = self._policy.num_generations
        record = {
            "reward": float(total_R.mean()),
            "reward_std": float(total_R.reshape(-1, G).std(1).mean()),
            "answer_length": float(lengths.mean()),
            "truncated": float(np.mean([answer.truncated for answer in answers])),
        }
        for name, mean in zip(self._keys.rewards, rewards.mean(0), strict=True):
            record[f"reward {name}"] = float(mean)
        for name in ("compile", "rollout", "reward", "reward_wait", "training"):
            record[f"{name}_seconds"] = seconds[name]
        phases = seconds["rollout"] + seconds["reward"] + seconds["training"]
        record["overlap_seconds"] = phases + seconds["compile"] - total
        record["rollout_tokens_per_second"] = float(lengths.sum() / seconds["rollout"])
        tokens = int(lengths.sum()) + sum(map(len, asked))
        record["training_tokens_per_second"] = tokens / seconds["training"]
        record["tokens_per_second"] = tokens / total
        record["step_seconds"] = total
        record["batch_fingerprint"] = _fingerprint([*asked, *(answer.tokens for answer in answers)])
        return record


def _fingerprint(ids: list[np.ndarray]) -> str:
    """64 bits of a step's prompts and answers, in hex."""
    found = hashlib.blake2b(digest_size=8)
    for tokens in ids:
        found.update(np.int32(len(tokens)).tobytes() + np.asarray(tokens, "<i4").tobytes())
    return found.hexdigest()
