"""Programs compiled ahead: what the loop sees of them, and what happens if one does not compile."""

import json
import re
import subprocess
import sys
import time

import jax
import pytest
from conftest import BASE, TINY, complete, environment, make_config, make_mesh, run
from forked import Forked, run_forked
from jobs import member
from one_step import programs_of

from maxramp.errors import TrainingError
from maxramp.parallel.compiler import compiler_options
from maxramp.run.metrics import read_records
from maxramp.training import background_compiler
from maxramp.training.background_compiler import BackgroundCompiler

# Batches 2, 4, 6, 8 for 60, 30, 20 steps and the rest.
RAMP = [
    *("per_device_batch_size=8", "per_device_batch_size_start=2"),
    *("per_device_batch_size_increment=2", "global_rampup_samples=360", "steps=130"),
    *("eval_interval=40", "eval_samples=16", "checkpoint_period=1000"),
]

# Runs the trainer after a patch of what a real compiler or a user without it would do.
PATCHED = """
import os, sys, threading
import jax
from maxramp.processes.ending import end_process
from maxramp.train import main
from maxramp.training import background_compiler
{patch}
end_process(main(sys.argv[1:]))
"""
COMPILER_FAILS = """
compile_program, count = jax.stages.Lowered.compile, 0
def fail(self, *options):
    global count
    if threading.current_thread().name == "compile_0":
        count += 1
        if count == {which}:
            {when}
            raise RuntimeError("out of\\nregisters")
    return compile_program(self, *options)
jax.stages.Lowered.compile = fail
"""

# The checkpoint of the first stage's end stands.
AT_ITS_END = """
            import pathlib, time
            (folder,) = (word for word in sys.argv if word.startswith("base_output_directory="))
            saved = pathlib.Path(folder.split("=")[1], "r", "checkpoints", "60")
            while not (saved / "checkpoint.json").exists():
                time.sleep(0.1)
"""


def arguments(folder, cache_dir, *more):
    own = (f"jax_cache_dir={cache_dir}", f"base_output_directory={folder}", "run_name=r")
    return [BASE, *TINY, *RAMP, *own, *more]


def run_patched(patch, keys, **variables):
    program = [sys.executable, "-c", PATCHED.format(patch=patch), *keys]
    return run_forked(program, environment() | variables)


def losses(folder):
    records = read_records(folder / "r" / "metrics.jsonl")
    return [(r["step"], r.get("loss"), r.get("eval_loss")) for r in records]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache_dir):
    folder = tmp_path_factory.mktemp("undisturbed")
    done = complete(*arguments(folder, cache_dir))
    return folder, done.stdout


def test_every_program_is_announced_once_in_order_of_use(undisturbed):
    ready = [line.split(":")[0] for line in undisturbed[1].splitlines() if line[:5] == "ready"]
    stages = [f"stage {i} (batch {2 * i + 2})" for i in range(4)]
    assert ready == [f"ready    {name}" for name in (stages[0], "evaluation", *stages[1:])]


def test_compiling_ahead_changes_no_loss(undisturbed, tmp_path, cache_dir):
    """Against a run that lowers and compiles each stage when it is reached."""
    patch = "background_compiler.BackgroundCompiler.lower = lambda self: None"
    done = run_patched(patch, arguments(tmp_path, cache_dir))
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path) == losses(undisturbed[0])
    steps = [r for r in read_records(tmp_path / "r" / "metrics.jsonl") if "loss" in r]
    for first in (60, 90, 110):  # the wait is in the step that waited, not in the one before
        assert steps[first]["step_seconds"] > steps[first]["compile_seconds"] > 0
    assert all(r["compile_seconds"] == 0 for r in steps if r["step"] not in (0, 60, 90, 110))


