"""The output folder of a run and what is said about it."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

import jax

from maxramp.config import Config, mesh_sizes, to_yaml
from maxramp.data.corpus import Corpus
from maxramp.display import Display
from maxramp.errors import ConfigError
from maxramp.metrics import JsonlWriter, Record, TensorBoardWriter, read_records
from maxramp.model import Decoder, num_parameters
from maxramp.notations import plain_number
from maxramp.picture import draw_run
from maxramp.rampup import RampupBatchManager, Stage
from maxramp.resume import Schedule


def plan_json(ramp: RampupBatchManager) -> dict[str, Any]:
    """plan.json: the stages and the length of a run."""
    return {
        "stages": [stage.to_json() for stage in ramp.stages],
        "total_steps": ramp.total_steps,
        "total_samples": ramp.total_samples,
        "total_tokens": ramp.total_samples * ramp.keys.max_target_length,
    }


class Output:
    """`{base_output_directory}/{run_name}/` and the display, written by the first process alone.

    Use it as a context: on the way out, however the run ended, it closes the files, draws ramp.png
    and prints the closing line.
    """

    def __init__(self, config: Config):
        """
        Raises:
          ConfigError: the folder cannot be written.
        """
        self._config = config
        self._is_first = jax.process_index() == 0
        self.folder = pathlib.Path(config.base_output_directory) / config.run_name
        if self._is_first:
            try:
                self.folder = self.folder.expanduser()
                (self.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
                (self.folder / ".writable").touch()
                (self.folder / ".writable").unlink()
                for name in ("metrics.jsonl", "config.yml", "plan.json"):
                    if (self.folder / name).exists():
                        (self.folder / name).open("a").close()
            except (OSError, RuntimeError) as error:
                raise ConfigError(
                    f"base_output_directory={config.base_output_directory}: cannot write to "
                    f"{getattr(error, 'filename', None) or self.folder}: "
                    f"{getattr(error, 'strerror', None) or error}"
                ) from None
        self._display = Display(config.log_period, quiet=not self._is_first)
        self._files: list[JsonlWriter | TensorBoardWriter] = []

    def open_files(
        self, ramp: RampupBatchManager, first_step: int
    ) -> list[Callable[[Record], None]]:
        """Writes config.yml and plan.json; returns what a record goes to.

        Called when nothing can be refused any more: metrics of an earlier start are cut back to the
        first `first_step` steps.
        """
        if not self._is_first:
            return []
        (self.folder / "config.yml").write_text(to_yaml(self._config))
        (self.folder / "plan.json").write_text(json.dumps(plan_json(ramp), indent=2) + "\n")
        (self.folder / "next_stage.json").unlink(missing_ok=True)
        self._files.append(JsonlWriter(self.folder / "metrics.jsonl", first_step))
        if self._config.enable_tensorboard:
            self._files.append(TensorBoardWriter(self.folder / "tensorboard", first_step))
        self._display.start(ramp)
        return [*self._files, self._display]

    def write_next_stage(self, stage: Stage) -> None:
        """Leaves next_stage.json for whoever starts the next job, and says so."""
        if not self._is_first:
            return
        following = {
            "stage": stage.index,
            "global_batch_size": stage.global_batch_size,
            "per_device_batch_size": plain_number(stage.per_device_batch_size),
            "gradient_accumulation_steps": stage.gradient_accumulation_steps,
            "nodes": stage.nodes,
            "devices": stage.devices,
            "consumed_samples": stage.first_sample,
        }
        path = self.folder / "next_stage.json"
        path.with_suffix(".tmp").write_text(json.dumps(following, indent=2) + "\n")
        path.with_suffix(".tmp").rename(path)  # whole or not there
        self.say(
            f"the next stage has a global batch of {stage.global_batch_size}, planned for "
            f"{stage.nodes} node{'s'[: stage.nodes > 1]} of {stage.devices // stage.nodes}: "
            "start again (next_stage.json)"
        )

    def say(self, line: str) -> None:
        """Prints a line, above the progress where there is one."""
        self._display.say(line)

    def say_start(
        self,
        corpus: Corpus,
        model: Decoder,
        mesh: jax.sharding.Mesh,
        schedule: Schedule,
        first_step: int,
    ) -> None:
        """What is about to run."""
        config, ramp = self._config, schedule.ramp
        count = len(ramp.stages_between(ramp.stages[0].first_step, ramp.total_steps))
        device = mesh.devices.flat[0]
        axes = " x ".join(f"{axis} {size}" for axis, size in mesh_sizes(config).items() if size > 1)
        self.say(f"data     {corpus.description} (hash {corpus.hash})")
        self.say(
            f"model    {config.model_name}: {num_parameters(model):,} weights, {config.dtype}, on "
            f"{mesh.size} {device.device_kind} device{'s'[: mesh.size > 1]}"
            + (f" (mesh {axes})" if axes else "")
        )
        self.say(
            f"run      {self.folder}: {ramp.total_steps:,} steps, {ramp.total_samples:,} "
            f"samples of {config.max_target_length} tokens in {count} stage{'s'[: count > 1]}"
        )
        if first_step:
            self.say(
                f"resume   from step {first_step}, {ramp.samples_before(first_step):,} samples "
                "consumed"
            )
        if schedule.change:
            self.say(f"change   {schedule.change}")

    def say_finished(self, first_step: int, ramp: RampupBatchManager) -> None:
        """Says that there is nothing to do."""
        self.say(
            f"{self.folder}: finished, {first_step} steps are done of {ramp.total_steps}; for "
            "a new run give another run_name, to go on more steps"
        )

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, kind, error, trace) -> None:
        self._display.close()
        for file in self._files:
            file.close()
        if self._files:
            draw_run(
                read_records(self.folder / "metrics.jsonl"),
                self.folder / "ramp.png",
                f"{self._config.run_name}: batch size and loss",
            )
            self.say(f"done     {self._display.summary()}")
            self.say(f"see      {self.folder}/ramp.png, metrics.jsonl, config.yml, plan.json")
