"""Tasks that a run is evaluated on while it trains."""

import itertools
import math

import pytest
from conftest import BASE, TINY, run
from made_tasks import write_tasks

from maxramp.data.keys import EvalKeys
from maxramp.run.metrics import read_records, tag_of
from maxramp.run.picture import figure_of

KEYS = (
    *("step_batch_size_schedule=0:4 40:8", "step_batch_size_unit=samples", "total_samples=104"),
    *("max_target_length=128", "eval_interval=-1", "evaluate_tasks=[made_choices,made_writing]"),
    *("evaluate_tasks_interval=24", "enable_tensorboard=True"),
)


def keys_of(**given) -> EvalKeys:
    values = {"eval_interval": -1, "eval_steps": 8, "eval_per_device_batch_size": 0.0}
    values |= {"log_eval_batches": False, "evaluate_tasks_include_path": ""}
    return EvalKeys(**values, **given)


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


def test_they_are_drawn():
    assert tag_of("task_made_acc") == "tasks/task_made_acc"
    step = {"step": 0, "loss": 1.0, "consumed_samples": 8, "global_batch_size": 8}
    found = {"step": 0, "consumed_samples": 8, "task_made_acc": 0.5}
    figure = figure_of([step, found], "run")
    assert "task_made_acc" in [axes.get_title(loc="left") for axes in figure.axes]


@pytest.mark.slow
def test_a_restart_evaluates_neither_twice_nor_too_seldom(tmp_path, cache_dir, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    tasks = write_tasks(tmp_path / "tasks")
    line = (BASE, *TINY, *KEYS, f"evaluate_tasks_include_path={tasks}")
    line += (f"base_output_directory={tmp_path}", f"jax_cache_dir={cache_dir}")

    def evaluated(name, *more):
        done = run(*line, f"run_name={name}", *more, timeout=600)
        records = read_records(tmp_path / name / "metrics.jsonl")
        return done, [
            {k: v for k, v in r.items() if k != "eval_seconds"}
            for r in records
            if "task_made_choices_acc" in r
        ]

    done, whole = evaluated("whole")
    assert done.returncode == 0, done.stderr
    assert [r["consumed_samples"] for r in whole] == [24, 48, 72, 96, 104]
    assert all(0 <= r["task_made_choices_acc"] <= 1 for r in whole)
    assert all(math.isfinite(r["task_made_writing_exact_match"]) for r in whole)
    assert "made_choices_acc" in done.stdout

    stopped, first = evaluated("parts", "stop_at_stage_end=True")
    assert stopped.returncode == 75 and first == whole[:1], stopped.stderr
    done, both = evaluated("parts", "stop_at_stage_end=True")
    assert done.returncode == 0 and both == whole, done.stderr

    refused, _ = evaluated("wrong", "evaluate_tasks=[made_choises]")
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "evaluate_tasks=made_choises: no such task" in refused.stderr
    assert "did you mean made_choices?" in refused.stderr
