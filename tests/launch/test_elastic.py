"""Elastic launches on this machine: real nodes are lost and come back; the training is the same."""

import json
import os
import pathlib
import re
import signal
import subprocess
import time

import pytest
from conftest import BASE, complete, refused
from jobs import wait_until
from test_launch import Launched, arguments, gone, plan, rows_of, steps_of

from maxramp.config.load import load
from maxramp.config.resolve import meshes_of
from maxramp.launch.jobs import Run
from maxramp.launch.local import LocalCluster, find_lost
from maxramp.launch.supervisor import say_returned
from maxramp.rampup.schedule import RampupBatchManager

# 12 rows a step divide over 1, 2, 3 and 4 nodes; then 8 over 1, 2 and 4, and 16.
ELASTIC = (
    *("elastic=True", "per_device_batch_size=4", "step_batch_size_schedule=0:12 480:8 640:16"),
    *("steps=70", "node_schedule=fixed", "checkpoint_period=5", "node_rest_seconds=5"),
    *("ici_data_parallelism=-1", "ici_fsdp_parallelism=1"),
)


def same_training(folder, alone) -> None:
    assert rows_of(folder) == rows_of(alone)
    ours, theirs = steps_of(folder), steps_of(alone)
    assert [r["learning_rate"] for r in ours] == [r["learning_rate"] for r in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=2e-5), mine["step"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache_dir):
    folder = tmp_path_factory.mktemp("alone")
    keys = [x for x in ELASTIC if not x.startswith(("elastic", "node_rest"))]
    complete(*arguments(folder, cache_dir, *keys, "num_nodes=1", "run_name=alone"))
    return folder / "alone"


@pytest.mark.slow
def test_training_is_the_same_when_nodes_are_lost_and_come_back(undisturbed, tmp_path, cache_dir):
    """One is killed; process 0, while the job starts again; then one while that one starts. The run
    continues on as many nodes as divide its batch, and grows at a save."""
    line = arguments(tmp_path, cache_dir, *ELASTIC, "run_name=x")
    launched = Launched(line, tmp_path / "x")
    victims = launched.wait_for(7, trainers=4)
    os.kill(by_process_id(victims)[1], signal.SIGKILL)
    second = following(launched, victims)
    os.kill(second[0], signal.SIGKILL)
    third = following(launched, [*victims, *second.values()])
    os.kill(max(third.values()), signal.SIGKILL)
    assert launched.end() == 0, launched.text()
    same_training(tmp_path / "x", undisturbed)
    text = launched.text()
    assert len(re.findall(r"lost node \d: it rests for (5|10|20) s", text)) == 3, text
    assert text.count("planned for 4 nodes of 1; the next start") >= 1, text
    assert text.count("took back node") >= 1 and "start again" not in text, text
    devices = {record["devices"] for record in steps_of(tmp_path / "x")}
    assert 4 in devices and len(devices) > 1
    assert gone(launched)


@pytest.mark.long
def test_a_node_that_keeps_failing_is_left_out(undisturbed, tmp_path, cache_dir):
    """8 rows divide over two of the three left, 12 over all; never fewer than min_nodes."""
    more = ("max_node_failures=1", "min_nodes=2", "run_name=x")
    launched = Launched(arguments(tmp_path, cache_dir, *ELASTIC, *more), tmp_path / "x")
    os.kill(by_process_id(launched.wait_for(7, trainers=4))[3], signal.SIGKILL)
    assert launched.end() == 0, launched.text()
    same_training(tmp_path / "x", undisturbed)
    assert "lost node 3: left out for good after max_node_failures=1" in launched.text()
    nodes = {}
    for record in steps_of(tmp_path / "x"):
        nodes.setdefault(record["global_batch_size"], set()).add(record["devices"])
    assert nodes == {12: {3, 4}, 8: {2}, 16: {2}}, launched.text()
    jobs = json.loads((tmp_path / "x" / "plan.json").read_text())["jobs"]
    for record in steps_of(tmp_path / "x"):
        last = [job for job in jobs if job["first_step"] <= record["step"]][-1]
        assert record["nodes"] == last["nodes"] == record["devices"]


@pytest.mark.slow
def test_a_signal_ends_a_launch_whose_nodes_rest(tmp_path, cache_dir):
    """Two nodes are killed at once, and both rest; the launch waits for one of them."""
    more = ("step_batch_size_schedule=0:12", "min_nodes=3", "node_rest_seconds=500", "run_name=x")
    launched = Launched(arguments(tmp_path, cache_dir, *ELASTIC, *more), tmp_path / "x")
    victims = by_process_id(launched.wait_for(7, trainers=4))
    for process_id in (1, 3):
        os.kill(victims[process_id], signal.SIGKILL)
    wait_until(lambda: "waiting for 3 nodes: 2 are available" in launched.text(), 60)
    assert {*re.findall(r"lost node (\d): it rests for 500 s", launched.text())} == {"1", "3"}
    launched.process.send_signal(signal.SIGTERM)
    assert launched.end(10) == 76, launched.text()
    assert gone(launched)


