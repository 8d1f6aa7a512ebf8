"""Jobs under SLURM: a batch script for every number of nodes; each submits its successor.

The scripts lie in `{output folder}/slurm/` and need nothing but bash, SLURM and the trainer: they
can be read, changed and submitted by hand. `chain.jsonl` beside them says what ran.
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
from maxramp.launch import slurm_nodes
from maxramp.launch.jobs import Run, write_private

_SCRIPT = r"""#!/usr/bin/env bash
# Stage @STAGES@ of a run, on @NODES@ of its nodes. Written by maxramp.launch.
@SBATCH@

cd -- @DIRECTORY@ || exit 1
folder=@FOLDER@
command=(@COMMAND@)
nodes=@NODES@
restarts=${MAXRAMP_RESTARTS:-0}  # after failures, since a job left a newer checkpoint
options=()  # of sbatch, for the next job

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
next_nodes() { sed -n 's/.*"nodes": \([0-9]*\).*/\1/p' "$folder/next_stage.json"; }

may_restart() {  # 1 after a failure
    local failed=$1
    if [ "$(newest)" -gt "$before" ]; then
        restarts=0
    else
        failed=1  # however orderly it ended: without progress the chain would never end
    fi
    if [ "$failed" = 1 ] && [ "$restarts" -ge @MAX_RESTARTS@ ]; then
        echo "launch   gave up after max_restarts=$restarts starts without a newer checkpoint"
        return 1
    fi
    restarts=$((restarts + failed))
}

submit() {  # nodes: the next job of the chain
    local job
    cd -- "$folder/slurm" || return 1
    job=$(MAXRAMP_RESTARTS=$restarts sbatch --parsable "${options[@]}" "$1-nodes.sh") || return 1
    echo "launch   job ${job%%;*} continues the run (nodes: $1, failed starts: $restarts)"
}

limit=$(date -d "$(squeue -h -j "$SLURM_JOB_ID" -o %e)" +%s 2>/dev/null || echo 9999999999)
ended() {  # SIGTERM to this script: the time limit came before the save, or somebody's scancel
    if [ "$(date +%s)" -ge $((limit - 2)) ]; then
        note limit null
        may_restart 0 && submit @NODES@
    else
        note cancelled null
    fi
    exit 1
}
trap ended TERM

@RUN@"""

_RUN = r"""
note start null
srun --nodes=@NODES@ --ntasks=@PROCESSES@ --ntasks-per-node=@PER_NODE@ --label \
    --kill-on-bad-exit=0 --wait=@GRACE@ @SRUN@ "${command[@]}" &
wait $!
status=$?
note end "$status"
case $status in
    0 | @CONFIG@) ;;  # finished; or the configuration is wrong, and would be again
    @STAGE_END@) may_restart 0 && submit "$(next_nodes)" ;;
    @PREEMPTED@) may_restart 0 && submit "$nodes" ;;
    *) may_restart 1 && submit "$nodes" ;;
esac
exit "$status"
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
    printed = _ask(f"sbatch refused {folder / first}", "sbatch", "--parsable", first, cwd=folder)
    job = printed.strip().partition(";")[0]
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
    chain, metrics = run.folder / "slurm" / "chain.jsonl", run.folder / "metrics.jsonl"
    starts: list[list[dict[str, Any]]] = []  # each, and what came then
    for line in chain.read_bytes().splitlines() if chain.exists() else ():
        with contextlib.suppress(ValueError):  # torn, by a full disk or a node that died
            event = json.loads(line)
            if event["event"] == "start":
                starts.append([event])
            elif starts and event["job"] == starts[-1][0]["job"]:
                starts[-1].append(event)
    queue = _queue(chain.parent)
    newest = metrics.read_bytes()[-20_000:].decode(errors="replace") if metrics.exists() else ""
    now = max(map(int, re.findall(r'"consumed_samples": (\d+)', newest)), default=0)
    rows, done = [], 0
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


def script(run: Run, nodes: int) -> str:
    keys, srun, devices = run.config.launch, [], run.config.batch.devices_per_node
    given = dict(option.partition("=")[::2] for option in keys.slurm_options)
    excluded = ["scontrol", "show", "hostnames", given.get("--exclude", "")]
    image, mounts = keys.container_image, keys.container_mounts
    command = run.command("python" if image else sys.executable)
    if image and keys.container_runtime == "apptainer":
        binds = ["--bind", mounts] if mounts else []
        command = ["apptainer", "exec", "--nv", *binds, image, *command]
    elif image:
        srun = [f"--container-image={image}", "--no-container-mount-home"]
        srun += [f"--container-mounts={mounts}"] if mounts else []
        srun += [f"--container-workdir={pathlib.Path.cwd()}"]
    environment = [f"export JAX_NUM_CPU_DEVICES={devices // keys.processes_per_node}"]
    if keys.processes_per_node == 1:  # else JAX gives every process the one of SLURM_LOCALID
        environment.append(f"export JAX_LOCAL_DEVICE_IDS={','.join(map(str, range(devices)))}")
    values = {
        "STAGES": run.stages_on(nodes),
        "FITS": " ".join(map(str, run.fits_within(nodes))),
        "ALL_NODES": run.config.batch.nodes,
        "MAX_FAILURES": keys.max_node_failures,
        "EXCLUDED": shell_quote(excluded) if excluded[-1] else "",
        "SBATCH": "\n".join(f"#SBATCH {option}" for option in _options(run, nodes)),
        "DIRECTORY": shell_quote([pathlib.Path.cwd()]),
        "FOLDER": shell_quote([run.folder]),
        "COMMAND": shell_quote(command),
        "NODES": nodes,
        "PROCESSES": run.processes(nodes),
        "PER_NODE": keys.processes_per_node,
        "ENVIRONMENT": "\n".join([*environment, *keys.setup_lines]),
        "GRACE": keys.grace_seconds,
        "SRUN": shell_quote(srun),
        "CONFIG": EXIT_CONFIG,
        "STAGE_END": EXIT_STAGE_END,
        "PREEMPTED": EXIT_PREEMPTED,
        "MAX_RESTARTS": keys.max_restarts,
    }
    text = _SCRIPT.replace("@RUN@", slurm_nodes.RUN if keys.elastic else _RUN)
    return re.sub("@([A-Z_]+)@", lambda match: str(values[match[1]]), text)


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
    given = [f"--{name}={value}" for name in names if (value := getattr(keys, f"slurm_{name}"))]
    return [*options, *given, *keys.slurm_options]
