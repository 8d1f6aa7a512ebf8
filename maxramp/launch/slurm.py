"""Jobs under SLURM: a batch script for every number of nodes, each of which submits its successor.

The scripts lie in `{output folder}/slurm/` and need nothing but bash, SLURM and the trainer: they
can be read, changed and submitted by hand. `chain.jsonl` beside them says what ran.
"""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Any

from maxramp.commandline import count, print_table, quoted
from maxramp.errors import EXIT_CONFIG, EXIT_PREEMPTED, EXIT_STAGE_END, ConfigError
from maxramp.keys.section import is_object_storage
from maxramp.launch.jobs import Run, write_private
from maxramp.run.keys import RunKeys

_SCRIPT = r"""#!/usr/bin/env bash
# Stage @STAGES@ of a run, on @NODES@ of its nodes. Written by maxramp.launch.
@SBATCH@

cd -- @DIRECTORY@ || exit 1
folder=@FOLDER@
command=(@COMMAND@)
nodes=@NODES@
restarts=${MAXRAMP_RESTARTS:-0}  # after failures, since a job left a newer checkpoint

# Where the processes of the job find each other; each knows its place by SLURM_PROCID.
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MAXRAMP_COORDINATOR="$host:$((20000 + SLURM_JOB_ID % 20000))"
export MAXRAMP_NUM_PROCESSES=@PROCESSES@
unset MAXRAMP_PROCESS_ID
@ENVIRONMENT@

note() {  # event, exit status or null: a line of chain.jsonl
    local samples
    samples=$(tail -n 100 "$folder/metrics.jsonl" 2>/dev/null |
        sed -n 's/.*"consumed_samples": \([0-9]*\).*/\1/p' | tail -n 1)
    printf '{"job": %d, "nodes": %d, "time": %d, "event": "%s", "status": %s, "samples": %d}\n' \
        "$SLURM_JOB_ID" "$nodes" "$(date +%s)" "$1" "$2" "${samples:-0}" \
        >> "$folder/slurm/chain.jsonl"
}

newest() {  # steps done in the newest checkpoint; 0 before the first
    local steps
    steps=$(cd "$folder/checkpoints" 2>/dev/null && ls -d [0-9]*/checkpoint.json 2>/dev/null |
        cut -d / -f 1 | grep -x '[0-9]*' | sort -n | tail -n 1)
    echo "${steps:-0}"
}
before=$(newest)

submit() {  # nodes, 1 after a failure: the next job of the chain
    local job failed=$2
    if [ "$(newest)" -gt "$before" ]; then
        restarts=0
    else
        failed=1  # however orderly it ended: without progress the chain would go on for ever
    fi
    if [ "$failed" = 1 ] && [ "$restarts" -ge @MAX_RESTARTS@ ]; then
        echo "launch   gave up after max_restarts=$restarts starts without a newer checkpoint"
        return
    fi
    cd -- "$folder/slurm" || return 1
    restarts=$((restarts + failed))
    job=$(MAXRAMP_RESTARTS=$restarts sbatch --parsable "$1-nodes.sh") || return 1
    echo "launch   job ${job%%;*} continues the run (nodes: $1, failed starts: $restarts)"
}

limit=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null || echo 9999999999)
ended() {  # SIGTERM to this script: the time limit came before the save, or somebody's scancel
    if [ "$(date +%s)" -ge $((limit - 2)) ]; then
        note limit null
        submit "$nodes" 0
    else
        note cancelled null
    fi
    exit 1
}
trap ended TERM

note start null
srun --nodes=@NODES@ --ntasks=@PROCESSES@ --ntasks-per-node=@PER_NODE@ --label \
    --kill-on-bad-exit=0 --wait=@GRACE@ @SRUN@ "${command[@]}" &
wait $!
status=$?
note end "$status"
case $status in
    0 | @CONFIG@) ;;  # finished; or the configuration is wrong, and would be again
    @STAGE_END@) submit "$(sed -n 's/.*"nodes": \([0-9]*\).*/\1/p' "$folder/next_stage.json")" 0 ;;
    @PREEMPTED@) submit "$nodes" 0 ;;
    *) submit "$nodes" 1 ;;
esac
exit "$status"
"""


def check(keys: RunKeys) -> None:
    """Refuses a run's folder that the scripts, which are written into it, cannot look into.

    Raises:
      ConfigError: it is in an object storage.
    """
    output = keys.base_output_directory
    if is_object_storage(output):
        raise ConfigError(
            f"base_output_directory={output}: the scripts of --cluster slurm read the run's folder "
            "through the file system; give a path that all nodes share, or mount the storage (GCS "
            "FUSE, Mountpoint for S3) and give that path"
        )


