"""The output folder of a run, and its log."""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import platform
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from maxramp.commandline import count
from maxramp.data.corpus import Corpus
from maxramp.errors import ConfigError, exit_status
from maxramp.files.place import write_whole
from maxramp.files.run_folder import claim_folder, join_folder
from maxramp.keys.yamlfile import parse
from maxramp.model.adapters import without_adapters
from maxramp.model.decoder import num_active_parameters, num_parameters
from maxramp.model.parts import grouped
from maxramp.model.parts.attention import cost_of_packing, select_for
from maxramp.model.size import describe_weights
from maxramp.parallel.mesh import format_sizes, mesh_of
from maxramp.processes import agreement
from maxramp.rampup import ladder
from maxramp.rampup.adaptive import Decision
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.run.display import Display
from maxramp.run.job_schedule import JobSchedule
from maxramp.run.jobs import FILE as JOBS
from maxramp.run.jobs import Jobs, read_jobs
from maxramp.run.keys import RunKeys
from maxramp.run.metrics import Record, batch_record, cut_records, read_last, read_records
from maxramp.run.picture import draw_run
from maxramp.run.writers import EventWriter, JsonlWriter, WandbWriter, tensorboard_writers
from maxramp.training.keys import LearningRateKeys, Recipe
from maxramp.training.state import TrainState, num_trained

_SHARED_SECONDS = 10.0  # that a network file system may need to show one host's file to another
# The files that a start overwrites or cuts.
_OVERWRITTEN = "plan.json", "next_stage.json", "metrics.jsonl", "ramp.png", "experts.png", JOBS
_CONFIGS = ("config.yml", "config.resolved.yml")  # the second where the first is a person's
_HEADER = b"# Written by maxramp; the next start replaces this file unless you edit it (%08x)."


