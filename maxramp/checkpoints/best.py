"""The best checkpoint of a run so far, by a number of its evaluations: `checkpoint_best`."""

from collections.abc import Mapping, Sequence

from maxramp.checkpoints import folder as folder_lib
from maxramp.checkpoints.folder import Checkpoint
from maxramp.errors import ConfigError
from maxramp.files.place import Place
from maxramp.processes import agreement


class Best:
    """Knows how good the checkpoints of a folder are, on the first process."""

    def __init__(self, how: str, folder: Place, evaluations: Mapping[str, str]):
        """
        Args:
          how: "lowest NAME" or "highest NAME"; "" where no checkpoint is the best.
          folder: of the checkpoints.
          evaluations: as in `DataIdentity`: numbers of other evaluations do not compare.
        """
        self._how, self._folder, self._evaluations = how, folder, evaluations
        self._scores: dict[int, float] = {}  # replaced as a whole: two threads look at it

    def find(self) -> None:
        """Looks at the checkpoints that there are."""
        if self._how:
            self._scores = folder_lib.scores(self._folder, self._how, self._evaluations)

    def add(self, checkpoint: Checkpoint) -> None:
        """Notes a complete checkpoint."""
        score = folder_lib.score(self._how, checkpoint.evaluation)
        if score is not None:
            self._scores = self._scores | {checkpoint.step: score}

    @property
    def step(self) -> int | None:
        """Of the best checkpoint; None without one, and on all processes but the first."""
        return folder_lib.best_of(self._scores)

    def check(self, names: Sequence[str]) -> None:
        """Refuses a number that evaluations do not have; `names` are those that they have.

        Raises:
          ConfigError: it is none of them.
        """
        name = self._how.partition(" ")[2]
        if name and name not in names:
            raise ConfigError(
                f"checkpoint_best={self._how}: evaluations of this run have no {name}, but "
                f"{', '.join(names)}"
            )

    def is_beaten(self, evaluation: Mapping[str, float]) -> bool:
        """Whether an evaluation is better than that of every checkpoint; on every process."""
        score, step = folder_lib.score(self._how, evaluation), self.step
        beaten = score is not None and (step is None or score > self._scores[step])
        return agreement.all_gather_json(beaten)[0]

    def __str__(self) -> str:
        """What it is, for a person; "" without one."""
        if self.step is None:
            return ""
        value = self._scores[self.step] * (-1 if self._how.startswith("lowest") else 1)
        return f"checkpoint {self.step} has the {self._how}, {value:.4f}"
