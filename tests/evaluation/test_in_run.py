"""Tasks that a run is evaluated on while it trains."""

import itertools
import json
import math
import pathlib
import signal
import sys

import pytest
from conftest import BASE, TINY, command, complete, environment
from forked import run_forked
from jobs import finish, start
from made_tasks import write_tasks
from preference_pairs import keys_of as keys_of_pairs
from preference_pairs import pairs, write_pairs, write_tokenizer
from small_models import write_folder

from maxramp.data.keys import EvalKeys
from maxramp.run.metrics import read_records, tag_of
from maxramp.run.picture import make_run_figure

KEYS = (
    *("step_batch_size_schedule=0:4 40:8", "step_batch_size_unit=samples", "total_samples=104"),
    *("max_target_length=128", "eval_interval=-1", "evaluate_tasks=[made_choices,made_writing]"),
    *("evaluate_tasks_interval=24", "enable_tensorboard=True"),
)
PASSES = 7  # of one evaluation: four of choices, three of writing

# Trains, and sends a signal to its process where an evaluation is between two passes: behind the
# pass of the second argument, counted from the start, on the process of the third.
SIGNALLED = """
import os, sys
import jax
from maxramp import train
from maxramp.evaluation.in_run import RunTasks
from maxramp.processes.ending import Preemption, end_process
number, last, process, passes = *map(int, sys.argv[1:4]), [0]
between = RunTasks._pause
def pause(self, line):
    passes[0] += 1
    if passes[0] == last and jax.process_index() == process:
        os.kill(os.getpid(), number)
        while number == 15 and jax.process_count() == 1 and not self._job.preemption._asked:
            pass
    between(self, line)
RunTasks._pause = pause
end_process(train.main(sys.argv[4:], Preemption()))
"""
# Of a task: what a rehearsal answers is scored, what a model answers is not until MENDED is set.
FAILS = """
import os

def process(doc, results):
    scores = [score for score, _ in results]
    return {"acc": 1 / (bool(os.environ["MENDED"]) or {*scores} == {-1.0})}
"""


def keys_of(**keys) -> EvalKeys:
    values = {"eval_interval": -1, "eval_samples": 8, "eval_per_device_batch_size": 0.0}
    values |= {"log_eval_batches": False, "evaluate_tasks_include_path": ""}
    return EvalKeys(**values | keys)


def test_when_tasks_are_due():
    """At multiples of the interval in samples, whatever the batch, and at the end."""
    keys = keys_of(evaluate_tasks=["one"], evaluate_tasks_interval=24)
    for sizes, expected in (
        ([4] * 26, [24, 48, 72, 96, 104]),
        ([4] * 10 + [8] * 8, [24, 48, 72, 96, 104]),
        ([40, 64], [40, 104]),
        ([20] * 5 + [4], [40, 60, 80, 100, 104]),
    ):
        ends = list(itertools.accumulate(sizes))
        pairs = zip([0, *ends], ends, strict=False)
        assert [e for b, e in pairs if keys.tasks_are_due(b, e, e == 104)] == expected
    never = keys_of(evaluate_tasks=[], evaluate_tasks_interval=24)
    assert not never.tasks_are_due(0, 104, True)
    at_the_end = keys_of(evaluate_tasks=["one"], evaluate_tasks_interval=-1)
    assert at_the_end.tasks_are_due(96, 104, True) and not at_the_end.tasks_are_due(0, 96, False)


def test_a_run_of_any_length_is_evaluated_at_its_quarters():
    """With eval_interval=0; and after the first step, where its curve begins."""
    keys = keys_of(evaluate_tasks=[], evaluate_tasks_interval=-1, eval_interval=0)
    for total, expected in ((35, [1, 9, 18, 27, 35]), (2, [1, 2]), (800, [1, 200, 400, 600, 800])):
        assert [n for n in range(1, total + 1) if keys.due(n, n - 1, n, total)] == expected


