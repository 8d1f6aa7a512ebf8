"""What a launch starts: a run's jobs by its plan, the same for every cluster."""

import dataclasses
import pathlib
import sys
from collections.abc import Mapping, Sequence

from maxramp.checkpoints import folder as folder_lib
from maxramp.commandline import count, print_note, print_progress, show_keys
from maxramp.config.keys import Config
from maxramp.config.resolve import meshes_of, resolve
from maxramp.errors import ConfigError
from maxramp.files.place import Place, is_near
from maxramp.keys.section import refuse
from maxramp.planning.run_length import with_length
from maxramp.planning.stages import PlannedRun
from maxramp.processes.agreement import VARIABLE
from maxramp.rampup import layout
from maxramp.rampup.schedule import RampupBatchManager, Stage
from maxramp.run.job_schedule import resume_point

# What a launched trainer gets whatever the command line says. The lines of setup are the job's: the
# trainer would copy them, and the passwords in them, to its config.yml and checkpoints.
TRAINER_KEYS = {"stop_at_node_change": True, "setup_lines": []}


@dataclasses.dataclass(frozen=True)
class Run:
    """A run that is to be launched."""

    config: Config  # loaded, with `num_nodes`, `devices_per_node` and `run_name` filled in
    module: str  # the program that the config is for
    arguments: tuple[str, ...]  # its command line
    folder: Place  # the run's output folder, on a disk or in an object storage
    ramp: RampupBatchManager  # as planned, each stage on its nodes
    stages: tuple[Stage, ...]  # the plan's, from where the run stands to its end
    first_step: int  # that the next job trains: after the newest checkpoint
    next_nodes: int  # of the stage that this step is in
    nodes_per_slice: int = 1  # nodes that come and go together

    @classmethod
    def from_config(cls, config: Config, arguments: Sequence[str], dry_run: bool = False) -> "Run":
        """Plans the run of a config that was loaded from a command line's arguments; a ConfigError
        if no jobs can train it. A dry run does not ask an object storage where the run stands.
        """
        config = config.replace(run_name=config.run.run_name or config.run.model_name)
        config = with_length(config, print_progress)
        processes, devices = config.launch.processes_per_node, config.batch.devices_per_node
        trainer_keys = {"num_nodes": config.batch.num_nodes, "devices_per_node": devices}
        trainer_keys |= TRAINER_KEYS
        refuse(
            [
                (
                    processes not in (1, devices),
                    f"processes_per_node={processes} must be 1, or devices_per_node={devices} for "
                    "one process a device",
                ),
                (
                    not config.checkpoints.enable_checkpointing,
                    "enable_checkpointing=False: a launch hands the run on from job to job by its "
                    "checkpoints; enable checkpointing",
                ),
            ]
        )
        folder = config.run.folder.absolute()
        position = None
        if dry_run and not is_near(folder):
            print_note(f"{folder} is not read: these are the jobs of a new run")
        else:
            position = folder_lib.newest(folder / "checkpoints")[0]
        planned = PlannedRun.from_config(
            config, meshes_of(config), lambda batch: resume_point(batch, position)
        )
        for nodes in {stage.nodes for stage in planned.stages}:
            resolve(config, nodes * devices)
        if config.launch.elastic:
            _check_elastic(planned)
        first_step = position.step if position else 0
        others = [word for word in arguments if word.partition("=")[0] not in trainer_keys]
        return cls(
            config=config,
            module=f"maxramp.{config.run.program or 'train'}",
            arguments=(*others, *(f"{name}={value}" for name, value in trainer_keys.items())),
            folder=folder,
            ramp=planned.ramp,
            stages=planned.stages,
            first_step=first_step,
            next_nodes=planned.ramp.stage_at_step(first_step).nodes,
        )

    def reload(self) -> "Run":
        """Plans the run anew, from where it stands now; raises as `from_config`."""
        run = Run.from_config(self.config, self.arguments)
        return dataclasses.replace(run, nodes_per_slice=self.nodes_per_slice)

    def fit(self, step: int, available: int) -> int:
        """Returns the most of the available nodes that the stage of a step can run on; the fewest
        that it can, if these are too few. A step before the newest checkpoint counts as that one.
        """
        choices = self.node_choices(self.ramp.stage_at_step(max(step, self.first_step)))
        return next((nodes for nodes in choices if nodes <= available), choices[-1])

    def refusal(self, step: int, nodes: int, available: int) -> str:
        """Returns why the stage of a step, planned for more, runs on `nodes` of the available ones,
        and the keys that let it run on all; "" if it runs on as many as it can have.
        """
        stage = self.ramp.stage_at_step(max(step, self.first_step))
        per_node, most = self.config.batch.devices_per_node, min(available, stage.nodes)
        if nodes >= most:
            return ""

        def error_of(config: Config) -> str:
            try:
                batch = resolve(config, most * per_node).batch
            except ConfigError as error:
                return str(error)
            if layout.spread(batch, stage.threshold, most, most * per_node):
                return ""
            return str(layout.refusal(batch, stage.index, stage.threshold, most * per_node))

        copies = {"ici_data_parallelism": -1, "ici_fsdp_parallelism": per_node}
        works = not error_of(self.config.replace(**copies))
        return error_of(self.config) + (f"; {show_keys(copies)} lets it run on {most}" * works)

    def node_choices(self, stage: Stage) -> list[int]:
        """Lists the numbers of nodes that a planned stage can run on, in falling order: the planned
        one first; the others are those that an elastic run takes instead when nodes are lost."""
        choices, nodes = [stage.nodes], stage.nodes
        while self.config.launch.elastic:
            fewer = self.ramp.fit(stage, nodes - 1).nodes
            if fewer >= nodes:
                break
            nodes = fewer
            choices += [nodes] if nodes % self.nodes_per_slice == 0 else []
        return choices

    def node_counts(self) -> list[int]:
        """Lists the numbers of nodes of all possible jobs, in the order of the plan."""
        choices = [nodes for stage in self.stages for nodes in self.node_choices(stage)]
        return list(dict.fromkeys([*choices, self.next_nodes]))

    def stages_on(self, nodes: int) -> str:
        """Says which jobs run on that many nodes: "stage 0, 1, 2" as planned, or after a loss."""
        planned = [str(stage.index) for stage in self.stages if stage.nodes == nodes]
        return f"stage {', '.join(planned)}" if planned else "if nodes are lost"

    def processes(self, nodes: int) -> int:
        return nodes * self.config.launch.processes_per_node

    def command(self, python: str = sys.executable) -> list[str]:
        return [python, "-m", self.module, *self.arguments]

    def environment(self, nodes: int, coordinator: str, nodes_file: pathlib.Path) -> dict[str, str]:
        """Returns the variables by which processes of a job find each other and their devices; for
        those of an elastic run, `nodes_file` holds how many nodes it could have.
        """
        share = self.config.batch.devices_per_node // self.config.launch.processes_per_node
        variables = {
            "MAXRAMP_COORDINATOR": coordinator,
            "MAXRAMP_NUM_PROCESSES": str(self.processes(nodes)),
            "JAX_NUM_CPU_DEVICES": str(share),
        }
        return variables | ({VARIABLE: str(nodes_file)} if self.config.launch.elastic else {})


