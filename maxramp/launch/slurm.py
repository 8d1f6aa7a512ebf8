"""A run under SLURM: a batch script for every number of nodes, whose supervisor (`slurm_job`)
submits the next one.

The scripts lie in `{output folder}/slurm/`: they can be read, changed and submitted by hand.
`chain.jsonl` beside them says what ran.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Any

from maxramp.commandline import count, print_table, shell_quote
from maxramp.errors import EXIT_CONFIG, EXIT_PREEMPTED, EXIT_STAGE_END, ConfigError
from maxramp.launch.jobs import Run, write_private
from maxramp.launch.keys import LaunchKeys

CHAIN = "chain.jsonl"
_SCRIPT = """#!/usr/bin/env bash
# Stage {stages} of a run, on {nodes} of its nodes. Written by maxramp.launch.
{options}

cd -- {directory} || exit 1
{setup}
exec {supervisor}
"""


def submit(run: Run, dry_run: bool) -> int:
    scripts = {f"{nodes}-nodes.sh": script(run, nodes) for nodes in run.all_node_counts()}
    first, folder = f"{run.next_nodes}-nodes.sh", run.folder / "slurm"
    if dry_run:
        for name, text in scripts.items():
            print(f"### {folder / name}\n{text}")
        print(f"### then\ncd {shell_quote([folder])} && sbatch {first}")
        return 0
    if not shutil.which("sbatch"):
        raise ConfigError(
            "--cluster slurm: no sbatch on the path; launch where SLURM is installed, or use "
            "--cluster local, or --dry-run to see the scripts"
        )
    for job in _queue(folder):
        raise ConfigError(
            f"run_name={run.config.run.run_name}: job {job} of this run is in SLURM's queue; "
            f"scancel {job} ends it, another run_name starts another run"
        )
    write_private(folder, scripts, mode=0o700)
    (folder / "lost_nodes").unlink(missing_ok=True)  # whoever launches again has seen to them
    job = submit_script(folder, first)
    print(f"launch   job {job} submitted on {count(run.next_nodes, 'node')}")
    print(
        f"see      {folder}: the scripts, the jobs' output, chain.jsonl; --status shows the chain"
    )
    return 0


_ENDS = {
    0: "finished",
    EXIT_CONFIG: "configuration is wrong",
    EXIT_STAGE_END: "stage ended",
    EXIT_PREEMPTED: "stopped",
}


def print_status(run: Run) -> int:
    """The oldest job first, those that have not started last."""
    chain = run.folder / "slurm" / CHAIN
    starts: list[list[dict[str, Any]]] = []  # each, and what came then
    for line in chain.read_bytes().splitlines() if chain.exists() else ():
        with contextlib.suppress(ValueError):  # torn, by a full disk or a node that died
            event = json.loads(line)
            if event["event"] == "start":
                starts.append([event])
            elif starts and event["job"] == starts[-1][0]["job"]:
                starts[-1].append(event)
    queue = _queue(chain.parent)
    now, rows, done = samples_done(run.folder), [], 0
    for place, (start, *later) in enumerate(starts):
        job, state = start["job"], "gone: killed with its node or by hand"
        if job not in (following["job"] for following, *_ in starts[place + 1 :]):
            _, state = queue.pop(job, (0, state))
        reached, ran_for = max(start["samples"], now), ""
        for end in later:
            reached, ran_for = end["samples"], f"{end['time'] - start['time']} s"
            ended = _ENDS.get(end["status"], f"crashed, exit status {end['status']}")
            state = ended if end["event"] == "end" else end["event"]
        since = time.strftime("%m-%d %H:%M:%S", time.localtime(start["time"]))
        cells = (f"{start['samples']:,} - {reached:,}", since, ran_for, state)
        rows.append((job, start["nodes"], *cells))
        done = max(done, reached)
    rows += [(job, nodes, "", "", "", state) for job, (nodes, state) in queue.items()]
    rows = [(str(job), str(nodes), run.stages_on(nodes), *cells) for job, nodes, *cells in rows]
    print_table(("job", "nodes", "stages", "samples", "started", "ran for", "state"), rows)
    stage = max((s.index for s in run.stages if 0 <= s.first_sample <= done), default=0)
    print(f"{run.folder}: {done:,} samples done, stage {stage} of 0 to {run.stages[-1].index}")
    return 0


def _queue(folder: pathlib.Path) -> dict[int, tuple[int, str]]:
    """Nodes and state of the jobs in SLURM's queue that were submitted from a folder."""
    if not shutil.which("squeue"):
        return {}
    refusal = "squeue cannot tell which jobs of this run there are"
    lines = _ask(refusal, "squeue", "-h", "-o", "%A|%D|%T|%Z").splitlines()
    jobs = (line.split("|", 3) for line in lines)
    return {
        int(job): (int(nodes), state)
        for job, nodes, state, directory in jobs
        if os.path.realpath(directory) == os.path.realpath(folder)
    }