def submit(run: Run, dry_run: bool) -> int:
    """Writes the scripts and submits the first; returns the exit status.

    Raises:
      ConfigError: a value cannot stand in a script, there is no SLURM here, or it refuses the job.
    """
    scripts = {f"{nodes}-nodes.sh": script(run, nodes) for nodes in run.node_counts()}
    nodes = run.next_nodes
    first = f"{nodes}-nodes.sh"
    scripts.setdefault(first, script(run, nodes))
    folder = run.folder / "slurm"
    if dry_run:
        for name, text in scripts.items():
            print(f"### {folder / name}\n{text}")
        print(f"### then\ncd {quoted([folder])} && sbatch {first}")
        return 0
    if not shutil.which("sbatch"):
        raise ConfigError(
            "--cluster slurm: no sbatch on the path; launch where SLURM is installed, or use "
            "--cluster local, or --dry-run to see the scripts"
        )
    if running := [entry["job"] for entry in _chain(folder) if entry["state"] in _ALIVE]:
        raise ConfigError(
            f"run_name={run.name}: job {running[0]} of this run is in SLURM's queue; "
            f"scancel {running[0]} ends it, another run_name starts another run"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in scripts.items():
            write_private(folder / name, text, mode=0o700)
    except OSError as error:
        raise ConfigError(
            f"base_output_directory={run.config.run.base_output_directory}: cannot write to "
            f"{error.filename}: {error.strerror}"
        ) from None
    done = subprocess.run(
        ["sbatch", "--parsable", first], cwd=folder, capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = " ".join(done.stderr.replace("sbatch: error:", "").split())
        raise ConfigError(f"sbatch refused {folder / first}: {reason}")
    job = done.stdout.strip().partition(";")[0]
    print(f"launch   job {job} submitted on {count(nodes, 'node')}")
    print(
        f"see      {folder}: the scripts, the jobs' output, chain.jsonl; --status shows the chain"
    )
    return 0


def print_status(run: Run) -> None:
    """The jobs of a run so far: where each stood, and what is in SLURM's queue."""
    entries = _chain(run.folder / "slurm")
    rows = (
        [
            str(e["job"]),
            str(e["nodes"]),
            run.stages_on(e["nodes"]),
            f"{e['from']:,} - {e['to']:,}" if e["started"] else "",
            time.strftime("%m-%d %H:%M:%S", time.localtime(e["started"])) if e["started"] else "",
            f"{e['ended'] - e['started']} s" if e["ended"] else "",
            e["state"],
        ]
        for e in entries
    )
    print_table(("job", "nodes", "stages", "samples", "started", "ran for", "state"), rows)
    done = max((e["to"] for e in entries), default=0)
    last = run.stages[-1]
    stage = max((s.index for s in run.stages if 0 <= s.first_sample <= done), default=0)
    total = f"stage {stage} of 0 to {last.index}"
    print(f"{run.folder}: {done:,} samples done, {total}")


_ALIVE = ("PENDING", "RUNNING", "CONFIGURING", "COMPLETING", "SUSPENDED", "REQUEUED")
_ENDS = {
    0: "finished",
    EXIT_CONFIG: "configuration is wrong",
    EXIT_STAGE_END: "stage ended",
    EXIT_PREEMPTED: "stopped",
}


def _chain(folder: pathlib.Path) -> list[dict[str, Any]]:
    """The jobs of a chain, the oldest first, those in the queue last."""
    jobs: dict[int, dict[str, Any]] = {}
    path = folder / "chain.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    for line in lines:
        try:
            e = json.loads(line)
        except ValueError:  # torn, by a full disk or a node that died
            continue
        if e["event"] == "start":
            jobs[e["job"]] = _entry(e["job"], e["nodes"], "RUNNING", e["time"], e["samples"])
        elif e["job"] in jobs:
            state = e["event"]
            if state == "end":
                state = _ENDS.get(e["status"], f"crashed, exit status {e['status']}")
            jobs[e["job"]] |= {"ended": e["time"], "to": e["samples"], "state": state}
    queue = _queue(folder)
    for entry in jobs.values():
        if not entry["ended"]:
            gone = 0, "gone: killed with its node or by hand"
            entry["state"] = queue.get(entry["job"], gone)[1]
            entry["to"] = max(entry["from"], _samples(folder.parent))
    for job, (nodes, state) in queue.items():
        jobs.setdefault(job, _entry(job, nodes, state))
    return list(jobs.values())


def _entry(job: int, nodes: int, state: str, started: int = 0, samples: int = 0) -> dict[str, Any]:
    about = {"job": job, "nodes": nodes, "state": state}
    return about | {"started": started, "ended": 0, "from": samples, "to": samples}


def _queue(folder: pathlib.Path) -> dict[int, tuple[int, str]]:
    """Nodes and state of the jobs in SLURM's queue that were submitted from a folder.

    Raises:
      ConfigError: SLURM does not say.
    """
    if not shutil.which("squeue"):
        return {}
    done = subprocess.run(
        ["squeue", "-h", "-o", "%A|%D|%T|%Z"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        reason = " ".join(done.stderr.replace("squeue: error:", "").split())
        raise ConfigError(f"squeue cannot tell which jobs of this run there are: {reason}")
    found = {}
    for line in done.stdout.splitlines():
        job, nodes, state, directory = line.split("|", 3)
        if os.path.realpath(directory) == os.path.realpath(folder):
            found[int(job)] = (int(nodes), state)
    return found


def _samples(folder: pathlib.Path) -> int:
    path = folder / "metrics.jsonl"
    text = path.read_bytes()[-20_000:].decode(errors="replace") if path.exists() else ""
    return max(map(int, re.findall(r'"consumed_samples": (\d+)', text)), default=0)


def script(run: Run, nodes: int) -> str:
    """The batch script of the jobs on so many nodes."""
    keys, python, srun = run.keys, sys.executable, []
    if keys.container_image:
        python = "python"
        mounts = keys.container_mounts
        if keys.container_runtime == "pyxis":
            srun = [f"--container-image={keys.container_image}", "--no-container-mount-home"]
            srun += [f"--container-mounts={mounts}"] if mounts else []
            srun += [f"--container-workdir={pathlib.Path.cwd()}"]
    command = run.command(python)
    if keys.container_image and keys.container_runtime == "apptainer":
        binds = ["--bind", keys.container_mounts] if keys.container_mounts else []
        command = ["apptainer", "exec", "--nv", *binds, keys.container_image, *command]
    environment = [f"export JAX_NUM_CPU_DEVICES={run.devices_per_process}"]
    if keys.processes_per_node == 1:  # else JAX gives every process the one of SLURM_LOCALID
        devices = ",".join(map(str, range(run.devices_per_node)))
        environment.append(f"export JAX_LOCAL_DEVICE_IDS={devices}")
    values = {
        "STAGES": run.stages_on(nodes),
        "SBATCH": "\n".join(f"#SBATCH {option}" for option in _options(run, nodes)),
        "DIRECTORY": quoted([pathlib.Path.cwd()]),
        "FOLDER": quoted([run.folder]),
        "COMMAND": quoted(command),
        "NODES": nodes,
        "PROCESSES": run.processes(nodes),
        "PER_NODE": keys.processes_per_node,
        "ENVIRONMENT": "\n".join([*environment, *keys.setup_lines]),
        "GRACE": keys.grace_seconds,
        "SRUN": quoted(srun),
        "CONFIG": EXIT_CONFIG,
        "STAGE_END": EXIT_STAGE_END,
        "PREEMPTED": EXIT_PREEMPTED,
        "MAX_RESTARTS": keys.max_restarts,
    }
    return re.sub("@([A-Z_]+)@", lambda match: str(values[match[1]]), _SCRIPT)


def _options(run: Run, nodes: int) -> list[str]:
    """Options of sbatch. Its own reading of quotes is not a shell's, so nothing here needs any."""
    keys = run.keys
    if set(str(run.folder)) & {"%", "\\"}:
        raise ConfigError(
            f"{run.folder}: SLURM reads % and \\ in the path of a job's output as its own signs; "
            "take another run_name or base_output_directory"
        )
    options = [
        f"--job-name={re.sub(r'[^A-Za-z0-9._-]+', '-', run.name)}",
        f"--nodes={nodes}",
        f"--ntasks-per-node={keys.processes_per_node}",
        f"--signal=TERM@{keys.grace_seconds}",  # to the trainer, which saves and exits with 76
        "--output=%j.log",
        "--open-mode=append",
        "--requeue",  # when a node fails; the same script goes on from the newest checkpoint
    ]
    for name in ("account", "partition", "qos", "time"):
        value = getattr(keys, f"slurm_{name}")
        if value and not re.fullmatch(r"[A-Za-z0-9._:,@+-]+", value):
            raise ConfigError(
                f"slurm_{name}={value} holds characters that no {name} of SLURM has; leave them out"
            )
        options += [f"--{name}={value}"] if value else []
    for option in keys.slurm_options:
        if not re.fullmatch(r"--[a-z][A-Za-z0-9._:,@+=/*\[\]()&|%-]*", str(option)):
            raise ConfigError(
                f"slurm_options: {option!r} is not one option of sbatch of the form --name=value, "
                "without blanks or quotes"
            )
        options.append(option)
    for line in keys.setup_lines:
        if not isinstance(line, str):
            raise ConfigError(f"setup_lines: {line!r} is not a line of shell; quote it")
    return options
