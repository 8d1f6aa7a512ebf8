"""The steps of GRPO: roll out, score, learn.

A step's prompts come in parts, as the passes of the stage's gradient accumulation. The answers to
one part are written while the rewards of the part before it are worked out elsewhere; then that
part's gradients are added up. They are sums over tokens, divided once when all parts are in, so the
update does not depend on the cutting; and a prompt's answers are never in two parts.

Until the first update a step can be given up: the weights are those before it, and what it draws
depends on the prompts' numbers, so a restart repeats it to the last bit.

Shapes: P prompts, G answers to each, R = P * G answers, F reward functions, T tokens of a row.
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxramp.config.keys import Config
from maxramp.data.batch import Batch
from maxramp.data.rows import PADDING
from maxramp.errors import StepError, TrainingError
from maxramp.generation.generator import Answer, GenerationConfig, Generator
from maxramp.generation.sampling import Sampling
from maxramp.handover.opening import PromptTokenizer
from maxramp.job.start import JobContext
from maxramp.model.decoder import Decoder
from maxramp.parallel.mesh import mesh_of
from maxramp.parallel.sharding import ROWS_BT
from maxramp.processes.agreement import all_gather_json, run_on_first
from maxramp.rampup.schedule import Stage
from maxramp.rl.programs import PolicyPrograms
from maxramp.rl.prompts import Prompt, Prompts
from maxramp.rl.rewards import Rewards
from maxramp.run.metrics import Dispatched, Record
from maxramp.training.policy import advantages, shares
from maxramp.training.state import TrainState

# The metrics of answers beside the rewards of each function.
_ANSWER_METRICS = ("reward", "reward_std", "answer_length", "truncated")
_FIRST_EVAL_ANSWER = 2**31  # the number of the first answer of an evaluation


def generation_config(config: Config, tokenizer: PromptTokenizer) -> GenerationConfig:
    """Returns how answers are written under a resolved config, by the same programs whatever the
    prompts' lengths."""
    keys = config.rollout
    temperature = config.policy.decode_sampling_temperature
    return GenerationConfig(
        keys.max_completion_length,
        Sampling(temperature, vocab_size=tokenizer.tokenizer.vocab_size),
        keys.rollout_seed,
        tuple(tokenizer.ends),
        max_prompt_tokens=config.model.max_target_length - keys.max_completion_length,
    )


@dataclasses.dataclass
class Part:
    """The prompts of a part of a batch, the answers to them, and their rewards once they arrive."""

    prompts: list[Prompt]  # of each answer
    ids: list[np.ndarray]  # of each answer's prompt
    answers: list[Answer]  # prompt after prompt
    texts: list[str]  # of the answers
    pending: concurrent.futures.Future | None = None  # the rewards, on process 0 alone
    rewards_RF: np.ndarray | None = None  # of each function, after `AnswerScorer.wait`
    reward_seconds: float = 0.0  # that the functions took

    @classmethod
    def join(cls, parts: Sequence["Part"], count: int | None = None) -> "Part":
        """Joins parts that have their rewards, or the first `count` answers of them."""
        lists = (
            [x for part in parts for x in getattr(part, name)][:count]
            for name in ("prompts", "ids", "answers", "texts")
        )
        rewards_RF = np.concatenate([part.rewards_RF for part in parts])[:count]
        return cls(*lists, None, rewards_RF, sum(part.reward_seconds for part in parts))


