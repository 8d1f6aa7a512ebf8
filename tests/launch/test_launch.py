"""Launches on this machine: real processes that grow, die and are stopped; and what is refused."""

import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys

import pytest
from conftest import BASE, TINY, check_refusal, command, complete, environment, run, steps_of, table
from in_process import run_here
from jobs import wait_until

from maxramp.checkpoints.folder import Checkpoint, commit
from maxramp.config.load import load
from maxramp.errors import EXIT_PREEMPTED, ConfigError
from maxramp.launch import slurm
from maxramp.launch.__main__ import main
from maxramp.launch.jobs import Run
from maxramp.processes import bound

# 2, 4 and 8 rows a step, two a device: 1, 2 and 4 nodes. 20 + 20 + 10 steps.
GROWING = [
    *TINY,
    *("hardware=cpu", "num_nodes=4", "devices_per_node=1", "per_device_batch_size=2"),
    "step_batch_size_schedule=0:2 40:4 120:8",
    *("step_batch_size_unit=samples", "steps=50", "checkpoint_period=5", "eval_interval=-1"),
    *("log_period=5", "join_timeout_seconds=60", "restart_minutes=0", "dataset_type=synthetic"),
    "enable_data_shuffling=False",  # rows by their number alone
]
NASTY = """a run $(touch pwned) `touch pwned` 'single' "double" $HOME; touch pwned #"""


def arguments(folder: pathlib.Path, cache_dir: str, *more: str) -> list[str]:
    words = [*GROWING, f"jax_cache_dir={cache_dir}", f"base_output_directory={folder}", *more]
    return [BASE, *words]


def plan(folder: pathlib.Path, *more: str) -> Run:
    line = arguments(folder, "", *more)
    return Run.from_config(load(line), line)


def rows_of(folder: pathlib.Path) -> list[tuple]:
    return [
        (r["step"], r["global_batch_size"], r["consumed_samples"], r["batch_fingerprint"])
        for r in steps_of(folder)
    ]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, cache_dir) -> pathlib.Path:
    """The same run in one process on one device."""
    folder = tmp_path_factory.mktemp("one")
    complete(*arguments(folder, cache_dir, "run_name=one"))
    return folder / "one"