def _check_elastic(planned: PlannedRun) -> None:
    """Refuses an elastic run if none of its stages can lose a node."""
    batch, fit = planned.config.batch, planned.ramp.fit
    fixed = [stage for stage in planned.stages if fit(stage, stage.nodes - 1).nodes == stage.nodes]
    if len(fixed) < len(planned.stages):
        return
    nodes, size = fixed[0].nodes, fixed[0].global_batch_size
    why = (
        f"its batch of {size} rows divides over no fewer, down to min_nodes={batch.min_nodes}, on "
        "a mesh that its keys make there"
    )
    if nodes <= batch.min_nodes:
        why = f"and min_nodes={batch.min_nodes} allows no fewer"
    raise ConfigError(
        f"elastic=True: stage {fixed[0].index} takes {count(nodes, 'node')} of "
        f"{count(batch.devices_per_node, 'device')}, {why}; use a smaller min_nodes, batches that "
        "divide over fewer nodes, and axes of the mesh inside a node but for one that is -1 "
        "(ici_data_parallelism=-1)"
    )


def write_private(folder: pathlib.Path, files: Mapping[str, str], mode: int = 0o600) -> None:
    """Writes files, over older ones, that only their owner can read: setup_lines may hold
    passwords. A ConfigError if it cannot."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            path = folder / name
            path.touch(mode)
            path.chmod(mode)  # of one that was there already
            path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot write there: {error.strerror}") from None
