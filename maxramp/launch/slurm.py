"""A run under SLURM: a batch script, whose supervisor (`slurm_job`) submits it again.

The script lies in `{output folder}/slurm/`: it can be read, changed and submitted by hand.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

from maxramp.commandline import count, shell_quote
from maxramp.errors import ConfigError
from maxramp.launch.jobs import Run, write_private

_NAME = "job.sh"
_SCRIPT = """#!/usr/bin/env bash
# A job of a run, on any number of its nodes (sbatch --nodes=N). Written by maxramp.launch.
{options}

cd -- {directory} || exit 1
{setup}
exec {supervisor}
"""


def launch(run: Run, dry_run: bool) -> int:
    folder, script = run.folder / "slurm", batch_script(run)
    if dry_run:
        print(f"### {folder / _NAME}\n{script}\n### then\ncd {shell_quote([folder])}")
        for nodes in run.node_counts():
            line = f"sbatch --nodes={_node_range(run, nodes)} {_NAME}"
            print(f"{line}  # stage {run.stages_on(nodes)}")
        return 0
    if not shutil.which("sbatch"):
        raise ConfigError(
            "--cluster slurm: no sbatch on the path; launch where SLURM is installed, or use "
            "--cluster local, or --dry-run to see the script"
        )
    for job in _queued_jobs(folder):
        raise ConfigError(
            f"run_name={run.config.run.run_name}: job {job} of this run is in SLURM's queue; "
            f"scancel {job} ends it, another run_name starts another run"
        )
    write_private(folder, {_NAME: script}, mode=0o700)
    (folder / "lost_nodes").unlink(missing_ok=True)  # whoever launches again has seen to them
    job = submit(run, run.next_nodes)
    print(f"launch   job {job} submitted on {count(run.next_nodes, 'node')}")
    print(f"see      {folder}: the script, and the output of each job")
    return 0


def _queued_jobs(folder: pathlib.Path) -> list[str]:
    """Lists the jobs in SLURM's queue that were submitted from a folder."""
    refusal = "squeue cannot tell which jobs of this run there are"
    lines = _ask(refusal, "squeue", "-h", "-o", "%A|%Z").splitlines()
    jobs = (line.split("|", 1) for line in lines)
    return [job for job, path in jobs if os.path.realpath(path) == os.path.realpath(folder)]


def _ask(refusal: str, *words: str, cwd: pathlib.Path | None = None) -> str:
    """Returns what a command of SLURM's prints; raises a ConfigError if it fails."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.replace(f"{words[0]}: error:", "").split())
        raise ConfigError(f"{refusal}: {reason}")
    return done.stdout


def submit(run: Run, nodes: int, *options: str) -> str:
    """Submits the script on that many nodes, with options of sbatch; returns the job's number."""
    folder = run.folder / "slurm"
    words = ["sbatch", "--parsable", f"--nodes={_node_range(run, nodes)}", *options, _NAME]
    return _ask(f"sbatch refused {folder / _NAME}", *words, cwd=folder).strip().partition(";")[0]


def query(*words: str, cwd: str | None = None) -> list[str]:
    """Returns the words that a command of SLURM's prints; none if it fails."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    return done.stdout.split()


def hostnames(names: str = "") -> list[str]:
    """Lists the nodes of a text in SLURM's notation, such as n[0-3]."""
    return query("scontrol", "show", "hostnames", names) if names else []


def batch_script(run: Run) -> str:
    supervisor = [sys.executable, "-m", "maxramp.launch.slurm_job", *run.arguments]
    return _SCRIPT.format(
        options="\n".join(f"#SBATCH {option}" for option in _batch_options(run)),
        directory=shell_quote([pathlib.Path.cwd()]),
        setup="\n".join(run.config.launch.setup_lines),
        supervisor=shell_quote(supervisor),
    )


def _node_range(run: Run, nodes: int) -> str:
    """Returns the value of --nodes of a job that has its stage on `nodes`."""
    return f"{run.fewest_within(nodes)}-{nodes}" if run.config.launch.elastic else f"{nodes}"


def _batch_options(run: Run) -> list[str]:
    """Lists options of sbatch. Its own reading of quotes is not a shell's: nothing needs any."""
    keys = run.config.launch
    if set(str(run.folder)) & {"%", "\\"}:
        raise ConfigError(
            f"{run.folder}: SLURM reads % and \\ in the path of a job's output as its own signs; "
            "take another run_name or base_output_directory"
        )
    tasks = [f"--ntasks-per-node={keys.processes_per_node}"]
    if keys.elastic:  # with a number of tasks, SLURM gives the nodes that the fewest of them need
        tasks = ["--no-kill", f"--mincpus={keys.processes_per_node}"]
    options = [
        f"--job-name={re.sub(r'[^A-Za-z0-9._-]+', '-', run.config.run.run_name)}",
        f"--nodes={_node_range(run, run.next_nodes)}",
        *tasks,
        f"--signal=TERM@{keys.grace_seconds}",  # to the trainer, which saves and exits with 76
        "--output=%j.log",
        "--open-mode=append",
        "--requeue",  # when a node fails; the same script continues from the newest checkpoint
    ]
    for name in ("account", "partition", "qos", "time"):
        value = getattr(keys, f"slurm_{name}")
        options += [f"--{name}={value}"] if value else []
    return [*options, *keys.slurm_options]
