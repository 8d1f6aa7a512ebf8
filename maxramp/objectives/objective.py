"""The record of an objective, and the refusals that several share. Imports no JAX.

`training.step.loss_of` has the arithmetic of each.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from maxramp.keys.section import Keys, Relations
from maxramp.stage import Field


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a run trains for."""

    noun: str  # of its samples
    # Lists the arrays of a batch for T tokens; `separate`: rows hold several documents.
    fields: Callable[..., tuple[Field, ...]]
    keys: type[Keys]  # those of its loss
    # Names of the sums that a step shows, by these keys: "loss", "tokens" (the targets), ...
    shown: Callable[[Any], tuple[str, ...]]
    divisor: str = "tokens"  # which of them the others are divided by, once for a whole batch
    key: str = ""  # that asks for it; "" = it holds where no other is asked for
    value: Any = True  # of that key
    chats: int = 0  # in a sample; two are a pair, whose last answers are compared
    needs_weights: str = ""  # why a run begins with the weights of a model; "" = with any
    trains_drafts: bool = False  # of tokens further ahead (mtp_num_layers); else they stay
    has_reference: bool = False  # whether samples have log-probabilities under these weights
    in_evaluations: tuple[str, ...] = ()  # keys that the numbers of evaluations depend on
    example: str = "configs/base.yml"  # a config that trains for it
    refuses: Callable[[Any], Relations] = lambda config: ()  # keys that it does not take

    @property
    def asked_by(self) -> str:
        """The key that asks for it, with its value."""
        return f"{self.key}={self.value}" if self.key else ""


def measured_noise(config: Any) -> str:
    """Returns the key that asks for the noise scale, with its value, or ""."""
    if config.batch.rampup_policy == "noise":
        return "rampup_policy=noise"
    return "log_gradient_noise_scale=True" * config.optimizer.log_gradient_noise_scale


def refuse_cuts(config: Any, reader: str) -> Relations:
    """Refuses samples that are cut into rows."""
    yield (
        config.batch.row_length != -1,
        f"row_length={config.batch.row_length} cuts samples into rows, and {reader} reads each "
        "as a whole; leave it out (-1)",
    )


def refuse_in_phases(config: Any, reader: str, names: Iterable[str]) -> Relations:
    """Refuses keys that must be the same in all phases."""
    for name in names:
        phases = [f"{phase}.{name}" for phase in config.batch.changing(name)]
        yield (phases, f"{''.join(phases[:1])}: {reader} takes one for the whole run; leave it out")
