"""The learning rate as a function of consumed samples. The clock of the batch size is also that of
the rate, so under a ramp the curve is that of a constant batch, the first or the last one."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from maxramp.errors import ConfigError
from maxramp.rampup.ladder import Curve
from maxramp.rampup.phases import WARMUP
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.keys import LearningRateKeys
from maxramp.training.optimizers.half_lives import Pace


@dataclasses.dataclass(frozen=True)
class LearningRate:
    """An `optax.Schedule` over consumed samples: MaxText's warmup + cosine and warmup + stable +
    decay, the same with a constant batch, s = step * B, down to its phases of len - 1 intervals
    (`Curve`). Under a ramp it is the curve of a run whose batch is `reference`."""

    keys: LearningRateKeys
    ramp: RampupBatchManager
    reference: int  # a global batch size
    curve: Curve

    @classmethod
    def from_keys(cls, keys: LearningRateKeys, ramp: RampupBatchManager) -> "LearningRate":
        """Makes the learning rate of a run from resolved keys, of which none is "auto"; a
        ConfigError for learning_rate=none."""
        if keys.learning_rate is None:
            raise ConfigError(
                "learning_rate=none: this config is a batch schedule without a learning rate, and "
                "a step needs one; give learning_rate"
            )
        steps = keys.learning_rate_schedule_steps
        spans_run = steps == -1
        steps = ramp.total_steps if spans_run else steps
        samples = ramp.samples_before(steps)
        reference = samples - ramp.samples_before(steps - 1)
        if keys.batch_size_lr_reference == "initial":
            reference = ramp.thresholds[0].global_batch_size
            if spans_run and ramp.keys.samples_of_run != -1:  # whatever the batch will be
                samples = ramp.keys.samples_in_batches_of(reference)
        by_steps = keys.learning_rate_by == "steps"
        total, quantum = (steps, 1) if by_steps else (samples, reference)
        curve = Curve.from_keys(keys, total, quantum)
        return cls(keys, ramp, reference, curve)

    def __call__(self, consumed_samples: Any, global_batch_size: int | None = None) -> Any:
        """Returns the learning rate, float32, of the step that starts at `consumed_samples`, 0 from
        the curve's end on. `batch_size_lr_scaling` multiplies it by (global_batch_size /
        reference)^(1/2 or 1), unless the batch is None: the square-root rule for Adam (Malladi et
        al., arXiv 2205.10287), the linear one for SGD."""
        keys, curve, s = self.keys, self.curve, jnp.asarray(consumed_samples, jnp.float32)
        peak, risen = self._phase_peak(s)
        if keys.learning_rate_by == "steps":
            s = self._step_at(s)
        if global_batch_size is not None:
            peak *= self.pace(global_batch_size).rate
        final, fall = peak * curve.final, curve.total - curve.decay
        cosine = curve.style == "cosine"
        done = self._progress(s - fall, curve.decay, 1.0 if cosine else 0.0)
        left = 0.5 * (1 + jnp.cos(jnp.pi * done)) if cosine else 1 - done
        rate = jnp.where(s < fall, peak, final + (peak - final) * left)
        rate = jnp.where(s < curve.warmup, peak * self._progress(s, curve.warmup, 0.0), rate)
        return jnp.where(s < curve.total, rate if risen is None else rate * risen, 0.0)

    def _phase_peak(self, samples: Any) -> tuple[Any, Any]:
        """Returns a phase's peak, and the share of it that a new warm-up has reached, None if no
        phase has its own rate."""
        phases = self.ramp.keys.phase_list
        if not any({"learning_rate", WARMUP} & {*p.changes} for p in phases):
            return self.keys.learning_rate, None
        starts = [phase.first_sample for phase in phases]
        peaks = [phase.values.get("learning_rate", self.keys.learning_rate) for phase in phases]
        lengths = [self.curve.part(phase.changes.get(WARMUP, 0.0)) for phase in phases]
        starts, peaks, lengths = jnp.asarray([starts, peaks, lengths], jnp.float32)
        i = jnp.searchsorted(starts, samples, side="right") - 1
        intervals = lengths[i] - self.curve.quantum
        risen = jnp.clip((samples - starts[i]) / jnp.maximum(intervals, 1.0), 0.0, 1.0)
        return peaks[i], jnp.where(intervals > 0, risen, 1.0)

    def phase_value(self, name: str, value: float, samples: Any) -> Any:
        """Returns the value of a key that phases may change, of the phase that `samples` lie in;
        `value` is the first phase's."""
        phases = self.ramp.keys.phase_list
        if not self.ramp.keys.changing(name):
            return value
        starts = jnp.asarray([phase.first_sample for phase in phases], jnp.float32)
        values = jnp.asarray([phase.values.get(name, value) for phase in phases], jnp.float32)
        return values[jnp.searchsorted(starts, samples, side="right") - 1]

    def pace(self, global_batch_size: Any) -> Pace:
        """Returns how a step of this batch compares with one of `reference`; it may be traced."""
        power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[self.keys.batch_size_lr_scaling]
        batch = global_batch_size / self.reference
        return Pace(batch, batch**power)

    def _progress(self, since: Any, length: float, in_one_batch: float) -> Any:
        """Rises from 0 at the first batch of a part of the curve to 1 at its last; a part of one
        batch has a fixed value."""
        if length <= self.curve.quantum:
            return in_one_batch
        return jnp.clip(since / (length - self.curve.quantum), 0.0, 1.0)

    def _step_at(self, samples: Any) -> Any:
        steps, starts, sizes = jnp.asarray(self.ramp.batches, jnp.float32).T
        i = jnp.searchsorted(starts, samples, side="right") - 1
        return jnp.round(steps[i] + (samples - starts[i]) / sizes[i])
