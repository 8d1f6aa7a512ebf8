"""Rewards: functions in processes of their own, and what is said of those that fail."""

import contextlib

import numpy as np
import pytest

from maxramp.errors import ConfigError, TrainingError
from maxramp.rl.rewards import Rewards

FUNCTIONS = """
import os, time

def length(prompts, answers, truths):
    return [len(a) for a in answers]

def right(prompts, answers, truths):
    return [float(a == t) for a, t in zip(answers, truths)]

def process(prompts, answers, truths):
    return [os.getpid()] * len(answers)

def fails(prompts, answers, truths):
    return [1 / (a != "bad") for a in answers]

def no_number(prompts, answers, truths):
    return [float("nan") if a == "bad" else 0.0 for a in answers]

def short(prompts, answers, truths):
    return [0.0] * (len(answers) - 1)

def hangs(prompts, answers, truths):
    time.sleep(60 if "bad" in answers else 0)
    return [0.0] * len(answers)

def dies(prompts, answers, truths):
    os._exit(3)

value = 3
"""
PROMPTS, ANSWERS, TRUTHS = ["p1", "p2", "p3"], ["a", "bad", "ccc"], ["a", "b", None]


@pytest.fixture(autouse=True)
def in_folder(tmp_path, monkeypatch):
    (tmp_path / "of_test.py").write_text(FUNCTIONS)
    monkeypatch.chdir(tmp_path)


def work(*names, workers=1, timeout=30.0):
    functions = [f"of_test:{name}" for name in names]
    with contextlib.closing(Rewards(functions, workers, timeout)) as rewards:
        return rewards.submit(PROMPTS, ANSWERS, TRUTHS).result()[0]


def test_each_function_of_each_answer():
    """In the order of the answers, however many processes share them."""
    found = work("length", "right", "process", workers=2)
    assert found[:, :2].tolist() == [[1, 1], [3, 0], [3, 0]]
    assert len(np.unique(found[:, 2])) == 2


@pytest.mark.parametrize(
    "name, error",
    [
        ("fails", "of_test:fails raised ZeroDivisionError.*on the answer 'bad' to the prompt 'p2'"),
        ("no_number", "of_test:no_number returned nan, which is no.*'bad' to the prompt 'p2'"),
        ("short", "of_test:short returned 0 rewards for 1 answers on the answer 'a' to the .*'p1'"),
        ("dies", r"ended \(exit status 3\).*the first to 'p1'"),
    ],
)
def test_one_that_fails_is_named_with_its_prompt(name, error):
    with pytest.raises(TrainingError, match=error):
        work("length", name)


def test_one_that_hangs_is_ended():
    with pytest.raises(TrainingError, match="reward_timeout_seconds=2, the first to 'p1'"):
        work("hangs", timeout=2.0)


@pytest.mark.parametrize("name", ["of_test:none", "no_module:f", "of_test:value"])
def test_one_that_is_not_there(name):
    with pytest.raises(ConfigError, match=f"rewards: {name} cannot be imported"):
        Rewards([name], 1, 30.0)