class Output:
    """`{base_output_directory}/{run_name}/` and the display, written by the first process alone.

    Use it as a context: on the way out, however the run ended, it closes the files, draws ramp.png
    (of experts experts.png, too) and prints the closing line.
    """

    def __init__(self, keys: RunKeys, rate_keys: LearningRateKeys, config_text: str):
        """Claims the folder, on all processes; a ConfigError if it is in use, not a run's or not
        shared, or cannot be written. All keys are resolved; `config_text` has them, for config.yml.
        """
        self._keys, self._rate_keys, self._config_text = keys, rate_keys, config_text
        self._is_first = jax.process_index() == 0
        self.folder = keys.folder
        agreement.raise_everywhere(self._claim_folder)
        if jax.process_count() > 1:
            self._check_shared()
        self._display = Display(keys.log_period, quiet=not self._is_first)
        self._writers: list[JsonlWriter | EventWriter | WandbWriter] = []
        self.jobs, self.status = Jobs(self.local), 0  # with which the job ends, unless by an error

    def _claim_folder(self) -> None:
        """Claims the run's folder, on the first process, or joins it; a ConfigError if it is not a
        run's, is another run's by now, or cannot be written."""
        try:
            if not self._is_first:
                self.files = join_folder(self.folder, self.warn)
                self.local = self.files.local
                return
            strange = [name for name in _OVERWRITTEN if (self.folder / name).exists()]
            if strange and not (self.folder / "checkpoints").exists():
                raise ConfigError(
                    f"run_name={self._keys.run_name}: {self.folder} is not the folder of a run but "
                    f"holds {', '.join(strange)}, which a run would overwrite; move them away, or "
                    "take another run_name"
                )
            now = datetime.datetime.now().isoformat(" ", "seconds")
            owner = f"process {os.getpid()} on {platform.node()} since {now}"
            self.files = claim_folder(self.folder, owner, self.warn)
            self.local = self.files.local
            for name in ("metrics.jsonl", "plan.json"):
                if (self.local / name).exists():
                    (self.local / name).open("a").close()
            is_foreign = (self.local / "config.yml").exists() and not _is_our_config(self.local)
            self._config_file = self.local / _CONFIGS[is_foreign]
        except BlockingIOError as error:
            raise ConfigError(
                f"run_name={self._keys.run_name}: {self.folder} is in use by {error}; wait until "
                "it ends, or take another run_name"
            ) from None
        except OSError as error:
            raise self._refusal(error) from None

    def _refusal(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"base_output_directory={self._keys.base_output_directory}: cannot write to "
            f"{getattr(error, 'filename', None) or self.folder}: "
            f"{getattr(error, 'strerror', None) or error}"
        )

    @contextlib.contextmanager
    def _warn_of_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.warn(str(self._refusal(error)))

    def _check_shared(self) -> None:
        """Refuses a folder in which a process does not see what the first one wrote; all processes
        call it together, and may wait for 10 seconds."""
        mark = self.folder / ".shared"
        number = str(agreement.all_gather_json(int.from_bytes(os.urandom(3)))[0]).encode()
        if self._is_first:
            write_whole(mark, number)
        deadline, seen = time.monotonic() + _SHARED_SECONDS, False
        while not seen and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                seen = mark.read_bytes() == number
            time.sleep(0.0 if seen else 0.2)
        blind = [str(i) for i, sees in enumerate(agreement.all_gather_json(seen)) if not sees]
        if self._is_first:
            mark.unlink(missing_ok=True)
        if blind:
            raise ConfigError(
                f"base_output_directory={self._keys.base_output_directory}: not the same folder "
                f"on every host: process {', '.join(blind[:8])} of {jax.process_count()} "
                f"does not see what process 0 wrote to {self.folder}; give one that all hosts share"
            )

    def count_recorded_steps(self) -> int:
        """Counts the steps up to the last record of metrics.jsonl; the same on every process."""
        path = self.local / "metrics.jsonl"
        return agreement.decide_on_first(lambda: read_last(path).get("step", -1) + 1)

    def begin_job(self, schedule: JobSchedule) -> None:
        """Writes down that a job begins, once where the run stands is known; called on all
        processes, with a ConfigError on all if the folder cannot be written."""
        stage = schedule.ramp.stage_at_step(schedule.first_step)
        origin = schedule.position.kind if schedule.position else "new"

        def begin() -> None:
            try:
                file = self.jobs.begin(schedule.first_step, stage.nodes, stage.devices, origin)
            except OSError as error:
                raise self._refusal(error) from None
            self.files.record_files.append(file)

        agreement.raise_everywhere(lambda: self._is_first and begin())

    def open_files(
        self, ramp: RampupBatchManager, first_step: int, pending: Sequence[str] = ()
    ) -> list[Callable[[Record], None]]:
        """Writes config.yml and plan.json; returns what a record goes to, on the first process.

        Called on all when nothing can be refused any more: metrics of an earlier start are cut back
        to the first `first_step` steps, and what is cut off goes to metrics.dropped.jsonl, with the
        `pending` evaluations of the last of them, which come again.
        """
        agreement.raise_everywhere(
            lambda: self._is_first and self._open_files(ramp, first_step, pending)
        )
        if not self._is_first:
            return []
        self._display.follow(ramp)
        return [*self._writers, self._display]

    def _open_files(
        self, ramp: RampupBatchManager, first_step: int, pending: Sequence[str]
    ) -> None:
        """Writes config and plan and opens the writers, on the first process; drops records of
        steps after `first_step`. A ConfigError if the folder cannot be written, or if wandb fails
        at a run's first start."""
        try:
            config = self._config_text.encode()
            write_whole(self._config_file, _header(config) + b"\n" + config)
            _write_json(self.local / "plan.json", self._plan(ramp))
            (self.local / "next_stage.json").unlink(missing_ok=True)
            if dropped := cut_records(self.local / "metrics.jsonl", first_step, pending):
                self.say(
                    f"resume   dropped {count(dropped, 'step')} after the last checkpoint (now in "
                    "metrics.dropped.jsonl)"
                )
            files = [JsonlWriter(self.local / "metrics.jsonl")]
            if self._keys.enable_tensorboard:
                first_sample = ramp.samples_before(first_step)
                files += tensorboard_writers(self.local / "tensorboard", first_step, first_sample)
            self._writers = files
            self.files.record_files += files
            if project := self._keys.wandb_project:
                config = parse(self._config_text)
                try:
                    self._writers = [*files, WandbWriter(project, self.local, config, self.warn)]
                except ConfigError as error:
                    if not first_step:
                        raise
                    self.warn(f"{error}; the run continues without it")
        except OSError as error:
            raise self._refusal(error) from None

    def write_decision(self, decision: Decision, ramp: RampupBatchManager) -> None:
        """Writes the plan that follows from a decision, and says what decided; called on all."""
        self._display.follow(ramp)
        if not self._is_first:
            return
        with self._warn_of_errors():  # the checkpoint says the same
            _write_json(self.local / "plan.json", self._plan(ramp))
        why = "its latest sample is reached"
        if decision.lower is not None:
            why = f"the noise scale asks for {decision.lower:.4g} rows or more"
        stage = ramp.stages[0]
        self.say(
            f"ramp     batch {stage.global_batch_size} from step {stage.first_step} (sample "
            f"{stage.first_sample:,}) on: {why}"
        )

    def _plan(self, ramp: RampupBatchManager) -> dict[str, Any]:
        """Returns the stages, and the nodes of the jobs so far: a step ran in the last job that
        began with it or before it. For a ramp that is decided, also the fixed one that repeats it.
        """
        names = ("first_step", "nodes", "devices")
        starts = [job for job in read_jobs(self.local) if job["event"] == "start"]
        plan = ramp.to_json() | {"jobs": [{name: job[name] for name in names} for job in starts]}
        fixed = ladder.fixed_ramp(ramp.keys, plan["stages"])
        if not fixed:
            return plan
        scaling = ("batch_size_lr_scaling", "batch_size_lr_reference")
        fixed |= {name: getattr(self._rate_keys, name) for name in scaling}
        return plan | {"as_fixed_ramp": fixed}

    def write_next_stage(self, schedule: JobSchedule) -> None:
        """Writes next_stage.json, for whoever starts the next job."""
        if not self._is_first:
            return
        stage = schedule.following
        following = batch_record(stage, schedule.ramp.samples_before(schedule.last_step))
        with self._warn_of_errors():  # the next start plans the same
            _write_json(self.local / "next_stage.json", following)
        size, nodes = stage.global_batch_size, count(stage.nodes, "node")
        what = f"the next stage has a global batch of {size}"
        if stage.first_step < schedule.last_step:
            what = f"stage {stage.index} continues with its global batch of {size}"
        per_node = stage.devices // stage.nodes
        line = f"{what}, planned for {nodes} of {per_node}"
        self.say(f"{line}; the next start continues there (next_stage.json)")

    def say(self, line: str) -> None:
        self._display.say(line)

    def warn(self, line: str) -> None:
        print(f"warning: {' '.join(line.splitlines())}", file=sys.stderr, flush=True)

    def say_start(
        self,
        corpus: Corpus,
        state: TrainState,
        recipe: Recipe,
        schedule: JobSchedule,
        changes: Sequence[str],
    ) -> None:
        ramp, mesh = schedule.ramp, mesh_of(state)
        # With those behind a ramp that was changed, as they are numbered.
        last_step = max(ramp.total_steps - 1, ramp.stages[0].first_step)
        stages = ramp.stage_at_step(last_step).index + 1
        tokens = " or ".join(map(str, ramp.sample_lengths))
        lines = [
            f"data     {corpus.description} (hash {corpus.hash})",
            f"model    {self._keys.model_name}: {_describe_weights(state, recipe)}, on "
            f"{count(mesh.size, f'{mesh.devices.flat[0].device_kind} device')}"
            + (f" (mesh {format_sizes(mesh.shape)})" if mesh.size > 1 else ""),
            f"run      {self.folder}: {ramp.total_steps:,} steps, {ramp.total_samples:,} "
            f"samples of {tokens} tokens in {count(stages, 'stage')}",
        ]
        platform = mesh.devices.flat[0].platform
        lengths = {stage.spec.row_length for stage in schedule.stages}
        models = (dataclasses.replace(recipe.model, max_target_length=n) for n in lengths)
        kernels = {select_for(model, platform) for model in models}
        costs = map(cost_of_packing, sorted(kernels) if corpus.packed else ())
        lines += [f"packing  {cost}" for cost in costs if cost]
        if kernel := grouped.select_for(recipe.model, platform):
            lines.append(f"experts  by grouped_matmul={kernel}")
        if ramp.keys.rampup_policy == "noise":
            rungs = ladder.rungs(ramp.keys, ramp.stages[0].global_batch_size)
            sizes = ", ".join(str(rung.global_batch_size) for rung in rungs)
            lines += [f"ramp     decided while the run trains: batch {sizes}"] if rungs else []
        lines += [f"ramp     {line}" for line in ramp.warnings]
        if schedule.first_step:
            lines.append(f"resume   {_describe_position(schedule, mesh.size)}")
        for line in (*lines, *changes):
            self.say(line)

    def say_stopped(self, step: int | None) -> None:
        if step is None:
            self.say("stopped by a signal before a step was done; the next start continues")
            return
        left = "not saved (enable_checkpointing=False); the next start begins at step 0"
        left = "saved; the next start continues" if self._keys.enable_checkpointing else left
        self.say(f"stopped by a signal after step {step}, {left}")

    def say_finished(self, schedule: JobSchedule, length: str) -> None:
        """Says that the run needs no further job, and draws the picture if the last job was killed
        before. `length` is the key that gives the run's, with its value. Only for a run that has a
        position."""
        state, where, key = schedule.position.path, self.folder, length.partition("=")[0]
        rest = f"for a new run give another run_name, to continue a larger {key}"
        if state.parent != where / "checkpoints":
            where = state
            rest = (
                f"there is nothing to train or export in {self.folder}; to continue give a larger "
                f"{key}, to export that state maxramp.convert"
            )
        done = f"{schedule.first_step} steps are done of {schedule.ramp.total_steps} ({length})"
        self.say(f"{where}: finished, {done}; {rest}")
        files = [self.local / name for name in ("metrics.jsonl", "ramp.png")]
        if self._is_first and [file.exists() for file in files] == [True, False]:
            with self._warn_of_errors():
                self._draw()

    def __enter__(self) -> "Output":
        return self

    def __exit__(self, kind, error, trace) -> None:
        if self._writers:
            for end in (*(writer.close for writer in self._writers), self._draw):
                with self._warn_of_errors():
                    end()
            self.say(self._display.summary())
            names = "ramp.png", "experts.png", "metrics.jsonl", self._config_file.name, "plan.json"
            written = [name for name in names if (self.local / name).exists()]
        with self._warn_of_errors():
            self.jobs.end(exit_status(error) if error else self.status)
        self.files.close()  # of a run in a storage, this removes what is here
        if self._writers:
            self.say(f"see      {self.folder}/{', '.join(written)}")

    def _draw(self) -> None:
        draw_run(read_records(self.local / "metrics.jsonl"), self.local, self._keys.run_name)


