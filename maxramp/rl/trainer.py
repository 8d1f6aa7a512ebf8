"""The steps of GRPO: roll out, score, learn.

A step's prompts come in parts, as the passes of the stage's gradient accumulation. The answers to
one part are written while the rewards of the part before it are worked out elsewhere; then that
part's gradients are added up. They are sums over tokens, divided once when all parts are in, so the
update does not depend on the cutting; and a prompt's answers are never in two parts.

Until the first update a step can be given up: the weights are those before it, and what it draws
depends on the prompts' numbers, so a restart repeats it to the last bit.
"""

import collections
import dataclasses
import hashlib
import itertools
import time
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
          keys: how many answers to show.
          held_out: the prompts that evaluations are on, if there are any.
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
        phases: list[tuple[str, float]] = []  # when each began, and the one before ended

        def enter(phase: str) -> None:
            phases.append((phase, time.perf_counter()))
            self._beat()

        compile_seconds = self._programs.wait(stage)
        # The devices may still work on the update before, which is no part of this rollout.
        weights = jax.block_until_ready(self._programs.generator.prepare(self.state.model))
        asked = [self._prompts[first_sample + i] for i in range(stage.global_batch_size)]
        first = first_sample * self._policy.num_generations
        parts, batches = [], []
        enter("rollout")
        for part in self._answered(weights, asked, first, stage):
            if self._stopping():
                return None
            if part is None:
                continue
            enter("reward_wait")
            self._scorer.wait(part)
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

        def measured(read: dict[str, Any], begin: float, end: float) -> Record:
            seconds = collections.Counter({"compile": compile_seconds})
            for (phase, start), (_, stop) in itertools.pairwise([*phases, ("", end)]):
                seconds[phase] += stop - start
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
        size, each = stage.micro_batch_size, self._policy.num_generations
        asked = (
            self._scorer.ask(weights, prompts[at : at + size], first + at * each)
            for at in range(0, len(prompts), size)
        )
        for part, _ in itertools.pairwise(itertools.chain([None], asked, [None])):
            self._beat()
            yield part

    def _add(self, sums: Any, batch: Batch) -> Any:
        return self._programs.add(sums, self.state.trained, self.state.frozen, batch)

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
                    sums = jax.block_until_ready(self._add(sums, batch))
                    self._beat()
            self.state, shown = self._programs.update(self.state, sums, samples, again=again > 0)
            differences.append(shown.pop("sampler_difference"))
        return {**shown, "sampler_difference": differences[0]}

    def _record(self, part: Part, seconds: collections.Counter, total: float) -> Record:
        """What a step's answers were like, and how long each phase took."""
        answers = [answer.tokens for answer in part.answers]
        written, tokens = sum(map(len, answers)), sum(map(len, [*answers, *part.ids]))
        read = [np.insert(ids, 0, len(ids)).astype("<i4") for ids in [*part.ids, *answers]]
        seconds["reward"] = part.reward_seconds
        return {
            **self._scorer.summary(part),
            **{f"{phase}_seconds": took for phase, took in seconds.items()},
            "overlap_seconds": seconds.total() - seconds["reward_wait"] - total,
            "rollout_tokens_per_second": written / seconds["rollout"],
            "training_tokens_per_second": tokens / seconds["training"],
            "tokens_per_second": tokens / total,
            "step_seconds": total,
            "batch_fingerprint": hashlib.blake2b(np.concatenate(read), digest_size=8).hexdigest(),
        } | ({"answers": self._scorer.best_and_worst(part)} if self._keys.log_answers else {})
