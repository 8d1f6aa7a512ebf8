"""Real jax.distributed processes on this machine: the same rows whoever reads them."""

import json
import socket
import subprocess
import sys

import pytest
from conftest import BASE, ROOT, TINY, environment

PROGRAM = [sys.executable, str(ROOT / "tests" / "hosts.py")]
TRAIN = [sys.executable, "-m", "maxramp.train"]

# Eight steps on batches of 16, 32 and 48 rows, and held-out rows that no batch divides.
RAMP = [
    *("step_batch_size_schedule=0:16, 48:32, 144:48", "step_batch_size_unit=samples"),
    *("total_samples=240", "text_files=text", "eval_interval=4", "eval_steps=-1"),
    *("eval_fraction=0.1",),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with `text`, and one beside it without."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "with" / "text").mkdir(parents=True)
    (folder / "without").mkdir()
    for i in range(40):
        text = f"file {i}: " + " ".join(str(i * j) for j in range(90))
        (folder / "with" / "text" / f"{i:02}.txt").write_text(text)
    return folder


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(command, processes, devices, folders):
    """Starts a job; process i stands in folders[i]."""
    port, job = free_port(), []
    for i in range(processes):
        job.append(
            subprocess.Popen(
                command,
                cwd=folders[i],
                env=environment(devices)
                | {"MAXRAMP_COORDINATOR": f"127.0.0.1:{port}"}
                | {"MAXRAMP_NUM_PROCESSES": str(processes), "MAXRAMP_PROCESS_ID": str(i)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return job


def finish(job, timeout=300):
    """(exit status, stdout, stderr) of every process."""
    try:
        return [(*p.communicate(timeout=timeout), p.returncode) for p in job]
    finally:
        for p in job:
            p.kill()


def keys(devices, *given, factor=1, tensor=1, accumulation=1):
    """The arguments of a job; `accumulation` is that of the last stage."""
    values = dict(argument.split("=", 1) for argument in (*TINY, *RAMP))
    values |= {
        "per_device_batch_size": 48 / devices / accumulation,
        "eval_per_device_batch_size": 16 / devices,
        "ici_tensor_parallelism": tensor,
        "expansion_factor_real_data": factor,
    }
    values |= dict(argument.split("=", 1) for argument in given)
    return [BASE, *(f"{name}={value}" for name, value in values.items())]


def places(data, processes, factor):
    """Where the processes of a job stand: only those that should read have the data there."""
    return [data / ("with" if i % factor == 0 else "without") for i in range(processes)]


def ask(data, requests, processes=1, devices=1):
    """What the loader of every process answers, by request: (first step, expansion factor, keys).

    Requests are answered by jobs of one factor, since it says who stands where the data is.
    """
    answers = [None] * len(requests)
    for factor in {factor for _, factor, _ in requests}:
        numbers = [i for i, request in enumerate(requests) if request[1] == factor]
        program = [*PROGRAM, json.dumps([[requests[i][0], requests[i][2]] for i in numbers])]
        job = start(program, processes, devices, places(data, processes, factor))
        printed = []
        for out, err, status in finish(job):
            assert status == 0, err[-2000:]
            printed.append([json.loads(line) for line in out.splitlines() if line[0] == "{"])
        for i, answer in zip(numbers, zip(*printed, strict=True), strict=True):
            answers[i] = answer
    return answers


@pytest.fixture(scope="module")
def alone(data):
    """What one process with one device reads."""
    ((answer,),) = ask(data, [(0, 1, keys(1))])
    assert len(answer["steps"]) == len(set(answer["steps"])) == 8
    assert answer["share"] == [16, 32, 48] and answer["moved"] == [0] * 8
    return answer


def check(data, alone, processes, devices, cases):
    """Jobs of other shapes read the rows of one process, and move exactly what has to be moved.

    Args:
      cases: (factor, tensor parallelism, accumulation, first step).
    """
    count = processes * devices
    requests = [
        (first, factor, keys(count, factor=factor, tensor=tensor, accumulation=accumulation))
        for factor, tensor, accumulation, first in cases
    ]
    for case, answer in zip(cases, ask(data, requests, processes, devices), strict=True):
        factor, tensor, _, first = case
        # The batches of all steps; a device holds batch * tensor / count rows, and those of all
        # devices that do not read themselves are moved.
        batches = [16, 16, 16, 32, 32, 32, 48, 48][first:]
        moved = [b * tensor * (count - count // factor) // count * 17 * 4 for b in batches]
        for process, seen in enumerate(answer):
            assert seen["steps"] == alone["steps"][first:], case
            assert seen["evaluations"] == alone["evaluations"], case
            assert seen["moved"] == moved, case
            assert seen["hash"] == alone["hash"]
            assert seen["reads"] == (process % factor == 0) == any(seen["share"])


@pytest.mark.parametrize(
    ("processes", "devices", "cases"),
    (
        (4, 1, ((4, 2, 1, 0), (4, 1, 3, 5))),
        (4, 2, ((2, 1, 1, 0), (2, 4, 3, 1))),
        (2, 1, ((1, 2, 1, 0), (1, 1, 1, 2))),
    ),
    ids=("4x1, factor 4", "4x2, factor 2", "2x1, factor 1"),
)
def test_rows_depend_on_no_reader(data, alone, processes, devices, cases):
    check(data, alone, processes, devices, cases)


@pytest.mark.slow
@pytest.mark.parametrize("processes", (1, 2, 4))
@pytest.mark.parametrize("devices", (1, 2, 4))
def test_rows_depend_on_no_reader_in_any_shape(data, alone, processes, devices):
    cases = [
        (factor, tensor, accumulation, 0)
        for factor in (1, 2, 4)
        for tensor in (1, 2)
        for accumulation in (1, 3)
        if processes % factor == 0 and processes * devices % tensor == 0
    ]
    check(data, alone, processes, devices, cases)