class Launched:
    """A launch in work."""

    def __init__(self, line: list[str], folder: pathlib.Path, cluster: str = "local"):
        self.folder, self.line = folder, line
        self.log = (folder.parent / f"{folder.name}.log").open("a+")
        self.process = subprocess.Popen(
            command(*line, "--cluster", cluster, module="launch"),
            cwd=folder.parent,
            env=environment(),
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def trainers(self) -> list[int]:
        """Lists the process ids of the run's trainers, whoever their parent is."""
        trainers = []
        for path in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                words = (path / "cmdline").read_bytes().split(b"\0")
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            ours = any(str(self.folder.parent).encode() in word for word in words)
            if ours and b"maxramp.train" in words and bound.__file__.encode() not in words:
                trainers += [int(path.name)] if state != "Z" else []
        return trainers

    def wait_for(self, step: int, trainers: int = 1) -> list[int]:
        """Waits until that step is logged and that many trainers run; returns them."""

        def is_reached() -> bool:
            assert self.process.poll() is None, self.text()
            steps = [record["step"] for record in steps_of(self.folder)]
            return max(steps, default=-1) >= step and len(self.trainers()) == trainers

        wait_until(is_reached, 300)
        return self.trainers()

    def text(self) -> str:
        self.log.flush()
        return pathlib.Path(self.log.name).read_text()

    def end(self, timeout: float = 300) -> int:
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()


def gone(launched: Launched) -> bool:
    """Waits until no trainer is left."""
    wait_until(lambda: not launched.trainers(), 60)
    return True


@pytest.mark.slow
def test_a_run_grows_from_job_to_job_and_survives_a_kill(uninterrupted, tmp_path, cache_dir):
    """1, 2, 4 processes; one of two is killed in mid-stage: the rows are those of one process."""
    launched = Launched(arguments(tmp_path, cache_dir, f"run_name={NASTY}"), tmp_path / NASTY)
    victims = launched.wait_for(21, trainers=2)
    os.kill(random.Random(3).choice(victims), signal.SIGKILL)
    assert launched.end() == 0, launched.text()
    text = launched.text()
    jobs = [line.split()[1] for line in text.splitlines() if line.startswith("launch   ")]
    assert jobs == ["1", "2", "exit", "2", "4"], text
    assert "[Gloo]" not in text
    assert rows_of(tmp_path / NASTY) == rows_of(uninterrupted)
    assert gone(launched)
    assert not list(tmp_path.rglob("pwned")) and not pathlib.Path("pwned").exists()


@pytest.mark.long
def test_a_stopped_run_continues(uninterrupted, tmp_path, cache_dir):
    """A SIGTERM to one trainer restarts the job; Ctrl-C saves and ends all of it."""
    line = arguments(tmp_path, cache_dir, "run_name=stopped", "num_nodes=2", "steps=5000")
    launched = Launched(line, tmp_path / "stopped")
    os.kill(launched.wait_for(21, trainers=2)[1], signal.SIGTERM)
    stopped_at = launched.text().count("stopped by a signal")
    step = steps_of(launched.folder)[-1]["step"]
    launched.wait_for(step + 10, trainers=2)
    launched.process.send_signal(signal.SIGINT)
    assert launched.end() == EXIT_PREEMPTED, launched.text()
    assert stopped_at <= 1 and launched.text().count("stopped by a signal") == 2
    assert gone(launched)
    done = steps_of(launched.folder)[-1]["step"] + 1
    assert (launched.folder / "checkpoints" / str(done)).is_dir()
    rows = rows_of(launched.folder)[:40]  # as long as both have the same batch sizes
    assert rows == rows_of(uninterrupted)[: len(rows)] and len(rows) > 30


@pytest.mark.slow
def test_no_trainer_outlives_a_killed_launcher(tmp_path, cache_dir):
    line = arguments(tmp_path, cache_dir, "run_name=orphans", "num_nodes=2", "steps=5000")
    launched = Launched(line, tmp_path / "orphans")
    launched.wait_for(1, trainers=2)
    launched.process.kill()
    launched.end()
    assert gone(launched)


def test_a_batch_script_passes_every_argument_as_it_is(tmp_path):
    launch = plan(tmp_path, f"run_name={NASTY}", 'setup_lines=["export A=1"]')
    script = slurm.batch_script(launch)
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    (line,) = [x for x in script.splitlines() if x.startswith("exec ")]
    program = line.replace("exec ", "printf '%s\\0' ", 1)
    words = subprocess.check_output(["bash", "-c", program], cwd=tmp_path, text=True).split("\0")
    assert words[:3] == [sys.executable, "-m", "maxramp.launch.slurm"]
    assert words[3:-1] == launch.command()[3:]
    assert not list(tmp_path.rglob("pwned"))
    options = [x for x in script.splitlines() if x.startswith("#SBATCH")]
    assert "#SBATCH --nodes=1" in options and all("touch" not in x or "-" in x for x in options)
    assert "export A=1" in script.splitlines()


def test_trainers_run_in_the_container_of_either_runtime(tmp_path):
    keys = ["container_image=/images/a b.sqsh", "container_mounts=/data:/data", "run_name=x"]
    launch = plan(tmp_path, *keys)
    options = slurm.container_options(launch.config.launch)
    assert options[0] == "--container-image=/images/a b.sqsh"
    assert slurm.trainer_command(launch)[0] == "python"
    launch = plan(tmp_path, *keys, "container_runtime=apptainer")
    words = ["apptainer", "exec", "--nv", "--bind", "/data:/data", "/images/a b.sqsh", "python"]
    assert slurm.trainer_command(launch)[:7] == words
    assert slurm.container_options(launch.config.launch) == []


def dry_run(capsys, cluster: str, *line: str) -> str:
    assert main([*line, "--cluster", cluster, "--dry-run"]) == 0
    return capsys.readouterr().out


def test_a_dry_run_shows_every_job(tmp_path, capsys):
    line = arguments(tmp_path, "", "run_name=x")
    printed = dry_run(capsys, "slurm", *line)
    assert "#SBATCH --nodes=1\n" in printed
    for stage, nodes in enumerate((1, 2, 4)):
        assert f"\nsbatch --nodes={nodes} job.sh  # stage {stage}\n" in printed
    assert dry_run(capsys, "local", *line).count("-m maxramp.train") == 3
    assert not (tmp_path / "x").exists()
    printed = dry_run(capsys, "local", *line, "elastic=True", "step_batch_size_schedule=0:8")
    assert "4 processes (stage 0):" in printed and "1 process (if nodes are lost):" in printed
    open_length = ["steps=-1", "num_epoch=2", f"text_files={__file__}", "dataset_type=text"]
    assert "num_epoch=2" in dry_run(capsys, "local", *line, *open_length)


def saved_at(folder: pathlib.Path, step: int, consumed: int, stages: list[dict]) -> None:
    """Writes a checkpoint as far as a launcher reads it."""
    path = folder / "checkpoints" / str(step)
    path.mkdir(parents=True)
    commit(Checkpoint(path, step, consumed, stages, "", {}, {}))


def test_a_job_takes_its_nodes_from_the_plan_of_the_whole_run(tmp_path):
    """8 rows alone would take 4 nodes; the run stays on 2, where a restart does not pay."""
    launch = plan(tmp_path, "run_name=x", "restart_minutes=10")
    assert [stage.nodes for stage in launch.stages] == [2, 2, 2] and launch.next_nodes == 2
    saved_at(tmp_path / "x", 45, 160, [stage.to_json() for stage in launch.stages])
    assert launch.reload().next_nodes == 2
    assert plan(tmp_path, "run_name=y", "step_batch_size_schedule=0:8").next_nodes == 4


def test_the_number_of_a_stage_survives_a_changed_ramp(tmp_path):
    stages = [stage.to_json() for stage in plan(tmp_path, "run_name=x").stages]
    saved_at(tmp_path / "x", 30, 80, stages)  # in stage 1, of 4 rows
    launch = plan(tmp_path, "run_name=x", "step_batch_size_schedule=0:4 200:8")
    assert [(s.index, s.first_sample, s.nodes) for s in launch.stages] == [(1, 80, 2)]
    assert launch.next_nodes == launch.fit(0, 4) == 2


SLURM = ["--cluster", "slurm"]
DATA = ["ici_data_parallelism=-1", "ici_fsdp_parallelism=1"]
GKE = [
    *("--cluster", "gke", "container_image=a", "gke_accelerator=nvidia-h200-141gb", "gke_bucket=b"),
    *("base_output_directory=/mnt/shared/r", "devices_per_node=8"),
    "step_batch_size_schedule=0:16 800:64",
]
TPU = [*GKE, "gke_accelerator=tpu-v5p-slice", "devices_per_node=4", "--dry-run"]
REFUSED = table("""
steps=50 | --cluster
--cluster nomad | --cluster | nomad | slurm
SLURM | no sbatch on the path | --dry-run
GKE | no kubectl on the path | --dry-run
SLURM devices_per_node=-1 | devices_per_node=-1
SLURM node_schedule=fixed num_nodes=3 DATA | stage 0 | global batch of 2 | does not divide
SLURM processes_per_node=3 devices_per_node=8 num_nodes=1 | processes_per_node=3 | \
    devices_per_node=8
SLURM enable_checkpointing=False | enable_checkpointing=False
SLURM 'slurm_account=a; id' | slurm_account=a; id
SLURM 'slurm_options=["--x y"]' | slurm_options | --x y
SLURM 'slurm_options=[3]' | slurm_options | 3
SLURM 'setup_lines=[3]' | setup_lines | 3
SLURM base_output_directory=gs://b/runs | base_output_directory=gs://b/runs | slurm | mount
SLURM run_name=50% | 50% | run_name
SLURM container_runtime=docker | container_runtime=docker | apptainer
SLURM ici_fsdp_parallelism=3 | ici_fsdp_parallelism=3 | mesh of 4
SLURM grace_seconds=0 | grace_seconds=0
GKE container_image= | container_image is not given; needed by --cluster gke
GKE gke_accelerator= container_image= devices_per_node=-1 gke_volume_claim=c | \
    container_image, gke_accelerator, devices_per_node are not given | gke_volume_claim=c
GKE devices_per_node=-1 compile_topology=h200:3x8 num_nodes=4 | 24 devices, which num_nodes=4
GKE base_output_directory=/elsewhere | base_output_directory=/elsewhere | gke_mount_path=/mnt/shared
GKE 'gke_namespace=A b' | gke_namespace=A b
GKE processes_per_node=8 | processes_per_node=8
TPU gke_accelerator=tpu-v9 | tpu-v9 | tpu-v5p-slice
TPU | gke_topology | tpu-v5p-slice
TPU gke_topology=3x3x3 | v5p:3x3x3
TPU gke_topology=2x2x4 num_nodes=-1 devices_per_node=-1 compile_topology=v5p-16 | \
    2 nodes of 4 chips | gke_topology=2x2x4 | 16
""")
REFUSED.append(["SLURM 'slurm_time=1\n#SBATCH --uid=0'", "slurm_time=1"])
NAMED = {"SLURM": SLURM, "DATA": DATA, "GKE": GKE, "TPU": TPU}


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_what_cannot_be_launched_is_refused_in_one_line(case, tmp_path):
    line, *parts = case
    line = [word for name in shlex.split(line) for word in NAMED.get(name, [name])]
    line.sort(key=lambda word: word.startswith("--") or "=" not in word)  # flags come last
    words = arguments(tmp_path / "out", "", *line)
    path = {"PATH": str(tmp_path)}
    check_refusal(run_here(*words, module="launch.__main__", environment=path), *parts)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_asks_no_storage(capsys):
    """It shows the jobs of a run that begins, though nobody here can read the bucket."""
    line = [*arguments(pathlib.Path("x"), "x"), "base_output_directory=gs://nobody/runs"]
    assert main([*line, "--cluster", "local", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("process") == 3
    note = "gs://nobody/runs/default is not read: these are the jobs of a new run"
    assert printed.err == f"note: {note}\n"


def test_jobs_run_the_program_that_a_config_is_for(tmp_path, capsys):
    """Any other command refuses the config."""
    line = [*arguments(tmp_path, ""), "program=grpo", "max_completion_length=8"]
    assert dry_run(capsys, "local", *line).count("-m maxramp.grpo") == 3
    assert "program=grpo" in dry_run(capsys, "slurm", *line)
    with pytest.raises(ConfigError, match=r"program=grpo: this config is for maxramp\.grpo"):
        load(line, "train")
    assert load(line, "grpo").run.program == "grpo"
    assert load([BASE], "grpo").run.program == "grpo"
    fitted = run(*line, "--fit", module="plan")
    assert fitted.returncode == 2
    assert "only the steps of maxramp.train are compiled" in fitted.stderr
