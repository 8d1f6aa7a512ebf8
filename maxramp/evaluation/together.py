"""One process talks to lm-eval, and all of a job compute what it asks.

Process 0 says what is asked for; the others wait for that and then do the same. Before a run
trains, it goes through all of it once without a model, so that programs can be compiled ahead.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from maxramp.errors import ConfigError, TrainingError
from maxramp.evaluation.scorer import Scored, Scorer
from maxramp.generation.generator import Writing
from maxramp.generation.sampling import Sampling
from maxramp.model.decoder import Decoder
from maxramp.processes.agreement import broadcast_json, run_on_first


@dataclasses.dataclass(frozen=True)
class Asking:
    """How tasks ask."""

    num_fewshot: int | None = None  # examples before a question; None = as a task says
    limit: float | None = None  # questions of a task, or their share if below 1; None = all
    apply_chat_template: bool = False
    system_instruction: str | None = None
    gen_kwargs: Mapping[str, Any] | None = None  # in place of a task's own
    log_samples: bool = False  # whether results hold every question and answer
    bootstrap_iters: int = 1000  # draws for the errors of other metrics than means; 0 = no errors


@dataclasses.dataclass
class Together:
    """A model, asked by process 0 on behalf of all."""

    scorer: Scorer
    model: Decoder
    beat: Callable[[], None]  # called while another process works, and when a pass is done
    _failed: bool = False  # while all processes computed: they all know

    @property
    def longest(self) -> int:
        return self.scorer.keys.max_target_length

    def score(self, rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        return self._ask("score", [[row.tokens, row.count] for row in rows])

    def write(
        self, prompts: Sequence[Sequence[int]], writing: Writing, until: Sequence[str]
    ) -> list[str]:
        return self._ask("write", [[*map(list, prompts)], dataclasses.asdict(writing), [*until]])

    def run(self, lead: Callable[[], Any]) -> Any:
        """Has process 0 do what asks (`lead`), and the others compute with it. Returns, on process
        0, and raises, on all, what `lead` did.
        """
        if jax.process_index():
            while asked := broadcast_json(None, self.beat):
                self._compute(*asked)
            return run_on_first(lead, self.beat)
        outcome = concurrent.futures.Future()
        try:
            outcome.set_result(lead())
        except (ConfigError, TrainingError) as error:
            if self._failed:
                raise
            outcome.set_exception(error)
        broadcast_json(None, self.beat)
        return run_on_first(outcome.result, self.beat)

    def _ask(self, what: str, about: list[Any]) -> Any:
        broadcast_json([what, about], self.beat)
        try:
            return self._compute(what, about)
        except Exception:
            self._failed = True
            raise

    def _compute(self, what: str, about: list[Any]) -> Any:
        if what == "score":
            return self.scorer.score(self.model, [Scored(*row) for row in about])
        prompts, writing, until = about
        return self.scorer.write(self.model, prompts, _writing(writing), until)


class Rehearsal:
    """Replaces `Together` and answers at once: lengths of rows depend on no weights. `asked` is
    what `expect` takes.
    """

    def __init__(self, longest: int, beat: Callable[[], None]):
        self.longest, self.beat = longest, beat
        self.asked: list[list[Any]] = []

    def score(self, rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        self.asked.append(["score", [len(row.tokens) - 1 for row in rows]])
        return [(-1.0, False)] * len(rows)

    def write(
        self, prompts: Sequence[Sequence[int]], writing: Writing, until: Sequence[str]
    ) -> list[str]:
        lengths = [len(prompt) for prompt in prompts]
        self.asked.append(["write", lengths, dataclasses.asdict(writing)])
        return [""] * len(prompts)


def expect(scorer: Scorer, asked: Sequence[Sequence[Any]]) -> None:
    """Has the programs compiled for what will be asked of a scorer, on every process."""
    for what, lengths, *how in asked:
        if what == "score":
            scorer.expect_scores(lengths)
        else:
            scorer.expect_answers(lengths, *map(_writing, how))


def _writing(fields: Mapping[str, Any]) -> Writing:
    return Writing(**{**fields, "sampling": Sampling(**fields["sampling"])})
