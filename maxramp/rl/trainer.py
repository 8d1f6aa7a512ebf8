"""The steps of GRPO: roll out, score, learn.

A step's prompts come in parts, as the passes of the stage's gradient accumulation. The answers to
one part are written while the rewards of the part before it are worked out elsewhere; then that
part's gradients are added up. They are sums over tokens, divided once when all parts are in, so the
update does not depend on the cutting; and a prompt's answers are never in two parts.

Until the first update a step can be given up: the weights are those before it, and what it draws
depends on the prompts' numbers, so a restart repeats it to the last bit.
"""

import dataclasses
import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxramp.data.batch import Batch
from maxramp.model.decoder import Decoder
from maxramp.parallel.mesh import mesh_of
from maxramp.parallel.sharding import TOKENS_BT
from maxramp.rampup.schedule import Stage
from maxramp.rl.keys import RolloutKeys
from maxramp.rl.programs import PolicyPrograms
from maxramp.rl.prompts import Prompt, Prompts
from maxramp.rl.scoring import Part, Scorer
from maxramp.run.metrics import Record, Taken
from maxramp.training.state import TrainState

_HELD_OUT = 2**31  # number of the first answer of an evaluation


class PolicyTrainer:
    """Takes the steps of GRPO.

    Attributes:
      state: after the steps that were taken.
      raise_failure: says why a program did not compile, if there is one.
    """

    def __init__(
        self,
        programs: PolicyPrograms,
        keys: RolloutKeys,
        prompts: Prompts,
        held_out: Prompts | None,
        scorer: Scorer,
        state: TrainState,
        reference: Decoder | None,
        beat: Callable[[], None],
        stopping: Callable[[], bool],
    ):
        """
        Args:
          programs: what a step computes.
          keys: how many answers to show.
          prompts: of the run.
          held_out: those that evaluations are on, if there are any.
          scorer: has them answered, and knows what answers are worth.
          state: before the first step.
          reference: the weights to stay near to; None where grpo_beta = 0.
          beat: called whenever answers, rewards or gradients of a part are there.
          stopping: called after the answers to each part; whether to give the step up.
        """
        self.state = state
        self._programs, self._keys, self._reference = programs, keys, reference
        self._prompts, self._held_out, self._scorer = prompts, held_out, scorer
        self._beat, self._stopping = beat, stopping
        self._policy, self.raise_failure = programs.policy, programs.raise_failure
        self._sharding = NamedSharding(mesh_of(state), TOKENS_BT)

    def step(self, step: int, stage: Stage, first_sample: int) -> Taken | None:
        """One rollout batch and the updates on it, the last of which the devices still work on.

        Args:
          step: its number.
          stage: how many prompts, in how many parts.
          first_sample: number of the first prompt.

        Returns:
          The step's numbers; None if it was given up.

        Raises:
          StepError: a reward function failed.
          NotFiniteError: the weights are no numbers.
        """
        phases = _Phases(self._beat)
        compile_seconds = self._programs.wait(stage)
        # The devices may still work on the update before, which is no part of this rollout.
        weights = jax.block_until_ready(self._programs.generator.prepare(self.state.model))
        asked = [self._prompts[first_sample + i] for i in range(stage.global_batch_size)]
        first = first_sample * self._policy.num_generations
        parts: list[Part] = []
        batches: list[Batch] = []
        phases.enter("rollout")
        for part in self._answered(weights, asked, first, stage):
            if self._stopping():
                return None
            if part is None:
                continue
            phases.enter("reward_wait")
            self._scorer.wait(part)
            phases.enter("training")
            if not parts:
                sums = self._programs.zeros(self.state.trained)
            parts.append(part)
            batches.append(self._batch(part, stage.spec.tokens))
            sums = self._programs.add(sums, *self._weights, batches[-1])
            if len(parts) < stage.gradient_accumulation_steps:
                # Or the answers to the next part, which take the devices next, would pay for it.
                jax.block_until_ready(sums)
                phases.enter("rollout")
        del weights
        shown = self._update(sums, batches, np.uint32(stage.global_batch_size))

        def measured(read: dict[str, Any], begin: float, end: float) -> Record:
            seconds = phases.seconds(end) | {"compile": compile_seconds}
            return self._record(Part.joined(parts), seconds, end - begin)

        return Taken(shown, measured)

    def evaluate(self, stage: Stage) -> Taken:
        """The rewards of answers to every held-out prompt, written in the parts of a stage.

        Raises:
          StepError: a reward function failed.
          NotFiniteError: the weights are no numbers.
        """
        count, size = len(self._held_out.texts), stage.micro_batch_size
        weights = self._programs.generator.prepare(self.state.model)
        # What fills up the last part does not count.
        asked = [self._held_out[i % count] for i in range(-(-count // size) * size)]
        parts: list[Part] = []
        for part in self._answered(weights, asked, _HELD_OUT, stage):
            if part:
                self._scorer.wait(part)
                self._beat()
                parts.append(part)

        def measured(read: dict[str, Any], begin: float, end: float) -> Record:
            whole = Part.joined(parts, count * self._policy.num_generations)
            found = self._scorer.summary(whole)
            found["tokens"] = sum(len(answer.tokens) for answer in whole.answers)
            return {f"eval_{name}": value for name, value in found.items()}

        return Taken({}, measured)

    def _answered(
        self, weights: list[jax.Array], prompts: list[Prompt], first: int, stage: Stage
    ) -> Iterator[Part | None]:
        """Has prompts answered in the parts of a stage.

        Each part comes when the next one has its answers as well, so that its rewards are worked
        out meanwhile; first comes None. `first` is the number of the first answer.
        """
        size, before = stage.micro_batch_size, None
        for at in range(0, len(prompts), size):
            number = first + at * self._policy.num_generations
            part = self._scorer.ask(weights, prompts[at : at + size], number)
            self._beat()
            yield before
            before = part
        yield before

    @property
    def _weights(self) -> tuple[Decoder, Decoder]:
        return self.state.trained, self.state.frozen

    def _batch(self, part: Part, tokens: int) -> Batch:
        """A part to learn from, on the devices."""
        batch = jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, self._sharding, x.__getitem__),
            self._scorer.batch(part, tokens),
        )
        if self._reference is not None:
            log_probs = self._programs.reference(self._reference, batch)
            batch = dataclasses.replace(batch, reference_log_probs=log_probs)
        return batch

    def _update(self, sums: Any, batches: list[Batch], samples: np.uint32) -> dict[str, Any]:
        """Moves the weights, as often as `num_iterations` says; returns what is shown."""
        differences = []  # of the sampler, before an update moves the weights
        for again in range(self._policy.num_iterations):
            if again:
                sums = self._programs.zeros(self.state.trained)
                for batch in batches:
                    sums = self._programs.add(sums, *self._weights, batch)
                    jax.block_until_ready(sums)
                    self._beat()
            self.state, shown = self._programs.update(self.state, sums, samples, again=again > 0)
            differences.append(shown.pop("sampler_difference"))
        return {**shown, "sampler_difference": differences[0]}

    def _record(self, part: Part, seconds: dict[str, float], total: float) -> Record:
        """What a step's answers were like, and how long each phase took."""
        answers = [answer.tokens for answer in part.answers]
        written, tokens = sum(map(len, answers)), sum(map(len, [*answers, *part.ids]))
        seconds["reward"] = part.reward_seconds
        names = ("compile", "rollout", "reward", "reward_wait", "training")
        phases = seconds["rollout"] + seconds["reward"] + seconds["training"]
        return {
            **self._scorer.summary(part),
            **{f"{name}_seconds": seconds[name] for name in names},
            "overlap_seconds": phases + seconds["compile"] - total,
            "rollout_tokens_per_second": written / seconds["rollout"],
            "training_tokens_per_second": tokens / seconds["training"],
            "tokens_per_second": tokens / total,
            "step_seconds": total,
            "batch_fingerprint": _fingerprint([*part.ids, *answers]),
        } | ({"answers": self._scorer.best_and_worst(part)} if self._keys.log_answers else {})


class _Phases:
    """When the phases of a step began: each ends with the next, and the last with the step."""

    def __init__(self, beat: Callable[[], None]):
        self._beat = beat
        self._begun: list[tuple[str, float]] = []

    def enter(self, name: str) -> None:
        self._begun.append((name, time.perf_counter()))
        self._beat()

    def seconds(self, end: float) -> dict[str, float]:
        """Of each phase, in a step whose work ended then."""
        found: dict[str, float] = defaultdict(float)
        ends = [*(start for _, start in self._begun[1:]), end]
        for (name, start), stop in zip(self._begun, ends, strict=True):
            found[name] += stop - start
        return found


def _fingerprint(ids: list[np.ndarray]) -> str:
    """64 bits of a step's prompts and answers, in hex."""
    found = hashlib.blake2b(digest_size=8)
    for tokens in ids:
        found.update(np.int32(len(tokens)).tobytes() + np.asarray(tokens, "<i4").tobytes())
    return found.hexdigest()
