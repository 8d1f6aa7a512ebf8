"""Runs whose folder is in an object storage, beside the same run on the disk."""

import json
import pathlib
import signal
import tempfile

import object_stores
import pytest
from conftest import BASE, TINY, command, complete, environment, run, steps_of
from forked import Forked, run_forked
from jobs import member, wait_until

from maxramp.checkpoints import folder as folder_lib
from maxramp.files.place import place, remove_tree
from maxramp.run.metrics import read_records

pytestmark = pytest.mark.slow
KEYS = [
    *TINY,
    "step_batch_size_schedule=0:8 400:16",
    *("step_batch_size_unit=samples", "micro_batch_size=8", "steps=120", "dataset_type=synthetic"),
    *("eval_interval=50", "eval_samples=8", "checkpoint_period=20"),
    *("max_num_checkpoints_to_keep=2", "log_period=20", "enable_tensorboard=True", "run_name=run"),
]
SAME = ("step", "loss", "eval_loss", "grad_norm", "batch_fingerprint", "consumed_samples")


def start(address, cache_dir, storage, *more, module="train"):
    """A maxramp command; all that it prints comes from its stdout, and goes to a `log`."""
    keys = [*KEYS, f"jax_cache_dir={cache_dir}", f"base_output_directory={address}", *more]
    printed = tempfile.NamedTemporaryFile()  # noqa: SIM115
    line = command(BASE, *keys, module=module)
    process = Forked(line, environment() | storage.environment, stdout=printed, stderr=printed)
    process.log = pathlib.Path(printed.name)
    return process


def finish(process):
    printed, _ = process.communicate(timeout=500)
    assert process.returncode == 0, printed
    return printed


