"""The sections of training: what is minimized, how weights follow, and at which rate."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from maxramp.keys.choices import Choices
from maxramp.keys.section import (
    Keys,
    above_zero,
    below_one,
    limit,
    minimum,
    one_of,
    some_of,
    uint32,
)
from maxramp.model.keys import ROLES, ModelKeys, dtype_of
from maxramp.model.pattern import ACCEPTANCE, DRAFT_LOSS, DRAFT_TOKENS
from maxramp.objectives.objective import Objective
from maxramp.objectives.pairs import PAIRS, PreferenceKeys
from maxramp.objectives.rewards import PolicyKeys
from maxramp.objectives.text import TEXT, NextTokenKeys
from maxramp.rampup.keys import CurveKeys
from maxramp.stage import StageSpec


@dataclasses.dataclass(frozen=True)
class LossKeys(PreferenceKeys, NextTokenKeys):
    """What a step minimizes over rows of data."""

    loss_block_tokens: int = minimum(0)


@dataclasses.dataclass(frozen=True)
class AdamWKeys(Keys):
    """AdamW: decaying means of gradients and of their squares, and weight decay."""

    adam_b1: float = below_one()
    adam_b2: float = below_one()
    adam_eps: float = minimum(0)
    adam_weight_decay: float = minimum(0)
    adamw_mask: Sequence[str] = some_of(*ROLES)
    mu_dtype: str = dtype_of("")


@dataclasses.dataclass(frozen=True)
class SGDKeys(Keys):
    """Gradient descent, with momentum or without."""

    sgd_momentum: float = below_one()


@dataclasses.dataclass(frozen=True)
class MuonKeys(Keys):
    """Muon: momentum whose singular values are made about 1."""

    muon_beta: float = below_one()
    muon_weight_decay: float = minimum(0)
    muon_consistent_rms: float | None = above_zero()


@dataclasses.dataclass(frozen=True)
class OptaxKeys(Keys):
    """An optimizer of optax: its arguments except the learning rate."""

    opt_arguments: Mapping[str, Any]


class OptimizerRecord(NamedTuple):
    """The facts about an optimizer; its arithmetic is in optimizers/NAME.py."""

    keys: type[Keys]
    half_lives: tuple[str, ...]  # keys that half_lives_in_samples may name
    roles: tuple[str, ...] = ROLES  # of the weights that it updates; adamw updates the others
    state_keys: tuple[str, ...] = ()  # keys that decide which arrays are in its state


OPTIMIZERS = {
    "adamw": OptimizerRecord(
        AdamWKeys, ("adam_b1", "adam_b2", "adam_weight_decay"), state_keys=("mu_dtype",)
    ),
    "sgd": OptimizerRecord(SGDKeys, ("sgd_momentum",), state_keys=("sgd_momentum",)),
    "muon": OptimizerRecord(MuonKeys, ("muon_beta", "muon_weight_decay"), roles=("matrix",)),
    "optax": OptimizerRecord(OptaxKeys, (), state_keys=("opt_arguments",)),
}


@dataclasses.dataclass(frozen=True)
class OptimizerKeys(AdamWKeys, SGDKeys, MuonKeys, OptaxKeys):
    """How gradients become new weights."""

    init_weights_seed: int = uint32()
    dtype: str = dtype_of()
    trainable_parameters_mask: Sequence[str] = some_of(*ROLES)
    trainable_layers: Sequence[int] = limit(
        lambda value: all(type(n) is int and n >= 0 for n in value) and value == sorted({*value}),
        "must be numbers of layers from 0 up, rising, each once",
    )
    opt_type: str = limit(
        lambda value: value.startswith("optax.") or value in {*OPTIMIZERS} - {"optax"},
        "is not one of adamw, sgd, muon, or an optimizer of optax, such as optax.lion",
    )
    half_lives_in_samples: Sequence[str]
    gradient_clipping_threshold: float = minimum(0)
    skip_bad_steps: int = minimum(0)
    skip_step_on_spikes: bool
    skip_step_interval: int = minimum(6)
    skip_step_scaling_factor: float = above_zero()
    log_gradient_noise_scale: bool
    routed_bias_update_rate: float = minimum(0)


def optimizer_names(opt_type: str) -> dict[str, str]:
    """Returns the optimizer of each role's weights, by its name in `OPTIMIZERS`; of a valid
    opt_type, as all here."""
    name = opt_type.partition(".")[0]
    return {role: name if role in OPTIMIZERS[name].roles else "adamw" for role in ROLES}


def half_lives(opt_type: str) -> tuple[str, ...]:
    names = dict.fromkeys(optimizer_names(opt_type).values())
    return tuple(key for name in names for key in OPTIMIZERS[name].half_lives)


def _optimizer_choices() -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, record in OPTIMIZERS.items():
        users = (kind for kind in OPTIMIZERS if name in optimizer_names(kind).values())
        yield f"opt_type={'|'.join(users).replace('optax', 'optax.*')}", record.keys.names()


CHOICES: Choices = {
    **dict(_optimizer_choices()),
    "skip_step_on_spikes=True": ("skip_step_interval", "skip_step_scaling_factor"),
    PAIRS.asked_by: PAIRS.keys.names(),
    "dpo_loss_type=sigmoid|robust": ("dpo_label_smoothing",),
    f"without {PAIRS.key}": tuple(n for n in TEXT.keys.names() if n != "mtp_loss_scaling_factor"),
    "mtp_num_layers": ("mtp_loss_scaling_factor",),
    "lr_schedule_type=wsd": ("wsd_decay_steps_fraction", "wsd_decay_style"),
}


@dataclasses.dataclass(frozen=True)
class LearningRateKeys(CurveKeys):
    """The learning rate over samples or steps."""

    learning_rate: float | None = minimum(0)
    batch_size_lr_scaling: str = one_of("auto", "none", "sqrt", "linear")
    batch_size_lr_reference: str = one_of("auto", "initial", "final")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Everything that a train state and its step depend on."""

    model: ModelKeys
    objective: Objective
    loss: LossKeys | PolicyKeys  # the keys of the objective
    optimizer: OptimizerKeys

    @property
    def sum_names(self) -> tuple[str, ...]:
        return self.objective.shown(self.loss)

    @property
    def measures_drafts(self) -> bool:
        """Whether an evaluation runs the model's drafts."""
        return self.objective.trains_drafts and self.model.mtp_num_layers > 0

    @property
    def eval_sums(self) -> dict[str, str]:
        """The sums that an evaluation shows, each with the name of its divisor among them."""
        names = dict.fromkeys(self.sum_names, self.objective.divisor)
        drafts = (DRAFT_LOSS, ACCEPTANCE, DRAFT_TOKENS) if self.measures_drafts else ()
        return names | dict.fromkeys(drafts, DRAFT_TOKENS)

    def with_spec(self, spec: StageSpec) -> Self:
        """Returns the recipe of passes of this shape: their row length, remat policy, micro
        batches, ropes."""
        execution = {
            **vars(spec.rope_keys),
            "max_target_length": spec.row_length,
            "remat_policy": spec.remat_policy,
            "num_pipeline_microbatches": spec.pipeline_microbatches,
        }
        return dataclasses.replace(self, model=dataclasses.replace(self.model, **execution))
