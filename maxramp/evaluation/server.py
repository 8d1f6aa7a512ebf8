"""Process 0 talks to lm-eval, and all processes of a job compute its requests.

Process 0 broadcasts each request, which the others wait for and then compute with it. Before a run
trains, process 0 goes through all requests once without a model, so that programs can be compiled
ahead.
"""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from maxramp.errors import ConfigError, TrainingError
from maxramp.evaluation.scorer import Scored, Scorer
from maxramp.generation.generator import GenerationConfig
from maxramp.generation.sampling import Sampling
from maxramp.model.decoder import Decoder
from maxramp.processes.agreement import broadcast_json, run_on_first


@dataclasses.dataclass(frozen=True)
class EvalOptions:
    """How tasks are evaluated."""

    num_fewshot: int | None = None  # examples before a question; None = as the task says
    limit: float | None = None  # questions of a task, or their share if below 1; None = all
    apply_chat_template: bool = False
    system_instruction: str | None = None
    gen_kwargs: Mapping[str, Any] | None = None  # in place of a task's own
    log_samples: bool = False  # whether results hold every question and answer
    bootstrap_iters: int = 1000  # draws for the errors of other metrics than means; 0 = no errors


@dataclasses.dataclass
class EvalServer:
    """A model that all processes compute together, for requests of process 0."""

    scorer: Scorer
    model: Decoder
    beat: Callable[[], None]  # called while another process works, and when a pass is done
    _failed: bool = False  # in a computation, so that every process has raised the same error

    @property
    def longest(self) -> int:
        return self.scorer.keys.max_target_length

    def score(self, rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Scores rows as `Scorer.score`; for process 0, inside `run`."""
        return self._request("score", [[row.tokens, row.count] for row in rows])

    def write(
        self, prompts: Sequence[Sequence[int]], generation: GenerationConfig, until: Sequence[str]
    ) -> list[str]:
        """Writes answers as `Scorer.write`; for process 0, inside `run`."""
        return self._request(
            "write", [[*map(list, prompts)], dataclasses.asdict(generation), [*until]]
        )

    def run(self, lead: Callable[[], Any]) -> Any:
        """Runs `lead`, which makes requests, on process 0, while the others compute with it; all
        processes call it. Returns the result of `lead` on process 0, None on others; raises its
        ConfigError or TrainingError on all. Another error of `lead` leaves the others waiting until
        process 0 ends."""
        if jax.process_index():
            while True:
                request = broadcast_json(None, self.beat)
                if request is None:
                    return run_on_first(lead, self.beat)
                self._compute(*request)
        outcome = concurrent.futures.Future()
        try:
            outcome.set_result(lead())
        except (ConfigError, TrainingError) as error:
            if self._failed:
                raise
            outcome.set_exception(error)
        broadcast_json(None, self.beat)
        return run_on_first(outcome.result, self.beat)

    def _request(self, kind: str, contents: list[Any]) -> Any:
        broadcast_json([kind, contents], self.beat)
        try:
            return self._compute(kind, contents)
        except Exception:
            self._failed = True
            raise

    def _compute(self, kind: str, contents: list[Any]) -> Any:
        if kind == "score":
            return self.scorer.score(self.model, [Scored(*row) for row in contents])
        prompts, generation, until = contents
        return self.scorer.write(self.model, prompts, _generation_config(generation), until)


class DryRun:
    """Replaces `EvalServer` and answers at once: lengths of rows depend on no weights. `requests`
    go to `compile_ahead`.
    """

    def __init__(self, longest: int, beat: Callable[[], None]):
        self.longest, self.beat = longest, beat
        self.requests: list[list[Any]] = []

    def score(self, rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        self.requests.append(["score", [len(row.tokens) - 1 for row in rows]])
        return [(-1.0, False)] * len(rows)

    def write(
        self, prompts: Sequence[Sequence[int]], generation: GenerationConfig, until: Sequence[str]
    ) -> list[str]:
        lengths = [len(prompt) for prompt in prompts]
        self.requests.append(["write", lengths, dataclasses.asdict(generation)])
        return [""] * len(prompts)


def compile_ahead(scorer: Scorer, requests: Sequence[Sequence[Any]]) -> None:
    """Has the programs compiled that requests (`DryRun`) will need, on every process; raises as
    `Scorer.expect_answers`."""
    for kind, lengths, *generation in requests:
        if kind == "score":
            scorer.expect_scores(lengths)
        else:
            scorer.expect_answers(lengths, *map(_generation_config, generation))


def _generation_config(fields: Mapping[str, Any]) -> GenerationConfig:
    """Returns what `dataclasses.asdict` took apart."""
    return GenerationConfig(**{**fields, "sampling": Sampling(**fields["sampling"])})
