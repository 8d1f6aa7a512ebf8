"""The objectives, and which of them keys ask for. Imports no JAX."""

from collections.abc import Mapping
from typing import Any

from maxramp.objectives.chats import CHATS
from maxramp.objectives.objective import Objective
from maxramp.objectives.pairs import PAIRS
from maxramp.objectives.rewards import REWARDS
from maxramp.objectives.text import TEXT

OBJECTIVES = (REWARDS, PAIRS, CHATS, TEXT)


def find_objective(values: Mapping[str, Any]) -> Objective:
    """Returns the objective that keys ask for, by their names; all of them, or a section."""
    asked = (x for x in OBJECTIVES if x.key in values and values[x.key] == x.value)
    return next(asked, TEXT)
