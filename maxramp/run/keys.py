"""The sections of a run: its folder and what it shows, its profile."""

import dataclasses

from maxramp.errors import ConfigError
from maxramp.keys.section import (
    Keys,
    above_zero_or_open,
    at_least,
    is_object_storage,
    one_of,
    path_or_storage,
)

PROGRAMS = ("train", "grpo")  # the commands that train


@dataclasses.dataclass(frozen=True)
class RunKeys(Keys):
    """The run's folder, what it shows, and when it is given up."""

    run_name: str
    program: str = one_of("", *PROGRAMS)
    base_output_directory: str = path_or_storage()
    model_name: str
    log_period: int = at_least(1)
    enable_checkpointing: bool
    enable_tensorboard: bool
    wandb_project: str
    abort_on_nan_loss: bool
    abort_on_inf_loss: bool
    skip_bad_steps: int
    hang_timeout_seconds: float = above_zero_or_open()

    def check(self) -> None:
        """Checks each key, and that the run's name is that of a folder where it is to be.

        Raises:
          ConfigError: names the key, its value, the relation it breaks and a remedy.
        """
        super().check()
        if self.run_name in (".", "..") or "/" in self.run_name:
            raise ConfigError(
                f"run_name={self.run_name} must name one folder below base_output_directory; put "
                "the path into base_output_directory"
            )
        if is_object_storage(self.base_output_directory):  # whose clients take them for a glob
            for name in ("base_output_directory", "run_name"):
                if found := set("*?[") & set(value := getattr(self, name)):
                    raise ConfigError(
                        f"{name}={value} has {' '.join(sorted(found))} in it, which no address in "
                        "an object storage may have; take another name"
                    )


@dataclasses.dataclass(frozen=True)
class ProfilerKeys(Keys):
    """Which steps to trace."""

    profiler: str = one_of("", "xplane")
    skip_first_n_steps_for_profiler: int = at_least(0)
    profiler_steps: int = at_least(1)
