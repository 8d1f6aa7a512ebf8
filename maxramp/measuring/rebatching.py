"""The keys that give a run other batches on as many samples, with the learning rates for them."""

import math
from collections.abc import Sequence
from typing import Any

from maxramp.config.keys import Config
from maxramp.config.load import unset_batch
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate

_BATCH_KEYS = ("global_batch_size", "global_batch_tokens", "gradient_accumulation_steps")

Batches = Sequence[tuple[int, float]]  # (sample from which on, rows) of each


def ramp_keys(batches: Batches) -> dict[str, Any]:
    """Returns the keys that give these batches."""
    if len(batches) == 1:
        return {"global_batch_size": batches[0][1]}
    return {
        "step_batch_size_schedule": " ".join(f"{sample}:{size}" for sample, size in batches),
        "step_batch_size_unit": "samples",
    }


class Rebatching:
    """Gives a run other batches on as many samples."""

    def __init__(self, config: Config, resolved: Config, ramp: RampupBatchManager):
        """Takes a config as loaded, the same `resolved` on its devices, and the ramp of that."""
        self.config, self._rate, self._ramp = config, resolved.learning_rate, ramp
        self.total_samples = ramp.total_samples

    def keys(self, own: dict[str, Any], rates: dict[str, float] | None = None) -> dict[str, Any]:
        """Returns the keys that give the run the batches of `own` keys, in place of the config's.

        They unset what gives batches or length now, and keep the other keys of phases, except for
        the learning rates of the phases in `rates`.
        """
        phases = {}
        for name, phase in self.config.batch.phases.items():
            if rest := {key: x for key, x in phase.items() if key not in _BATCH_KEYS}:
                rate = {"learning_rate": rates[name]} if rates and name in rates else {}
                phases[name] = rest | rate
        own = own | {"total_samples": self.total_samples}
        keys, before = unset_batch() | {"phases": phases} | own, self.config.values
        return {name: x for name, x in keys.items() if name in own or before[name] != x}

    def rated_keys(self, batches: Batches) -> dict[str, Any]:
        """Returns `keys` of these batches, with the learning rates for the first of them."""
        first, rate = batches[0][1], self._rate.learning_rate
        keys = self.keys(ramp_keys(batches), self.phase_rates(first) if rate else {})
        if len(batches) > 1:
            keys |= {"batch_size_lr_scaling": "sqrt", "batch_size_lr_reference": "initial"}
        if rate and not math.isclose(own := self.rate(rate, 0, first), rate, rel_tol=5e-3):
            keys["learning_rate"] = own
        return keys

    def phase_rates(self, first: int) -> dict[str, float]:
        """Returns the learning rates of phases for a first batch of `first`, where they change."""
        rates = {}
        for phase in self.config.batch.changing("learning_rate"):
            configured = phase.changes["learning_rate"]
            rate = self.rate(configured, phase.first_sample, first)
            if phase.first_sample and not math.isclose(rate, configured, rel_tol=5e-3):
                rates[phase.name] = rate
        return rates

    def rate(self, configured: float, sample: int, batch: int) -> float:
        """Returns the learning rate for `batch` samples in place of the batch at `sample`, by the
        square-root rule (`LearningRate`)."""
        before = self._ramp.stage_at_sample(sample).global_batch_size
        scaled = configured * LearningRate.from_keys(self._rate, self._ramp).pace(before).rate
        return float(f"{scaled * (batch / before) ** 0.5:.3g}")