def records(run):
    return [{k: r.get(k) for k in SAME} for r in read_records(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def calm(tmp_path_factory, cache_dir):
    """The run, undisturbed and on the disk."""
    folder = tmp_path_factory.mktemp("calm")
    complete(BASE, *KEYS, f"jax_cache_dir={cache_dir}", f"base_output_directory={folder}")
    return records(folder / "run")


def committed(run):
    """The newest checkpoint that counts, 0 without one."""
    return max(folder_lib.steps_in(run / "checkpoints"), default=0)


@pytest.mark.parametrize("storage", ["gs"], indirect=True)
def test_killed_and_continued(storage, cache_dir, calm, tmp_path):
    """At a commit, in a save and before the first one: the same losses, to the last bit."""
    address = place(f"{storage.address}/{tmp_path.name}")
    for moment in ("start", "save", "commit"):
        since = len(storage.requests)
        process = start(address, cache_dir, storage)
        if moment == "start":
            wait_until(lambda since=since: any(".lock" in r for r in storage.requests[since:]))
        elif moment == "save":
            wait_until(lambda since=since: any("ocdbt" in r for r in storage.requests[since:]))
        else:
            wait_until(lambda: committed(address / "run"))
        process.send_signal(signal.SIGKILL)
        process.wait()
    printed = finish(start(address, cache_dir, storage))
    assert "resume   from step" in printed
    assert f"see      {address}/run/ramp.png, metrics.jsonl, config.yml, plan.json" in printed
    run = address / "run"
    assert records(run) == calm
    names = {p.name for p in run.iterdir()}
    assert names >= {"config.yml", "plan.json", "metrics.jsonl", "ramp.png", "checkpoints"}
    assert ".lock" not in names
    steps = folder_lib.steps_in(run / "checkpoints")
    assert len(steps) <= 2 and steps[-1] == 120  # retention
    assert "finished" in finish(start(address, cache_dir, storage))

    def checkpoint(*words):
        line = command(*words, str(run), module="checkpoint")
        done = run_forked(line, environment() | storage.environment)
        return done.returncode, done.stdout + done.stderr

    status, printed = checkpoint("ls")
    assert status == 0 and "      120 " in printed and printed.count("complete") == len(steps)
    status, printed = checkpoint("verify")
    assert status == 0 and f"{run}/checkpoints/120: complete" in printed
    files = json.loads((run / "checkpoints" / "120" / folder_lib.FILE).read_bytes())["files"]
    data = max(files, key=files.get)
    torn = run / "checkpoints" / "120"
    for part in data.split("/"):
        torn = torn / part
    torn.unlink()
    status, printed = checkpoint("verify")
    assert status == 1 and "missing" in printed
    printed = finish(start(address, cache_dir, storage))
    assert f"{data}: missing" in printed and "continuing from the checkpoint before it" in printed
    assert records(run) == calm
    assert (run / "checkpoints" / "120.torn").is_dir()


@pytest.mark.parametrize(
    "storage", ["gs", pytest.param("s3", marks=pytest.mark.long)], indirect=True
)
def test_two_runs_do_not_share_a_folder(storage, cache_dir, tmp_path):
    """The second is refused, and who loses the folder ends, not only where it would save."""
    address = place(f"{storage.address}/{tmp_path.name}")
    since = len(storage.requests)
    first = start(address, cache_dir, storage, "steps=100000", "checkpoint_period=-1")
    wait_until(lambda: any("metrics.jsonl" in r for r in storage.requests[since:]))
    second = start(address, cache_dir, storage)
    printed, _ = second.communicate(timeout=300)
    assert second.returncode == 2 and "is in use by process" in printed
    lock = json.dumps({"owner": "somebody else"}).encode()
    (address / "run" / ".lock").write_bytes(lock)
    printed, _ = first.communicate(timeout=300)
    assert first.returncode == 1 and "was taken over by somebody else" in printed
    assert (address / "run" / ".lock").read_bytes() == lock


@pytest.mark.parametrize(
    ("storage", "status"),
    [
        *(("gs", 503), ("s3", 403)),
        *(pytest.param(*x, marks=pytest.mark.long) for x in (("gs", 403), ("s3", 503))),
    ],
    indirect=["storage"],
)
def test_a_storage_that_is_away(storage, away, cache_dir, tmp_path, status):
    """In the middle: the run warns, its loop trains on meanwhile, nothing is lost."""
    address = place(f"{storage.address}/{tmp_path.name}")
    keys = ("steps=100000", "max_failed_saves=1000", "max_num_checkpoints_to_keep=1")
    process = start(address, cache_dir, storage, *keys)
    wait_until(lambda: committed(address / "run"))
    away(status)
    lines = process.log.read_text().count("\nstep ")
    wait_until(lambda: process.log.read_text().count("\nstep ") > lines + 10)  # of 20 steps each
    away(0)
    process.send_signal(signal.SIGTERM)
    printed, _ = process.communicate(timeout=500)
    assert process.returncode == 76, printed
    if status == 403:
        assert "was not saved" in printed or "it is tried again" in printed
    run = address / "run"
    steps = steps_of(run)
    last = folder_lib.read(folder_lib.find(run)).step
    assert [r["step"] for r in steps] == list(range(last))
    remove_tree(run)


@pytest.mark.parametrize("storage", ["s3"], indirect=True)
def test_processes_of_one_job(storage, cache_dir, calm, tmp_path):
    """Each writes its part of a checkpoint, and another number of them goes on from it."""
    address = place(f"{storage.address}/{tmp_path.name}")
    port, jobs = object_stores.free_port(), []
    for index in range(2):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in member(port, 2, index).items():
                patch.setenv(name, value)
            jobs.append(start(address, cache_dir, storage, "steps=60", "micro_batch_size=4"))
    for job in jobs:
        finish(job)
    finish(start(address, cache_dir, storage))
    rows, expected = (
        [r["batch_fingerprint"] for r in got if r["loss"] is not None]
        for got in (records(address / "run"), calm)
    )
    assert rows == expected


def ran(*arguments, module):
    done = complete(*map(str, arguments), module=module)
    return done.stdout


def test_measuring(storages, cache_dir, tmp_path):
    """The noise scale, branches and the ramp that follows from them, by the run's address alone."""
    address = place(f"{storages('gs').address}/{tmp_path.name}")
    keys = [*TINY, "steps=40", "checkpoint_period=20", "log_gradient_noise_scale=True"]
    keys += ["global_batch_size=8", "eval_per_device_batch_size=64", "eval_interval=40"]
    ran(
        *(BASE, *keys, f"jax_cache_dir={cache_dir}"),
        *(f"base_output_directory={address}", "run_name=run"),
        module="train",
    )
    folder = address / "run"
    assert f"picture   {folder}/noise.png" in ran(folder, "--blocks", "2", module="noise")
    assert (folder / "noise.png").read_bytes().startswith(b"\x89PNG")
    line = [folder, "--at", "20", "--sizes", "8,16", "--tokens", "1K"]
    assert "largest   batch" in ran(*line, module="branch")
    window = folder / "branches" / "20-64"
    result = json.loads((window / "branch.json").read_bytes())
    assert result["run"] == str(folder) and result["noise"]
    for size in (8, 16):
        steps = steps_of(window / str(size))
        assert [r["step"] for r in steps] == list(range(20, 20 + 64 // size))
    assert json.loads(ran(*line, "--json", module="branch")) == result  # read, not trained again
    suggestion = ran(
        *(BASE, *TINY, "global_batch_size=8", "total_samples=2000", "devices_per_node=1"),
        *("--noise", folder, "--branch", folder, "--json"),
        module="suggest",
    )
    suggestion = json.loads(suggestion)
    assert suggestion["batches"] and any(str(folder) in line for line in suggestion["evidence"])
    assert not any("config.yml" in line for line in suggestion["limits"])
    done = run(str(folder / "nothing"), module="noise")
    assert done.returncode == 2 and "holds no metrics.jsonl" in done.stderr


def test_a_launch(storages, cache_dir, tmp_path):
    """Its jobs grow where the plan says so, and a finished one has nothing to do."""
    address = place(f"{storages('s3').address}/{tmp_path.name}")
    line = [BASE, *TINY, "hardware=cpu", "num_nodes=2", "devices_per_node=1", "run_name=grown"]
    line += ["per_device_batch_size=2", "step_batch_size_schedule=0:2 40:4", "steps=30"]
    line += ["step_batch_size_unit=samples", "checkpoint_period=15", "restart_minutes=0"]
    line += ["dataset_type=synthetic", "eval_interval=-1", f"base_output_directory={address}"]
    line += [f"jax_cache_dir={cache_dir}", "--cluster", "local"]
    printed = ran(*line, module="launch")
    assert [x for x in printed.splitlines() if x.startswith("launch ")] == [
        "launch   1 process for 1 node of 1 device",
        "launch   2 processes for 2 nodes of 1 device",
    ]
    steps = steps_of(address / "grown")
    assert [r["step"] for r in steps] == list(range(30))
    assert "finished" in ran(*line, module="launch")