def test_numbers_of_tasks_are_drawn():
    assert tag_of("task_made_acc") == "tasks/task_made_acc"
    step = {"step": 0, "loss": 1.0, "consumed_samples": 8, "global_batch_size": 8}
    record = {"step": 0, "consumed_samples": 8, "task_made_acc": 0.5}
    figure = make_run_figure([step, record], "run")
    assert "task_made_acc" in [axes.get_title(loc="left") for axes in figure.axes]


@pytest.fixture(scope="module")
def line(tmp_path_factory, cache_dir, offline):
    """The command line of a run with tasks, without its name."""
    pytest.importorskip("lm_eval")
    folder = tmp_path_factory.mktemp("in_run")
    tasks = write_tasks(folder / "tasks")
    keys = (BASE, *TINY, *KEYS, f"evaluate_tasks_include_path={tasks}")
    return *keys, f"base_output_directory={folder}", f"jax_cache_dir={cache_dir}"


def folder_of(line, name):
    (base,) = (x.partition("=")[2] for x in line if x.startswith("base_output_directory="))
    return pathlib.Path(base) / name


def evaluations(line, name):
    """The records of evaluations on tasks, without their times."""
    records = read_records(folder_of(line, name) / "metrics.jsonl")
    return [
        {k: v for k, v in r.items() if k not in ("eval_seconds", "save_seconds", "time", "goodput")}
        for r in records
        if "task_made_choices_acc" in r
    ]


@pytest.fixture(scope="module")
def whole(line):
    """A run that nothing ended: what it wrote, and its evaluations."""
    done = complete(*line, "run_name=whole", timeout=600)
    return done, evaluations(line, "whole")


@pytest.mark.slow
def test_tasks_are_evaluated_at_their_samples_by_programs_compiled_ahead(line, whole):
    done, records = whole
    assert [r["consumed_samples"] for r in records] == [24, 48, 72, 96, 104]
    assert all(0 <= r["task_made_choices_acc"] <= 1 for r in records)
    assert all(math.isfinite(r["task_made_writing_exact_match"]) for r in records)
    assert "made_choices_acc" in done.stdout

    # Each program was compiled ahead, once for all evaluations, in the order of use.
    ready = [text.split(":")[0] for text in done.stdout.splitlines() if text.startswith("ready")]
    assert len(ready) == len({*ready})
    stages = [i for i, text in enumerate(ready) if "stage" in text]
    assert stages == [0, len(ready) - 1]


@pytest.mark.slow
def test_an_evaluation_that_a_signal_ends_is_made_once_afterwards(line, whole):
    def signalled(number, last):
        program = (sys.executable, "-c", SIGNALLED, *map(str, (number, last, 0)), *line)
        done = run_forked((*program, "run_name=signals"), environment(), timeout=600)
        return done, evaluations(line, "signals")

    def saved_numbers():
        steps = folder_of(line, "signals") / "checkpoints"
        last = max(steps.iterdir(), key=lambda path: int(path.name))
        return json.loads((last / "checkpoint.json").read_text())["evaluation"]

    _, expected = whole
    done, records = signalled(signal.SIGTERM, PASSES + 3)  # in the second one, at sample 48
    assert done.returncode == 76 and records == expected[:1], done.stderr
    assert "stopped by a signal after step 10, saved" in done.stdout and not saved_numbers()

    done, records = signalled(signal.SIGKILL, 2 * PASSES + 5)  # that one, 72, and in that of 96
    assert done.returncode == -signal.SIGKILL and records == expected[:3], done.stderr
    assert saved_numbers()  # the checkpoint has them now

    done, records = signalled(signal.SIGTERM, 1000)
    assert done.returncode == 0 and records == expected and saved_numbers(), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "interval, failed_at", [(24, 24), pytest.param(-1, 104, marks=pytest.mark.long)]
)
def test_a_task_that_fails_loses_no_state(line, tmp_path, interval, failed_at):
    """The state is saved without the numbers; mended, the run is the one that nothing ended."""
    (tmp_path / "code.py").write_text(FAILS)
    text = (folder_of(line, "tasks") / "made_choices.yaml").read_text()
    text = text.replace("made_choices", "made_failing")
    text += "process_results: !function code.process\n"
    (tmp_path / "made_failing.yaml").write_text(text)
    line = (*line, f"evaluate_tasks_include_path={tmp_path}", "evaluate_tasks=[made_failing]")
    line += (f"evaluate_tasks_interval={interval}", "eval_interval=2", "eval_samples=8")
    line += ("enable_tensorboard=False", f"base_output_directory={tmp_path}")

    def trained(name, mended, *more):
        variables = {"MENDED": mended} | environment()
        done = run_forked(command(*line, *more, name), variables, 300)
        records = read_records(tmp_path / name.partition("=")[2] / "metrics.jsonl")
        times = ("_seconds", "per_second", "per_device", "restarted", "time", "goodput")
        return done, [{k: v for k, v in r.items() if not k.endswith(times)} for r in records]

    done, whole = trained("run_name=whole", "yes")
    assert done.returncode == 0, done.stderr
    done, records = trained("run_name=run", "")
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "the tasks made_failing: division by zero (ZeroDivisionError)" in done.stderr
    steps = (tmp_path / "run" / "checkpoints").iterdir()
    last = json.loads((max(steps, key=lambda p: int(p.name)) / "checkpoint.json").read_text())
    assert last["consumed_samples"] == failed_at == records[-1]["consumed_samples"]
    assert not any(name.startswith("task_") for name in last["evaluation"])
    done, records = trained("run_name=run", "yes")
    assert done.returncode == 0 and records == whole, done.stderr

    best = "checkpoint_best=highest task_made_failing_accuracy"
    done, records = trained("run_name=other", "yes", best)
    assert done.returncode == 2 and records == []
    assert "have no task_made_failing_accuracy, but eval_loss, eval_tokens, task_" in done.stderr


