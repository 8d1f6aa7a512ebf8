"""The best checkpoint of a run so far, by a number of its evaluations: `checkpoint_best`."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from maxramp.errors import ConfigError


class Best:
    """The best checkpoint among those that were added."""

    def __init__(self, how: str, evaluations: Mapping[str, str]):
        """Begins without a checkpoint. `how` is "lowest NAME" or "highest NAME", "" if none is the
        best; numbers of other `evaluations` (`DataIdentity`) do not compare.
        """
        self._how, self._evaluations = how, evaluations
        self._way, _, self._name = how.partition(" ")
        self.step: int | None = None  # the first of equal ones; None without one
        self._score = -math.inf

    def add(
        self, step: int, evaluation: Mapping[str, float], evaluations: Mapping[str, str]
    ) -> None:
        kind = {self._name.partition("_")[0]}
        known = select_kinds(self._evaluations, kind)
        if self.is_beaten(evaluation) and select_kinds(evaluations, kind) == known:
            self.step, self._score = step, self._score_of(evaluation)

    def check(self, names: Sequence[str]) -> None:
        """Refuses a number that evaluations do not have."""
        if self._name and self._name not in names:
            raise ConfigError(
                f"checkpoint_best={self._how}: evaluations of this run have no {self._name}, but "
                f"{', '.join(names)}"
            )

    def is_beaten(self, evaluation: Mapping[str, float]) -> bool:
        return self._score < self._score_of(evaluation) < math.inf

    def _score_of(self, evaluation: Mapping[str, float]) -> float:
        value = evaluation.get(self._name, math.nan)
        return -value if self._way == "lowest" else value

    def __str__(self) -> str:
        if self.step is None:
            return ""
        value = self._score_of({self._name: self._score})
        return f"checkpoint {self.step} has the {self._how}, {value:.4f}"


def select_kinds(numbers: Mapping[str, Any], kinds: Collection[str]) -> dict[str, Any]:
    """Selects the numbers of some kinds of evaluations: the first words of their names."""
    return {name: x for name, x in numbers.items() if name.partition("_")[0] in kinds}
