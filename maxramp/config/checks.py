"""What must hold between sections of the configuration; each section checks itself."""

import dataclasses

from maxramp.config import alternatives
from maxramp.config.keys import Config
from maxramp.errors import ConfigError
from maxramp.rampup import notations


def check(config: Config) -> None:
    """Checks every section, and the relations across them that need no devices.

    Raises:
      ConfigError: names the key, its value, the relation it breaks and a remedy.
    """
    for field in dataclasses.fields(config):
        if field.name != "values":
            getattr(config, field.name).check()
    notations.check(config.batch)
    alternatives.check_notation(config.values)
    if config.batch.rampup_policy == "noise" and config.schedule.batch_size_lr_reference == "final":
        raise ConfigError(
            "batch_size_lr_reference=final with rampup_policy=noise: the learning rate would "
            "depend on a batch that is not decided yet; use initial, or leave it out"
        )
    schedule_steps = config.schedule.learning_rate_schedule_steps
    if config.batch.steps != -1 and schedule_steps > config.batch.steps:
        raise ConfigError(
            f"learning_rate_schedule_steps={schedule_steps} exceeds steps={config.batch.steps}; "
            "the schedule would never end: lower it, or use -1 for all steps"
        )