@pytest.mark.slow
def test_nothing_is_transferred_but_batches_and_metrics(undisturbed, tmp_path, cache_dir):
    """Every transfer of a run is one that the code asks for; an implicit one raises."""
    guarded = environment() | {"JAX_TRANSFER_GUARD": "disallow"}
    line = [sys.executable, "-m", "maxramp.train", *arguments(tmp_path, cache_dir)]
    done = subprocess.run(line, env=guarded, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert losses(tmp_path) == losses(undisturbed[0])


@pytest.mark.parametrize(
    "which, when",
    [
        pytest.param(4, "pass", marks=pytest.mark.slow),  # stage 2, in the middle of stage 0
        # stage 1, when the loop already waits for it
        pytest.param(3, AT_ITS_END, marks=pytest.mark.slow),
    ],
)
def test_a_program_that_does_not_compile_ends_the_run_saved(
    which, when, undisturbed, tmp_path, cache_dir
):
    patch = COMPILER_FAILS.format(which=which, when=when)
    done = run_patched(patch, arguments(tmp_path, cache_dir))
    stage = which - 2  # the second program is the evaluation's
    assert done.returncode == 1
    assert done.stderr == (
        f"error: the program of stage {stage} (batch {2 * stage + 2}) did not compile: out of "
        "registers\n"
    )
    saved = {int(p.name) for p in (tmp_path / "r" / "checkpoints").iterdir()}
    done_steps = read_records(tmp_path / "r" / "metrics.jsonl")[-1]["step"] + 1
    assert max(saved) == done_steps
    assert saved <= {60, done_steps}, "nothing but that and the end of the first stage"
    assert (done_steps < 90) if which == 4 else (done_steps == 60)
    # Started again with a compiler that works, it is the run that nothing disturbed.
    assert run(*arguments(tmp_path, cache_dir)).returncode == 0
    assert losses(tmp_path) == losses(undisturbed[0])


def test_the_first_program_does_not_compile(tmp_path, cache_dir):
    patch = COMPILER_FAILS.format(which=1, when="pass")
    done = run_patched(patch, arguments(tmp_path, cache_dir))
    assert done.returncode == 1
    message = "the program of stage 0 (batch 2) did not compile: out of registers"
    assert done.stderr == f"error: {message}\n"
    assert not list((tmp_path / "r" / "checkpoints").iterdir())


@pytest.mark.slow
def test_on_two_processes_all_save_the_same_step(tmp_path, cache_dir):
    """One of them cannot compile stage 2: both end after one step, saved."""
    patch = COMPILER_FAILS.format(which=4, when="import time; time.sleep(1)")
    keys = arguments(tmp_path, cache_dir, "per_device_batch_size=4", "steps=2000")
    keys += ["per_device_batch_size_start=1", "per_device_batch_size_increment=1"]
    running = []
    for index in range(2):
        program = PATCHED.format(patch=patch if index else "")
        line = [sys.executable, "-c", program, *keys]
        running.append(Forked(line, environment() | member(29517, 2, index)))
    (_, _), (_, error) = (process.communicate(timeout=240) for process in running)
    assert running[1].returncode == 1
    assert "error: the program of stage 2" in error
    # Its own end after the save, or the failure's status, whichever comes first.
    assert running[0].returncode in (1, 76)
    saved = [int(p.name) for p in (tmp_path / "r" / "checkpoints").iterdir() if p.name.isdigit()]
    records = read_records(tmp_path / "r" / "metrics.jsonl")
    done = max(r["step"] for r in records) + 1
    assert max(saved) == done
    assert set(saved) <= {60, done}, "nothing but that and the end of the first stage"


def test_a_stage_that_does_not_fit_is_told_when_it_is_compiled(undisturbed, tmp_path, cache_dir):
    lines = [line for line in undisturbed[1].splitlines() if line[:5] == "ready"]
    needs = {line.split()[2]: float(line.split("needs ")[1].split()[0]) for line in lines}
    limit = (needs["2"] + needs["3"]) / 2
    done = run(*arguments(tmp_path, cache_dir, f"device_memory_gib={limit}"))
    warnings = [line for line in done.stdout.splitlines() if line[:7] == "warning"]
    assert done.returncode == 0
    assert len(warnings) == 1
    assert warnings[0].startswith(f"warning  stage 3 (batch 8) needs {needs['3']:.3g} GiB a device")


def test_a_long_wait_for_a_program_is_a_line(monkeypatch):
    monkeypatch.setattr(background_compiler, "_SILENT", 0.2)
    lowered, lines = jax.jit(lambda x: x + 1).lower(0.0), []

    class Slow:
        def compile(self):
            time.sleep(0.4)
            return lowered.compile()

    compiler = BackgroundCompiler(0, lines.append, lambda: None)
    for name, lower in (("quick", lambda: lowered), ("slow", Slow)):
        compiler.announce(name, name, make_mesh(make_config()), lower)
        assert compiler.get(name)[0](1.0) == 2
    assert [" ".join(x.split()[:2]) for x in lines] == ["ready quick:", "wait slow:", "ready slow:"]


def test_stages_of_one_shape_share_a_program():
    """Also if they are added while others run; one that was not added is compiled when used."""
    keys = ("step_batch_size_schedule=0:4 80:8 160:4 320:16", "step_batch_size_unit=samples")
    config = make_config(*keys, "total_samples=600", "per_device_batch_size=8", devices=1)
    lines = []
    with programs_of(config, lines.append, first_stages=1) as (programs, compiler, stages):
        first, _ = programs.train_step(stages[0])
        for stage in stages[1:3]:
            programs.add(stage)
        compiler.lower()
        second, third, fourth = (programs.train_step(stage)[0] for stage in stages[1:])
    assert third is first and len({first, second, fourth}) == 3
    ready = [line.partition(":")[0] for line in lines if line[:5] == "ready"]
    batches = {0: 4, 1: 8, 3: 16}
    assert ready == [f"ready    stage {i} (batch {rows})" for i, rows in batches.items()]


def test_options_of_the_compiler(monkeypatch):
    """Ours hold where the user has not said otherwise; every compiler knows them."""
    assert compiler_options("cpu") == {}
    (flag,) = compiler_options("tpu")
    monkeypatch.setenv("LIBTPU_INIT_ARGS", f"--{flag}=100")
    assert compiler_options("tpu") == {}
    options = compiler_options("cuda")
    assert options == compiler_options("gpu") != {}
    jax.jit(lambda x: x + 1).lower(1.0).compile(options)
    jax.config.update("jax_optimization_level", "O0")
    try:
        assert "optimization_level" not in compiler_options("cuda")
    finally:
        jax.config.update("jax_optimization_level", "UNKNOWN")


def test_a_profile_holds_the_steps_that_were_asked_for(tmp_path, cache_dir):
    keys = ("profiler=xplane", "skip_first_n_steps_for_profiler=3", "profiler_steps=4")
    done = run(*arguments(tmp_path, cache_dir, *keys, "steps=20", "eval_interval=-1"))
    assert (done.returncode, done.stderr) == (0, "")
    (trace,) = (tmp_path / "r" / "tensorboard").rglob("*.xplane.pb")
    data = jax.profiler.ProfileData.from_file(str(trace))
    steps = [
        dict(event.stats).get("step_num")
        for plane in data.planes
        for line in plane.lines
        for event in line.events
        if event.name == "train"
    ]
    assert sorted(steps) == [3, 4, 5, 6]


def test_parts_of_the_model_are_named_in_the_program(uncached):
    """Programs of a cache keep the names that they were compiled with."""
    config = make_config("enable_rampup_batch_size=False", "per_device_batch_size=2", devices=1)
    with programs_of(config, json.dumps) as (programs, _, (stage,)):
        text = programs.train_step(stage)[0].as_text()
    for name in ("embedding", "layers", "attention", "mlp", "loss", "optimizer"):
        assert re.search(rf"op_name=\"[^\"]*[/(]{name}[/)]", text), name


def test_an_error_beside_the_compiler_reaches_the_loop():
    """It may not end the compiler's thread alone, for which the loop would wait for ever."""
    config = make_config("enable_rampup_batch_size=False", "per_device_batch_size=2", devices=1)
    asked = []

    def say(line: str) -> None:
        if not line.startswith("wait"):  # which the loop itself says on a busy machine
            raise RuntimeError("no terminal")

    with (
        programs_of(config, say, lambda: asked.append(True)) as (programs, _, (stage,)),
        pytest.raises(TrainingError, match="stage 0 .*no terminal"),
    ):
        programs.train_step(stage)
    assert asked