@pytest.mark.slow
def test_a_signal_to_one_process_ends_both_after_the_same_pass(line, tmp_path):
    keys = (*line, "run_name=two", "hang_timeout_seconds=60")
    program = (sys.executable, "-c", SIGNALLED, *map(str, (signal.SIGTERM, 3, 1)), *keys)
    (_, first, one), (_, _, two) = finish(start(program, 2, 1, [tmp_path] * 2), 300)
    assert (one, two) == (76, 76), first
    assert evaluations(line, "two") == []


@pytest.mark.long
def test_a_run_with_adapters_is_evaluated_as_by_the_command(tmp_path, cache_dir, offline):
    pytest.importorskip("lm_eval")
    tasks, model = write_tasks(tmp_path / "tasks"), tmp_path / "model"
    model.mkdir()
    size = write_tokenizer(model)
    write_folder(model, "llama3.1", vocab_size=288, bos_token_id=0, eos_token_id=size - 2)
    file = write_pairs(tmp_path / "pairs.jsonl", pairs(16))
    line = (BASE, *keys_of_pairs(model, file), "lora_rank=2", "learning_rate=0.1", "steps=4")
    line += ("per_device_batch_size=2", "phases.8.ici_tensor_parallelism=2")
    line += ("phases.8.ici_fsdp_parallelism=1", "phases_unit=samples", "model_name=hf")
    line += (f"evaluate_tasks_include_path={tasks}", "evaluate_tasks=[made_choices,made_writing]")
    line += ("evaluate_tasks_interval=4", f"jax_cache_dir={cache_dir}", "enable_tensorboard=False")
    line += (f"base_output_directory={tmp_path}", "run_name=all")
    complete(*line, devices=2, timeout=600)
    records = [r for r in read_records(tmp_path / "all/metrics.jsonl") if "eval_seconds" in r]
    assert [r["consumed_samples"] for r in records] == [4, 8, 12, 16]

    output, names = tmp_path / "found.json", "made_choices,made_writing"
    asked = ("--tasks", names, "--include_path", str(tasks), "--output_path", str(output))
    complete(str(tmp_path / "all"), *asked, module="evaluate", timeout=600)
    results = json.loads(output.read_text())["results"]
    for name, metric in (
        ("made_choices", "acc"),
        ("made_choices", "acc_norm"),
        ("made_writing", "exact_match"),
    ):
        assert records[-1][f"task_{name}_{metric}"] == results[name][f"{metric},none"]