def _describe_position(schedule: JobSchedule, num_devices: int) -> str:
    position, step = schedule.position, schedule.first_step
    kind = "" if position.kind == "checkpoint" else f" ({position.kind})"
    trained = [stage for stage in position.stages if stage["first_step"] < step]
    before = trained[-1].get("devices", num_devices) if trained else num_devices
    consumed = f"{schedule.ramp.samples_before(step):,} samples consumed"
    if before != num_devices:
        consumed += f", on {count(num_devices, 'device')} in place of {before}"
    return f"from step {step}{kind}, {consumed}"


def _describe_weights(state: TrainState, recipe: Recipe) -> str:
    kept, used = recipe.model.weight_dtype, recipe.model.dtype
    model = without_adapters(state.model)
    text = describe_weights(num_parameters(model), num_active_parameters(model, recipe.model))
    text += f", {used}" if kept == used else f" in {kept}, computed in {used}"
    trained = num_trained(state.trained, recipe.optimizer.trainable_layers)
    if trained < num_parameters(state.model):
        text += f"; {trained:,} of {'adapters' if recipe.model.lora_rank else 'them'} train"
    return text


def _is_our_config(folder: pathlib.Path) -> bool:
    """Tells whether config.yml is as a run wrote it, down to the last byte."""
    header, _, text = (folder / "config.yml").read_bytes().partition(b"\n")
    return header == _header(text)


def _header(text: bytes) -> bytes:
    return _HEADER % zlib.crc32(text)


def _write_json(path: pathlib.Path, values: dict[str, Any]) -> None:
    write_whole(path, (json.dumps(values, indent=2) + "\n").encode())
