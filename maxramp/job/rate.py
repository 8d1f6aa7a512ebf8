"""Whether the learning rate jumps where a run continues with other keys."""

import dataclasses

from maxramp.checkpoints.folder import Checkpoint
from maxramp.keys import base
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.keys import LearningRateKeys
from maxramp.training.learning_rate import LearningRate

_SMALL = 1e-3  # relative: a curve that is rounded to other batches does not count as another one


def rate_change(keys: LearningRateKeys, ramp: RampupBatchManager, position: Checkpoint) -> str:
    """What becomes of the learning rate, in one line; "" if it follows the curve that it had.

    Args:
      keys: of this start.
      ramp: of this start.
      position: the checkpoint that it continues from.

    Raises:
      ConfigError: today's keys make no learning rate.
    """
    step = position.step
    if not 0 < step < ramp.total_steps:
        return ""
    values = base.base() | position.config
    first = position.stages[0]
    before = RampupBatchManager(
        BatchKeys.of(values),
        ramp.stages[0].devices,
        first_step=first["first_step"],
        first_sample=first["first_sample"],
        first_index=first["index"],
        decided=[(s["first_sample"], s["global_batch_size"]) for s in position.stages[1:]]
        if values["rampup_policy"] == "noise"
        else [],
    )
    old, new = LearningRate.of(LearningRateKeys.of(values), before), LearningRate.of(keys, ramp)
    sample = before.samples_before(step - 1)
    batch = before.stage_at_step(step - 1).global_batch_size
    today = dataclasses.replace(new, ramp=before)  # its ramp may begin after that step
    last, same = float(old(sample, batch)), float(today(sample, batch))
    if abs(same - last) <= _SMALL * max(same, last):
        return ""
    rate = new(position.consumed_samples, ramp.stage_at_step(step).global_batch_size)
    return (
        f"the learning rate is {float(rate):.3g} from step {step} on, after {last:.3g} in step "
        f"{step - 1}: these keys give it another curve, which was at {same:.3g} there"
    )