def _ask(refusal: str, *words: str, cwd: pathlib.Path | None = None) -> str:
    """What a command of SLURM's prints; a ConfigError where it fails."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = " ".join(done.stderr.replace(f"{words[0]}: error:", "").split())
        raise ConfigError(f"{refusal}: {reason}")
    return done.stdout


def submit_script(folder: pathlib.Path, name: str, *options: str) -> str:
    """Submits a batch script with options of sbatch; returns the number of its job."""
    refusal, words = f"sbatch refused {folder / name}", ["sbatch", "--parsable", *options, name]
    return _ask(refusal, *words, cwd=folder).strip().partition(";")[0]


def query(*words: str, cwd: str | None = None) -> list[str]:
    """The words that a command of SLURM's prints; none if it fails."""
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    return done.stdout.split()


def hostnames(names: str = "") -> list[str]:
    """The nodes of a list in SLURM's notation, such as n[0-3]."""
    return query("scontrol", "show", "hostnames", names) if names else []


def samples_done(folder: pathlib.Path) -> int:
    """Of a run, by the end of its metrics.jsonl."""
    path = folder / "metrics.jsonl"
    text = path.read_bytes()[-20_000:].decode(errors="replace") if path.exists() else ""
    return max(map(int, re.findall(r'"consumed_samples": (\d+)', text)), default=0)


def script(run: Run, nodes: int) -> str:
    supervisor = [sys.executable, "-m", "maxramp.launch.slurm_job", *run.arguments]
    return _SCRIPT.format(
        stages=run.stages_on(nodes),
        nodes=nodes,
        options="\n".join(f"#SBATCH {option}" for option in _options(run, nodes)),
        directory=shell_quote([pathlib.Path.cwd()]),
        setup="\n".join(run.config.launch.setup_lines),
        supervisor=shell_quote(supervisor),
    )


def trainer(run: Run) -> list[str]:
    """The command of a task."""
    keys = run.config.launch
    if not keys.container_image:
        return run.command()
    if keys.container_runtime == "pyxis":
        return run.command("python")
    binds = ["--bind", keys.container_mounts] if keys.container_mounts else []
    return ["apptainer", "exec", "--nv", *binds, keys.container_image, *run.command("python")]


def container_options(keys: LaunchKeys) -> list[str]:
    """Options of srun, by which pyxis starts a container."""
    if not keys.container_image or keys.container_runtime != "pyxis":
        return []
    mounts = [f"--container-mounts={keys.container_mounts}"] if keys.container_mounts else []
    options = [f"--container-image={keys.container_image}", "--no-container-mount-home"]
    return [*options, *mounts, f"--container-workdir={pathlib.Path.cwd()}"]


def _options(run: Run, nodes: int) -> list[str]:
    """Options of sbatch. Its own reading of quotes is not a shell's, so nothing here needs any."""
    keys = run.config.launch
    if set(str(run.folder)) & {"%", "\\"}:
        raise ConfigError(
            f"{run.folder}: SLURM reads % and \\ in the path of a job's output as its own signs; "
            "take another run_name or base_output_directory"
        )
    size = [f"--nodes={nodes}", f"--ntasks-per-node={keys.processes_per_node}"]
    if keys.elastic:  # with a number of tasks, SLURM gives the nodes that the fewest of them need
        size = [f"--nodes={run.fewest_within(nodes)}-{nodes}", "--no-kill"]
        size += [f"--mincpus={keys.processes_per_node}"]
    options = [
        f"--job-name={re.sub(r'[^A-Za-z0-9._-]+', '-', run.config.run.run_name)}",
        *size,
        f"--signal=TERM@{keys.grace_seconds}",  # to the trainer, which saves and exits with 76
        "--output=%j.log",
        "--open-mode=append",
        "--requeue",  # when a node fails; the same script continues from the newest checkpoint
    ]
    names = ("account", "partition", "qos", "time")
    named = [f"--{name}={value}" for name in names if (value := getattr(keys, f"slurm_{name}"))]
    return [*options, *named, *keys.slurm_options]
