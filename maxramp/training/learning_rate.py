"""The learning rate as a function of consumed samples.

One clock decides both the batch and the learning rate, so a ramp bends neither: under a ramp the
curve over samples is the curve of the constant batch it ends at.
"""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from maxramp.errors import ConfigError
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.keys import LearningRateKeys


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """MaxText's warmup + cosine and warmup + stable + decay, over samples instead of steps.

    With a constant batch of B rows and s = step * B it is MaxText's schedule exactly, down to its
    phases of len - 1 intervals: every length below is in whole batches of `quantum` = B rows, and a
    phase of n samples moves from its first to its last value over n - quantum samples. Under a ramp
    the quantum is the final batch, so that the curve is the one of the constant-batch run.

    With `learning_rate_by=steps` the clock is the step and the quantum is 1.
    """

    keys: LearningRateKeys
    ramp: RampupBatchManager
    final_batch_size: int
    quantum: int
    total: int  # samples (or steps) that the schedule spans

    @classmethod
    def of(cls, keys: LearningRateKeys, ramp: RampupBatchManager) -> "LearningRate":
        """The schedule of a run, over its learning_rate_schedule_steps or the run.

        Raises:
          ConfigError: there is no learning rate, or the schedule would end before the step from
            which a changed ramp goes on: how many samples it spans, the ramp of today cannot tell.
        """
        if keys.learning_rate is None:
            raise ConfigError(
                "learning_rate=none: this config is a batch schedule without a learning rate, and "
                "a step needs one; give learning_rate"
            )
        steps = keys.learning_rate_schedule_steps
        steps = ramp.total_steps if steps == -1 else steps
        start = ramp.stages[0].first_step
        if steps <= start:
            raise ConfigError(
                f"learning_rate_schedule_steps={steps}: the schedule would end before step "
                f"{start}, where the changed ramp begins; use {start + 1} or more, or -1 for all"
            )
        samples = ramp.samples_before(steps)
        final = ramp.stage_at_step(steps - 1).global_batch_size
        if keys.learning_rate_by == "steps":
            return cls(keys, ramp, final, 1, steps)
        return cls(keys, ramp, final, final, samples)

    def __call__(self, consumed_samples: Any, global_batch_size: int | None = None) -> Any:
        """Learning rate of the step that starts at `consumed_samples` (an array, float32).

        `batch_size_lr_scaling` multiplies it by (global_batch_size / final batch)^(1/2 or 1), the
        square-root rule for Adam (Malladi et al., arXiv 2205.10287) or the linear one for SGD.
        """
        keys, s = self.keys, jnp.asarray(consumed_samples, jnp.float32)
        if keys.learning_rate_by == "steps":
            s = self._step_at(s)
        peak = keys.learning_rate
        if global_batch_size is not None:
            power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[keys.batch_size_lr_scaling]
            peak *= (global_batch_size / self.final_batch_size) ** power
        final, total = peak * keys.learning_rate_final_fraction, float(self.total)
        warmup = self._part(keys.warmup_steps_fraction)
        decay = total - warmup
        style = "cosine"
        if keys.lr_schedule_type == "wsd":
            decay = self._part(keys.wsd_decay_steps_fraction)
            style = keys.wsd_decay_style
        done = self._progress(s - (total - decay), decay, 1.0 if style == "cosine" else 0.0)
        left = 0.5 * (1 + jnp.cos(jnp.pi * done)) if style == "cosine" else 1 - done
        rate = jnp.where(s < total - decay, peak, final + (peak - final) * left)
        rate = jnp.where(s < warmup, peak * self._progress(s, warmup, 0.0), rate)
        return jnp.where(s < total, rate, 0.0)

    def _part(self, fraction: float) -> float:
        """A fraction of the schedule in whole quanta; a float, as samples pass JAX's int32."""
        return float(math.floor(self.total / self.quantum * fraction) * self.quantum)

    def _progress(self, since: Any, length: float, of_one_batch: float) -> Any:
        """From 0 at the first batch of a phase to 1 at its last; a phase of one batch is fixed."""
        if length <= self.quantum:
            return of_one_batch
        return jnp.clip(since / (length - self.quantum), 0.0, 1.0)

    def _step_at(self, samples: Any) -> Any:
        """The step that starts at so many consumed samples, from the stage list."""
        stages = self.ramp.stages
        starts, steps, sizes = (
            jnp.asarray([getattr(stage, name) for stage in stages], jnp.float32)
            for name in ("first_sample", "first_step", "global_batch_size")
        )
        i = jnp.searchsorted(starts, samples, side="right") - 1
        return jnp.round(steps[i] + (samples - starts[i]) / sizes[i])
