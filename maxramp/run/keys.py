"""The sections of a run: its folder and what it shows, its profile."""

import dataclasses

from maxramp.errors import ConfigError
from maxramp.files.place import Place, place
from maxramp.keys.section import Keys, above_zero_or_open, limit, minimum, one_of, path_or_storage

PROGRAMS = ("train", "grpo")  # the commands that train


@dataclasses.dataclass(frozen=True)
class RunKeys(Keys):
    """The run's folder, what it shows, and when it is given up."""

    run_name: str = limit(
        lambda value: value not in (".", "..") and "/" not in value,
        "must name one folder below base_output_directory; put the path into base_output_directory",
    )
    program: str = one_of("", *PROGRAMS)
    base_output_directory: str = path_or_storage()
    model_name: str
    log_period: int = minimum(1)
    enable_checkpointing: bool
    export_huggingface: bool
    enable_tensorboard: bool
    wandb_project: str
    abort_on_nan_loss: bool
    abort_on_inf_loss: bool
    skip_bad_steps: int
    hang_timeout_seconds: float = above_zero_or_open()

    @property
    def folder(self) -> Place:
        """The run's folder: its name is run_name or, without one, the model's."""
        try:
            return place(self.base_output_directory) / (self.run_name or self.model_name)
        except ConfigError as error:
            raise ConfigError(f"base_output_directory={error}") from None


@dataclasses.dataclass(frozen=True)
class ProfilerKeys(Keys):
    """Which steps to trace."""

    profiler: str = one_of("", "xplane")
    skip_first_n_steps_for_profiler: int = minimum(0)
    profiler_steps: int = minimum(1)