def following(launched: Launched, before: list[int]) -> dict[int, int]:
    """Waits for all trainers of the job after these; returns them by their process ids."""

    def new() -> list[int]:
        return [pid for pid in launched.trainers() if pid not in before]

    def is_complete() -> bool:
        jobs = re.findall(r"^launch   (\d) process", launched.text(), re.MULTILINE)
        return len(new()) == int(jobs[-1]) < 4

    wait_until(is_complete)
    return by_process_id(new())


def by_process_id(pids: list[int]) -> dict[int, int]:
    numbers = {}
    for pid in pids:
        variables = pathlib.Path(f"/proc/{pid}/environ").read_text().split("\0")
        variable = next(word for word in variables if word.startswith("MAXRAMP_PROCESS_ID="))
        numbers[int(variable.partition("=")[2])] = pid
    return numbers


def planned(*arguments: str) -> RampupBatchManager:
    config = load([BASE, "num_nodes=8", "devices_per_node=2", "restart_minutes=0", *arguments])
    return RampupBatchManager(config.batch, meshes=meshes_of(config))


def planned_launch(folder: pathlib.Path, *more: str) -> Run:
    return plan(folder, *ELASTIC, *more, "run_name=x")


def test_a_stage_takes_the_most_nodes_that_its_batch_divides_over():
    """Ranks of 2 a node: 24 rows over 2, 4, 6, 8, 12 ranks; 16 over 2, 4, 8, 16."""
    ramp = planned(
        *("step_batch_size_schedule=0:24 2400:16", "step_batch_size_unit=samples"),
        *("node_schedule=nemo", "per_device_batch_size=1", "ici_data_parallelism=-1"),
        "ici_fsdp_parallelism=1",
    )
    stage, later = ramp.stages
    assert (stage.nodes, later.nodes) == (6, 8) or (stage.nodes, later.nodes) == (8, 8)
    for available in range(1, 9):
        divides = [n for n in range(1, min(available, stage.nodes) + 1) if 24 % (2 * n) == 0]
        fitted = ramp.fit(stage, available)
        assert fitted.nodes == max(divides), available
        rows = fitted.per_device_batch_size * fitted.devices * fitted.gradient_accumulation_steps
        assert rows == 24
    assert [ramp.fit(later, n).nodes for n in range(1, 9)] == [1, 2, 2, 4, 4, 4, 4, 8]


def test_a_launch_says_why_it_leaves_a_node_and_which_keys_take_it(tmp_path):
    """Weights in 3 shards do not divide, 12 rows do; a batch of 8 rows does over no keys."""
    shards = ("ici_data_parallelism=1", "ici_fsdp_parallelism=-1", "base_emb_dim=64")
    run = planned_launch(tmp_path, *shards)
    reason = run.refusal(0, run.fit(0, 3), 3)
    assert "=64 does not divide over the fsdp axis of 3 devices" in reason
    keys = "ici_data_parallelism=-1 ici_fsdp_parallelism=1"
    assert reason.endswith(f"; {keys} lets it run on 3"), reason
    assert planned_launch(tmp_path, *shards, *keys.split()).fit(0, 3) == 3
    reason = run.refusal(50, run.fit(50, 3), 3)
    assert run.fit(50, 3) == 2 and "lets it run" not in reason
    assert run.refusal(0, 4, 4) == ""


def test_lost_nodes_rest_longer_each_time(tmp_path, capsys):
    more = ("node_rest_seconds=1", "max_node_failures=3")
    cluster = LocalCluster(planned_launch(tmp_path, *more), tmp_path / "nodes")
    assert cluster.lose(1) == "it rests for 1 s"
    assert cluster.usable_nodes() == [0, 2, 3]
    time.sleep(1.01)
    assert cluster.usable_nodes() == [0, 1, 2, 3]
    say_returned(cluster._away, [0, 1])
    say_returned(cluster._away, [0, 1])
    assert capsys.readouterr().out == "launch   took back node 1\n"
    assert cluster.lose(1) == "it rests for 2 s"
    assert "left out for good" in cluster.lose(1)
    assert cluster.usable_nodes() == [0, 2, 3]
    assert not cluster.start(4, 0)  # and does not wait


@pytest.mark.parametrize(
    "codes, ended, lost",
    [
        ([77, -9, 77], [1, 0, 2], [1]),
        ([-9, -6, -6], [1, 0, 2], [0]),  # JAX aborts those whose process 0 is gone
        ([77, -6, 77], [1, 0, 2], [1]),
        ([-9, -9, 77], [0, 1, 2], [0, 1]),
        ([77, None, 77], [0, 2], [1]),  # it hung until the others gave up
    ],
)
def test_lost_nodes_are_those_whose_processes_were_killed_or_hung(codes, ended, lost):
    processes = [subprocess.Popen.__new__(subprocess.Popen) for _ in codes]
    for process, code in zip(processes, codes, strict=True):
        process.returncode, process._child_created = code, False
    assert find_lost([processes[i] for i in ended], processes) == lost


@pytest.mark.parametrize(
    "more, words",
    [
        (["ici_data_parallelism=4", "ici_fsdp_parallelism=1"], ("stage 0 takes 4 nodes", "-1")),
        (["min_nodes=4"], ("min_nodes=4 allows no fewer",)),
    ],
)
def test_an_elastic_run_that_cannot_lose_a_node_is_refused(more, words, tmp_path):
    with refused("elastic=True: ", *words):
        planned_launch(tmp_path, *more)
