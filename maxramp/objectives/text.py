"""Next tokens of text."""

import dataclasses

from maxramp.keys.section import Keys, minimum
from maxramp.objectives.objective import Objective
from maxramp.stage import text_fields


@dataclasses.dataclass(frozen=True)
class NextTokenKeys(Keys):
    """What is minimized over text and chats."""

    z_loss_multiplier: float = minimum(0)
    log_token_statistics: bool


def sum_names(keys: NextTokenKeys) -> tuple[str, ...]:
    return ("loss", "tokens", *("token_accuracy", "entropy")[: 2 * keys.log_token_statistics])


TEXT = Objective("rows", text_fields, NextTokenKeys, sum_names)
