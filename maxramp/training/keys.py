"""The sections of training: what is minimized, how weights follow, and at which rate."""

import dataclasses

from maxramp.keys.section import Keys, at_least, below_one, one_of, uint32
from maxramp.model.keys import ModelKeys, dtype_of
from maxramp.rampup.keys import CurveKeys


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
    log_gradient_noise_scale: bool


@dataclasses.dataclass(frozen=True)
class LearningRateKeys(CurveKeys):
    """The learning rate over samples or steps."""

    learning_rate: float | None = at_least(0)
    batch_size_lr_scaling: str = one_of("auto", "none", "sqrt", "linear")
    batch_size_lr_reference: str = one_of("auto", "initial", "final")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a train state and its step are made from."""

    model: ModelKeys
    objective: ObjectiveKeys
    optimizer: OptimizerKeys