class AnswerScorer:
    """Has prompts answered, and answers rewarded in other processes meanwhile."""

    def __init__(
        self,
        config: Config,
        generator: Generator,
        tokenizer: PromptTokenizer,
        rewards: Rewards | None,
    ):
        """Keeps what answers and rewards under a resolved config; `rewards` must be None on all
        processes but 0."""
        self._keys, self._policy, self._generator = config.rollout, config.policy, generator
        self._tokenizer, self._rewards = tokenizer, rewards

    def ask(self, weights: list[jax.Array], prompts: Sequence[Prompt], first: int) -> Part:
        """Writes `num_generations` answers to each prompt; their rewards are still being computed
        when this returns. All processes call it together; raises as `Generator.answer`.

        Args:
          weights: from `Generator.prepare`.
          first: the number of the first answer: with `rollout_seed`, numbers decide what is drawn.
        """
        repeats = self._policy.num_generations
        asked = [prompt for prompt in prompts for _ in range(repeats)]
        encoded = self._tokenizer.encode([prompt.text for prompt in prompts])
        ids = [x for x in encoded for _ in range(repeats)]
        samples = [(first + i) % 2**32 for i in range(len(ids))]
        answers = self._generator.answer(weights, ids, samples)
        decode = self._tokenizer.tokenizer.decode  # but for the token that stopped it
        texts = [decode(a.tokens[: len(a.tokens) - (not a.truncated)]) for a in answers]
        part = Part(asked, ids, answers, texts)
        if self._rewards:
            truths = [prompt.truth for prompt in asked]
            part.pending = self._rewards.submit([str(p.text) for p in asked], texts, truths)
        return part

    def wait(self, part: Part, beat: Callable[[], None]) -> None:
        """Waits for the rewards of a part, which process 0 sends to the others; all call it
        together, and the others call `beat` meanwhile. Raises a StepError if a function failed."""

        def result() -> list:
            rewards_RF, seconds = part.pending.result()
            return [rewards_RF.tolist(), seconds]

        try:
            own = run_on_first(result, beat)
        except TrainingError as error:
            raise StepError(str(error)) from None
        rewards, part.reward_seconds = all_gather_json(own)[0]
        part.rewards_RF = np.array(rewards, np.float64)

    def batch(self, part: Part, tokens: int) -> Batch:
        """Returns rows to learn from, [R, T = tokens]: a prompt, its answer as targets, padding.
        `part` has its rewards (`wait`), and no prompt with its answer is longer than `tokens`."""
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
        """Returns the metrics of the answers of a part that has its rewards (`wait`)."""
        total_R = self._total(part)
        numbers = (
            total_R.mean(),
            total_R.reshape(-1, self._policy.num_generations).std(1).mean(),
            np.mean([len(answer.tokens) for answer in part.answers]),
            np.mean([answer.truncated for answer in part.answers]),
        )
        metrics = dict(zip(_ANSWER_METRICS, numbers, strict=True))
        for name, mean in zip(self._keys.rewards, part.rewards_RF.mean(0), strict=True):
            metrics[f"reward {name}"] = mean
        return {name: float(value) for name, value in metrics.items()}

    def best_and_worst(self, part: Part) -> dict[str, Any]:
        """Returns the metric "answers" of a part that has its rewards: the `log_answers` answers of
        the most reward and of the least, the best first; {} with log_answers=0."""
        rewards, number = self._total(part), self._keys.log_answers
        if not number:
            return {}
        best, others = np.split(np.argsort(-rewards, kind="stable"), [number])
        shown = [
            {"reward": float(rewards[i]), "prompt": part.prompts[i].text, "answer": part.texts[i]}
            for i in (*best, *others[-number:])
        ]
        return {"answers": shown}

    def _total(self, part: Part) -> np.ndarray:
        """Returns the weighted sum of each answer's rewards: [R]."""
        weights_F = self._keys.reward_weights or [1.0] * part.rewards_RF.shape[1]
        return part.rewards_RF @ np.asarray(weights_F, np.float64)


