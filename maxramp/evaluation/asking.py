"""How tasks ask, whichever they are."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Asking:
    """How tasks ask."""

    num_fewshot: int | None = None  # examples before a question; None = as a task says
    limit: float | None = None  # questions of a task, or their share if below 1; None = all
    apply_chat_template: bool = False
    system_instruction: str | None = None
    gen_kwargs: Mapping[str, Any] | None = None  # in place of a task's own
    log_samples: bool = False  # whether results hold every question and answer
    bootstrap_iters: int = 1000  # draws for the errors of metrics other than means; 0 = none
