"""The sections of training: what is minimized, how weights follow, and at which rate."""

import dataclasses
from collections.abc import Sequence
from typing import Self

from maxramp.keys.section import Keys, above_zero, below_one, minimum, one_of, uint32
from maxramp.model.keys import ModelKeys, dtype_of
from maxramp.rampup.keys import CurveKeys
from maxramp.stage import StageSpec


@dataclasses.dataclass(frozen=True)
class PreferenceKeys(Keys):
    """What is minimized over pairs of answers."""

    use_dpo: bool
    dpo_beta: float = above_zero()
    dpo_label_smoothing: float = minimum(0)
    dpo_loss_type: str = one_of("sigmoid", "robust", "ipo")
    loss_block_tokens: int = minimum(0)


@dataclasses.dataclass(frozen=True)
class ObjectiveKeys(PreferenceKeys):
    """What a step minimizes."""

    z_loss_multiplier: float = minimum(0)
    log_token_statistics: bool


@dataclasses.dataclass(frozen=True)
class PolicyKeys(Keys):
    """What reinforcement learning minimizes over the answers to prompts."""

    num_generations: int = minimum(1)
    grpo_normalize_advantages: bool
    grpo_epsilon: float = minimum(0)
    grpo_epsilon_high: float = minimum(0)
    grpo_beta: float = minimum(0)
    grpo_normalization: str = one_of("token", "sequence")
    num_iterations: int = minimum(1)
    decode_sampling_temperature: float = above_zero()
    loss_block_tokens: int = minimum(0)


# By opt_type, the keys of its optimizers that half_lives_in_samples may name.
_ADAMW = ("adam_b1", "adam_b2", "adam_weight_decay")
HALF_LIVES = {
    "adamw": _ADAMW,
    "sgd": ("sgd_momentum",),
    "muon": ("muon_beta", "muon_weight_decay", *_ADAMW),
}


@dataclasses.dataclass(frozen=True)
class OptimizerKeys(Keys):
    """Gradients -> new weights."""

    init_weights_seed: int = uint32()
    dtype: str = dtype_of()
    trainable_parameters_mask: Sequence[str]
    trainable_layers: Sequence[int]
    opt_type: str = one_of(*HALF_LIVES)
    adam_b1: float = below_one()
    adam_b2: float = below_one()
    adam_eps: float = minimum(0)
    adam_weight_decay: float = minimum(0)
    adamw_mask: Sequence[str]
    mu_dtype: str = dtype_of("")
    sgd_momentum: float = below_one()
    muon_beta: float = below_one()
    muon_weight_decay: float = minimum(0)
    muon_consistent_rms: float | None = above_zero()
    half_lives_in_samples: Sequence[str]
    gradient_clipping_threshold: float = minimum(0)
    skip_bad_steps: int = minimum(0)
    log_gradient_noise_scale: bool


@dataclasses.dataclass(frozen=True)
class LearningRateKeys(CurveKeys):
    """The learning rate over samples or steps."""

    learning_rate: float | None = minimum(0)
    batch_size_lr_scaling: str = one_of("auto", "none", "sqrt", "linear")
    batch_size_lr_reference: str = one_of("auto", "initial", "final")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a train state and its step are made from."""

    model: ModelKeys
    objective: ObjectiveKeys
    optimizer: OptimizerKeys

    def with_spec(self, spec: StageSpec) -> Self:
        """The same for the steps of a stage, which says how its passes are computed."""
        execution = {
            **vars(spec.sight),
            "max_target_length": spec.row_length,
            "remat_policy": spec.remat_policy,
            "num_pipeline_microbatches": spec.pipeline_microbatches,
        }
        return dataclasses.replace(self, model=dataclasses.replace(self.model, **execution))