class PolicyTrainer:
    """Takes the steps of GRPO."""

    def __init__(
        self,
        job: JobContext,
        programs: PolicyPrograms,
        scorer: AnswerScorer,
        prompts: Mapping[str, Prompts],
        state: TrainState,
        reference: Decoder | None,
    ):
        """Begins at a state, whose memory the first step reuses.

        Args:
          job: its watchdog gets a beat for every part that has its answers, rewards or gradients.
          programs: for this state's shapes and mesh, with the generator of `scorer`.
          prompts: from `open_prompts`; `evaluate` needs those of "eval_prompt_file".
          reference: the weights to stay near, None if and only if grpo_beta = 0.
        """
        self.state = state  # after the last step
        self._programs, self._reference, self._scorer = programs, reference, scorer
        self._prompts, self._held_out = prompts["prompt_file"], prompts.get("eval_prompt_file")
        self._beat, self._stopping = job.watchdog.beat, job.is_asked_to_stop
        self._policy, self.raise_failure = programs.policy, programs.raise_failure
        self._sharding = NamedSharding(mesh_of(state), ROWS_BT)

    @property
    def evaluation_names(self) -> list[str]:
        return [f"eval_{name}" for name in (*_ANSWER_METRICS, "tokens")]

    def step(self, step: int, stage: Stage, first_sample: int) -> Dispatched | None:
        """Takes one rollout batch and the updates on it; the devices still work on the last one.

        Returns None if the step was given up. Raises a StepError if a reward function failed or a
        program does not compile, a NotFiniteError if the weights are not numbers.
        """
        phases: list[tuple[str, float]] = []  # when each began, and the one before ended

        def enter(phase: str) -> None:
            phases.append((phase, time.perf_counter()))
            self._beat()

        compile_seconds = self._programs.wait(stage)
        # The devices may still work on the update before, which is not part of this rollout.
        weights = jax.block_until_ready(self._programs.generator.prepare(self.state.model))
        asked = [self._prompts[first_sample + i] for i in range(stage.global_batch_size)]
        first = first_sample * self._policy.num_generations
        parts, batches = [], []
        enter("rollout")
        for part in self._answer_parts(weights, asked, first, stage):
            if self._stopping():
                return None
            if part is None:
                continue
            enter("reward_wait")
            self._scorer.wait(part, self._beat)
            enter("training")
            if not parts:
                sums = self._programs.zeros(self.state.trained)
            parts.append(part)
            batches.append(self._batch(part, stage.spec.tokens))
            sums = self._add(sums, batches[-1])
            if len(parts) < stage.gradient_accumulation_steps:
                # Or the answers to the next part, which take the devices next, would pay for it.
                jax.block_until_ready(sums)
                enter("rollout")
        del weights
        shown = self._update(sums, batches, np.uint32(stage.global_batch_size))

        def measure(read: dict[str, Any], begin: float, end: float) -> Record:
            seconds = collections.Counter({"compile": compile_seconds})
            for (phase, start), (_, stop) in itertools.pairwise([*phases, ("", end)]):
                seconds[phase] += stop - start
            return self._record(Part.join(parts), seconds, end - begin)

        return Dispatched(shown, measure)

    def evaluate(self, stage: Stage) -> Dispatched:
        """Measures the rewards of answers to every held-out prompt, written in the parts of a
        stage; raises as `step`, but does not wait for the programs: before the first step, those of
        the answers compile here."""
        count, size = len(self._held_out.texts), stage.spec.rows
        weights = self._programs.generator.prepare(self.state.model)
        # What fills up the last part does not count.
        asked = [self._held_out[i % count] for i in range(-(-count // size) * size)]
        parts: list[Part] = []
        for part in self._answer_parts(weights, asked, _FIRST_EVAL_ANSWER, stage):
            if part:
                self._scorer.wait(part, self._beat)
                self._beat()
                parts.append(part)

        def measure(read: dict[str, Any], begin: float, end: float) -> Record:
            whole = Part.join(parts, count * self._policy.num_generations)
            metrics = self._scorer.summary(whole)
            metrics["tokens"] = sum(len(answer.tokens) for answer in whole.answers)
            return {f"eval_{name}": value for name, value in metrics.items()}

        return Dispatched({}, measure)

    def _answer_parts(
        self, weights: list[jax.Array], prompts: list[Prompt], first: int, stage: Stage
    ) -> Iterator[Part | None]:
        """Yields None, as a point to stop at, and then the parts of a stage with their answers.

        A part comes when the next one has its answers too, so that its rewards are computed
        meanwhile. `prompts` make whole parts; `first` is the number of the first answer.
        """
        size, each = stage.spec.rows, self._policy.num_generations
        asked = (
            self._scorer.ask(weights, prompts[at : at + size], first + at * each)
            for at in range(0, len(prompts), size)
        )
        for part, _ in itertools.pairwise(itertools.chain([None], asked, [None])):
            self._beat()
            yield part

    def _add(self, sums: Any, batch: Batch) -> Any:
        state = self.state
        return self._programs.add(sums, state.trained, state.frozen, state.buffers, batch)

    def _batch(self, part: Part, tokens: int) -> Batch:
        """Returns the batch of a part that has its rewards, in rows of `tokens`, on the devices,
        with the reference's log-probabilities; all processes call it together."""
        batch = jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, self._sharding, x.__getitem__),
            self._scorer.batch(part, tokens),
        )
        if self._reference is not None:
            log_probs = self._programs.reference(self._reference, batch)
            batch = dataclasses.replace(batch, reference_log_probs=log_probs)
        return batch

    def _update(self, sums: Any, batches: list[Batch], samples: np.uint32) -> dict[str, Any]:
        """Moves the weights of `state` num_iterations times, at first by `sums` (donated), which
        are those of the batches of `samples` prompts; returns the metrics, on the devices."""
        differences = []  # of the sampler, before an update moves the weights
        for again in range(self._policy.num_iterations):
            if again:
                sums = self._programs.zeros(self.state.trained)
                for batch in batches:
                    sums = jax.block_until_ready(self._add(sums, batch))
                    self._beat()
            self.state, shown = self._programs.update(self.state, sums, samples, again=again > 0)
            differences.append(shown.pop("sampler_difference"))
        return {**shown, "sampler_difference": differences[0]}

    def _record(self, part: Part, seconds: collections.Counter, total: float) -> Record:
        answers = [answer.tokens for answer in part.answers]
        written, tokens = sum(map(len, answers)), sum(map(len, [*answers, *part.ids]))
        read = [np.insert(ids, 0, len(ids)).astype("<i4") for ids in [*part.ids, *answers]]
        seconds["reward"] = part.reward_seconds
        return {
            **self._scorer.summary(part),
            **{f"{phase}_seconds": value for phase, value in seconds.items()},
            "overlap_seconds": seconds.total() - seconds["reward_wait"] - total,
            "rollout_tokens_per_second": written / seconds["rollout"],
            "training_tokens_per_second": tokens / seconds["training"],
            "tokens_per_second": tokens / total,
            "step_seconds": total,
            "batch_fingerprint": hashlib.blake2b(np.concatenate(read), digest_size=8).hexdigest(),
            **self._scorer.best_and_worst(part),
        }
