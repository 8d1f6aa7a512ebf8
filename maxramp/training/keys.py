"""The sections of training: what is minimized, how weights follow, and at which rate."""

import dataclasses

from maxramp.errors import ConfigError
from maxramp.keys.section import (
    Keys,
    at_least,
    below_one,
    fraction,
    one_of,
    positive_or_open,
    uint32,
)
from maxramp.model.keys import ModelKeys, dtype_of


@dataclasses.dataclass(frozen=True)
class ObjectiveKeys(Keys):
    """What a step minimizes."""

    z_loss_multiplier: float = at_least(0)
    loss_block_tokens: int = at_least(0)


@dataclasses.dataclass(frozen=True)
class OptimizerKeys(Keys):
    """Gradients -> new weights."""

    init_weights_seed: int = uint32()
    opt_type: str = one_of("adamw", "sgd")
    adam_b1: float = below_one()
    adam_b2: float = below_one()
    adam_eps: float = at_least(0)
    adam_weight_decay: float = at_least(0)
    mu_dtype: str = dtype_of("")
    gradient_clipping_threshold: float = at_least(0)
    skip_bad_steps: int = at_least(0)


@dataclasses.dataclass(frozen=True)
class LearningRateKeys(Keys):
    """The learning rate over samples or steps."""

    learning_rate: float | None = at_least(0)
    lr_schedule_type: str = one_of("cosine", "wsd")
    learning_rate_final_fraction: float = at_least(0)
    warmup_steps_fraction: float = fraction()
    wsd_decay_steps_fraction: float = fraction()
    wsd_decay_style: str = one_of("linear", "cosine")
    learning_rate_schedule_steps: int = positive_or_open()
    learning_rate_by: str = one_of("samples", "steps")
    batch_size_lr_scaling: str = one_of("none", "sqrt", "linear")

    def check(self) -> None:
        """Checks each key, and that the phases of the schedule fit into it.

        Raises:
          ConfigError: names the key, its value, the relation it breaks and a remedy.
        """
        super().check()
        decay = self.wsd_decay_steps_fraction if self.lr_schedule_type == "wsd" else 0
        if self.warmup_steps_fraction + decay > 1:
            raise ConfigError(
                f"warmup_steps_fraction={self.warmup_steps_fraction} and "
                f"wsd_decay_steps_fraction={decay} add up to more than 1; lower one"
            )


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a train state and its step are made from."""

    model: ModelKeys
    objective: ObjectiveKeys
    optimizer: OptimizerKeys
