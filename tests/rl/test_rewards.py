"""Rewards: functions in processes of their own, and what is said of those that fail."""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from maxramp.errors import ConfigError, TrainingError
from maxramp.rl import rewards as rewards_lib
from maxramp.rl.rewards import Rewards, sources

FUNCTIONS = """
import multiprocessing, os, signal, subprocess, sys, time
import numpy as np

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

def loud(prompts, answers, truths):
    print("x" * 100_000, flush=True)
    return [0] * len(answers)

def huge(prompts, answers, truths):
    return [10**400 for _ in answers]

def digits(prompts, answers, truths):
    return [10**5000 for _ in answers]

def complex_(prompts, answers, truths):
    return list(np.ones(len(answers), np.complex64))

def leaves(prompts, answers, truths):
    sys.exit("bye")

def ended(prompts, answers, truths):
    for number in (signal.SIGTERM, signal.SIGINT):
        os.killpg(0, number)
    return [subprocess.run(["sh", "-c", "kill $$"]).returncode] * len(answers)

def changes(prompts, answers, truths):
    answers[0] += "more"
    truths[0] = prompts.pop()
    return [0.0] * len(answers)

def in_pool(prompts, answers, truths):
    with multiprocessing.Pool(2) as pool:
        return pool.map(len, answers)

def starts(prompts, answers, truths):
    return [subprocess.Popen(["sleep", "600"]).pid] * len(answers)

def starts_and_hangs(prompts, answers, truths):
    open("pid", "w").write(str(starts(prompts, answers, truths)[0]))
    time.sleep(60)

def starts_and_dies(prompts, answers, truths):
    open("pid", "w").write(str(starts(prompts, answers, truths)[0]))
    os._exit(3)

def none_(prompts, answers, truths):
    pass

def large(prompts, answers, truths):
    return [1e300] * len(answers)

def on_cpu(prompts, answers, truths):
    import jax
    assert jax.devices()[0].platform == "cpu"
    return jax.numpy.array([len(a) for a in answers]) / 2

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


def test_each_function_rewards_each_answer_in_order():
    """Each has lists of its own, a CPU for JAX and multiprocessing; what it starts ends with it."""
    actual = work("changes", "length", "right", "process", workers=2)
    assert actual[:, :3].tolist() == [[0, 1, 1], [0, 3, 0], [0, 3, 0]]
    assert len(np.unique(actual[:, 3])) == 2
    actual = work("on_cpu", "in_pool", "starts")
    assert actual[:, :2].tolist() == [[0.5, 1], [1.5, 3], [1.5, 3]]
    assert not is_running(int(actual[0, 2]))


@pytest.mark.parametrize(
    "name, error",
    [
        ("fails", "raised ZeroDivisionError.*on the answer 'bad' to the prompt 'p2'"),
        ("no_number", "returned nan, which is no.*'bad' to the prompt 'p2'"),
        ("short", "returned 0 rewards for 1 answer on the answer 'a' to the prompt 'p1'"),
        ("huge", r"returned 10{76}\.\.\., which is not a finite float32 number"),
        ("digits", "returned a value of type int, which is not a finite float32 number"),
        ("complex_", r"returned .*1\+0j.*, which is not a finite float32 number"),
        ("leaves", "raised SystemExit: bye on the answer 'a' to the prompt 'p1'"),
        ("none_", "returned None, which is not a list of rewards, on the answer 'a'"),
        ("large", r"returned 1e\+300, which is not a finite float32 number"),
    ],
)
def test_a_function_that_fails_is_named_with_its_prompt(name, error):
    namespace = {}
    exec(FUNCTIONS, namespace)
    functions = {f"of_test:{each}": namespace[each] for each in ("length", name)}
    message = rewards_lib._call_all(functions, PROMPTS, ANSWERS, TRUTHS)
    assert re.match(f"rewards: of_test:{name} {error}", message), message


def is_running(pid):
    """Whether a process runs, within 5 seconds; a zombie, which waits for init, does not."""
    for _ in range(100):
        try:
            state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z":
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    "name, error",
    [
        ("fails", "raised ZeroDivisionError.*on the answer 'bad' to the prompt 'p2'"),
        ("starts_and_dies", r"ended \(exit status 3\).*the first to 'p1'"),
        ("starts_and_hangs", "reward_timeout_seconds=2, the first to 'p1'"),
    ],
)
def test_a_failure_in_a_worker_ends_the_step_and_what_the_worker_started(name, error):
    pathlib.Path("pid").write_text(str(2**30))
    functions = ["of_test:length", f"of_test:{name}"]
    with contextlib.closing(Rewards(functions, 1, 2.0)) as rewards:
        with pytest.raises(TrainingError, match=error):
            rewards.submit(PROMPTS, ANSWERS, TRUTHS).result()
        assert not is_running(int(pathlib.Path("pid").read_text()))


def test_the_source_of_a_module_is_found_without_importing_it(tmp_path, monkeypatch):
    for name in ("pkg/__init__.py", "pkg/sub/__init__.py", "pkg/sub/own.py", "bare/sub/own.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"raise SystemExit  # {name}")
    monkeypatch.chdir(tmp_path)
    names = ["pkg.sub.own:f", "pkg.sub:f", "bare.sub.own:f", "pkg.nowhere.own:f", "math:sqrt"]
    actual = [source.decode().partition("# ")[2] for source in sources(names)[:4]]
    assert actual == ["pkg/sub/own.py", "pkg/sub/__init__.py", "bare/sub/own.py", ""]


@pytest.mark.parametrize("name", ["of_test:none", "no_module:f", "of_test:value", "exits:f"])
def test_a_function_that_cannot_be_imported_is_refused(tmp_path, name):
    (tmp_path / "exits.py").write_text('import sys\nsys.exit("usage: exits FILE")\n')
    with pytest.raises(ConfigError, match=f"rewards: {name} cannot be imported"):
        Rewards([name], 1, 30.0)


def test_a_module_that_ends_or_hangs_at_its_import_is_refused(tmp_path, monkeypatch):
    (tmp_path / "dies_early.py").write_text("import os\nos._exit(3)\n")
    (tmp_path / "sleeps.py").write_text("import time\ntime.sleep(60)\n")
    with pytest.raises(ConfigError, match=r"process ended \(exit status 3\) while it imported"):
        Rewards(["dies_early:f"], 1, 30.0)
    monkeypatch.setattr(rewards_lib, "_IMPORT_SECONDS", 0.5)
    with pytest.raises(ConfigError, match="not imported after 0.5 seconds; leave slow work"):
        Rewards(["sleeps:f"], 1, 0.5)


TRAINER = """
import os, signal, sys, time
from maxramp.rl.rewards import Rewards
if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    rewards = Rewards(["of_test:loud", "of_test:ended", "of_test:starts"], 1, 30.0)
    actual = rewards.submit(["p"], ["a"], [None]).result()[0]
    print(actual[:, :2].tolist(), rewards._workers[0].process.pid, file=sys.stderr, flush=True)
    rewards.submit(["p"] * 1000, ["a"] * 1000, [None] * 1000)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_the_trainer_and_not_before(tmp_path):
    """Not by signals to all processes or unread output; programs that they start end with them."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    process = subprocess.Popen(
        [sys.executable, "trainer.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
        start_new_session=True,
    )
    process.stdout.close()
    line = process.stderr.readline()
    assert line.startswith(f"[[0.0, {-float(signal.SIGTERM)}]] "), line + process.stderr.read()
    assert process.wait(30) == -signal.SIGKILL
    # Which ends when nobody can write it any more.
    assert process.communicate(timeout=30)[1] == ""
    assert not is_running(int(line.split()[-1]))
