"""The keys that give a run other batches on as many samples, with the learning rates for them."""

import math
from collections.abc import Sequence
from typing import Any

from maxramp.config.keys import Config
from maxramp.config.load import no_batch
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate

_OF_RAMPS = ("global_batch_size", "global_batch_tokens", "gradient_accumulation_steps")  # in phases

# (sample from which on, rows) of batches.
Batches = Sequence[tuple[int, float]]


def ramp_keys(batches: Batches) -> dict[str, Any]:
    if len(batches) == 1:
        return {"global_batch_size": batches[0][1]}
    return {
        "step_batch_size_schedule": " ".join(f"{sample}:{size}" for sample, size in batches),
        "step_batch_size_unit": "samples",
    }


class Rebatching:
    """Other batches for a config, whose keys are given beside it; `ramp` is that of `resolved`."""

    def __init__(self, config: Config, resolved: Config, ramp: RampupBatchManager):
        self.config, self._rate, self._ramp = config, resolved.learning_rate, ramp
        self.total_samples = ramp.total_samples

    def keys(self, own: dict[str, Any], rates: dict[str, float] | None = None) -> dict[str, Any]:
        """The keys that give the run the batches of `own` keys, in place of the config's.

        They unset what gives batches or length now, and keep what else phases change, but for the
        learning rates of the phases in `rates`.
        """
        phases = {}
        for name, given in self.config.batch.phases.items():
            if rest := {key: x for key, x in given.items() if key not in _OF_RAMPS}:
                rate = {"learning_rate": rates[name]} if rates and name in rates else {}
                phases[name] = rest | rate
        own = own | {"total_samples": self.total_samples}
        keys, before = no_batch() | {"phases": phases} | own, self.config.values
        return {name: x for name, x in keys.items() if name in own or before[name] != x}

    def rated_keys(self, batches: Batches) -> dict[str, Any]:
        """`keys` of these batches, with the learning rates for the first, where they change."""
        first, rate = batches[0][1], self._rate.learning_rate
        found = self.keys(ramp_keys(batches), self.phase_rates(first) if rate else {})
        if len(batches) > 1:
            found |= {"batch_size_lr_scaling": "sqrt", "batch_size_lr_reference": "initial"}
        if rate and not math.isclose(own := self.rate(rate, 0, first), rate, rel_tol=5e-3):
            found["learning_rate"] = own
        return found

    def phase_rates(self, first: int) -> dict[str, float]:
        """Learning rates of phases, which are for the batches there, for a batch of `first`."""
        found = {}
        for phase in self.config.batch.changing("learning_rate"):
            configured = phase.changes["learning_rate"]
            rate = self.rate(configured, phase.first_sample, first)
            if phase.first_sample and not math.isclose(rate, configured, rel_tol=5e-3):
                found[phase.name] = rate
        return found

    def rate(self, configured: float, sample: int, batch: int) -> float:
        """The learning rate for a batch of this many samples in place of the one at `sample`, by
        the square-root rule (`LearningRate`)."""
        there = self._ramp.stage_at_sample(sample).global_batch_size
        scaled = configured * LearningRate.from_keys(self._rate, self._ramp).pace(there).rate
        return float(f"{scaled * (batch / there) ** 0.5:.3g}")
