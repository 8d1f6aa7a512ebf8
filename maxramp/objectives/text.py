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
    mtp_loss_scaling_factor: float = minimum(0)


def sum_names(keys: NextTokenKeys) -> tuple[str, ...]:
    """Returns the names of the sums that a step shows."""
    names = ("loss", "tokens")
    return (*names, "token_accuracy", "entropy") if keys.log_token_statistics else names


TEXT = Objective("rows", text_fields, NextTokenKeys, sum_names, trains_drafts=True)
