"""Preferences: pairs of answers, of which one was chosen (DPO)."""

import dataclasses
from typing import Any

from maxramp.keys.section import Keys, Relations, above_zero, limit, one_of
from maxramp.objectives.chats import refuse_tokenizer
from maxramp.objectives.objective import Objective, measured_noise, refuse_cuts, refuse_in_phases
from maxramp.rampup.phases import MIXTURE
from maxramp.stage import ROPE_KEYS, Field, text_fields


@dataclasses.dataclass(frozen=True)
class PreferenceKeys(Keys):
    """What is minimized over pairs of answers."""

    dpo_beta: float = above_zero()
    dpo_label_smoothing: float = limit(
        lambda value: 0 <= value < 0.5,
        "must be at least 0 and below 0.5, or the chosen answers would count as the worse ones",
    )
    dpo_loss_type: str = one_of("sigmoid", "robust", "ipo")


def _fields(tokens: int, separate: bool = True) -> tuple[Field, ...]:
    """Lists the arrays for T tokens of both chats of a pair, which are two segments."""
    return *text_fields(tokens, separate=True), Field("reference_log_probs", "float32", (2,))


# What is shown beside the loss: TRL's names.
_SHOWN = (
    *("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies"),
    *("logps/chosen", "logps/rejected"),
)


def _refuse(config: Any) -> Relations:
    reader, measured = PAIRS.asked_by, measured_noise(config)
    yield (
        config.data.use_sft,
        f"use_sft=True trains on chats and {reader} on pairs of them; leave one of them out",
    )
    yield from refuse_tokenizer(config, reader)
    yield (
        config.data.packing,
        f"packing=True would put several pairs into a row, and a sample of {reader} is one; use "
        "packing=false",
    )
    yield (
        measured,
        f"{measured}: the noise scale is measured of a mean over tokens, and {reader} takes one "
        "over pairs; leave it out, and give a ramp or rampup_policy=seesaw",
    )
    yield from refuse_cuts(config, reader)
    yield from refuse_in_phases(config, reader, (*ROPE_KEYS, MIXTURE))


PAIRS = Objective(
    noun="pairs",
    fields=_fields,
    keys=PreferenceKeys,
    shown=lambda keys: ("loss", "tokens", "pairs", *_SHOWN),
    divisor="pairs",
    key="use_dpo",
    chats=2,
    needs_weights="use_dpo=True begins with the weights of a model, and stays near to them",
    has_reference=True,
    in_evaluations=PreferenceKeys.names(),
    example="configs/post_train/dpo.yml",
    refuses=_refuse,
)
