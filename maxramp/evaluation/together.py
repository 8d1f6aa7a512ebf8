"""One process talks to lm-eval, and all of a job compute what it asks.

Process 0 says what is asked for; the others wait for that and then do the same.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from maxramp.errors import ConfigError, TrainingError
from maxramp.evaluation.scorer import Scored, Scorer
from maxramp.generation.sampling import Sampling
from maxramp.model.decoder import Decoder
from maxramp.processes.agreement import from_first, led


@dataclasses.dataclass
class Together:
    """A model, asked by process 0 on behalf of all."""

    scorer: Scorer
    model: Decoder
    beat: Callable[[], None]  # called while another process works, and when a pass is done
    _failed: bool = False  # while all processes computed: they all know

    def score(self, rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        """`Scorer.score`; called by process 0."""
        return self._ask("score", [[row.tokens, row.count] for row in rows])

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        most_tokens: int,
        sampling: Sampling,
        seed: int,
        until: Sequence[str],
    ) -> list[str]:
        """`Scorer.write`; called by process 0."""
        how = dataclasses.asdict(sampling)
        return self._ask("write", [[*map(list, prompts)], most_tokens, how, seed, [*until]])

    def run(self, lead: Callable[[], Any]) -> Any:
        """Has process 0 do what asks, and the others compute with it.

        Returns:
          What `lead` returned; None but on process 0.

        Raises:
          ConfigError, TrainingError: on all processes, what `lead` raised.
        """
        if jax.process_index():
            while asked := from_first(None, self.beat):
                self._compute(*asked)
            return led(lead, self.beat)
        try:
            result = lead()
        except (ConfigError, TrainingError) as error:
            if not self._failed:
                from_first(None, self.beat)
                led(functools.partial(_raise, error), self.beat)
            raise
        from_first(None, self.beat)
        return led(lambda: result, self.beat)

    def _ask(self, what: str, about: list[Any]) -> Any:
        from_first([what, about], self.beat)
        try:
            return self._compute(what, about)
        except Exception:
            self._failed = True
            raise

    def _compute(self, what: str, about: list[Any]) -> Any:
        if what == "score":
            return self.scorer.score(self.model, [Scored(*row) for row in about])
        prompts, most_tokens, how, seed, until = about
        return self.scorer.write(self.model, prompts, most_tokens, Sampling(**how), seed, until)


def _raise(error: Exception) -> None:
    raise error
