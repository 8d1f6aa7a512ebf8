"""The largest batch under each remat policy: the search, and the real compiler's edge."""

import dataclasses
import re

import pytest
from conftest import make_config, make_mesh

from maxramp.errors import ConfigError
from maxramp.plan import main as plan_main
from maxramp.planning import machine as machines
from maxramp.planning.fit import by_speed, largest_batch, most, pods
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate

SHAPES = {
    "line": lambda rows: 4 + 0.19 * rows,
    "steps": lambda rows: 4 + 0.19 * rows + 0.5 * (rows // 128),
    "flat, then a line": lambda rows: 1 + 0.2 * max(rows, 50),
    "faster": lambda rows: 1 + 0.05 * rows + 2e-4 * rows**2,
    "slower": lambda rows: 20 + rows**0.9,
    "one row": lambda rows: 40 * rows,
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_search_finds_the_edge_in_few_compiles(name):
    asked = set()

    def needed(rows):
        asked.add(rows)
        return SHAPES[name](rows)

    found = most(needed, 50)
    assert SHAPES[name](found) <= 50 < SHAPES[name](found + 1)
    assert len(asked) <= 16
    assert most(needed, 0.5) == 0


@pytest.fixture(scope="module")
def quick():
    """One device of this process, and a compiler that optimizes little."""
    here = machines.here()
    return dataclasses.replace(
        here, devices=here.devices[:1], options={"xla_backend_optimization_level": 0}
    )


def arguments_of(config, machine, limit):
    return (config.batch, config.schedule, make_mesh(config), machine, limit)


@pytest.mark.slow
def test_what_fits_of_this_machine(quick):
    """What it prints fits by the compiler's account, and one row more does not."""
    config = make_config("enable_rampup_batch_size=False", "max_target_length=64", devices=1)
    lines = largest_batch(config.recipe, *arguments_of(config, quick, 0.004)).splitlines()
    size, used, limit, above = re.fullmatch(
        r"per_device_batch_size: (\d+)  # (\S+) of (\S+) GiB; \d+ would need (\S+)", lines[0]
    ).groups()
    assert int(size) > 1 and float(used) <= float(limit) == 0.004 <= float(above)
    others = re.fullmatch(
        r"remat_policy: none  # the cheapest that fits; minimal fits (\d+); full fits (\d+)",
        lines[1],
    ).groups()
    assert int(size) <= int(others[0]) <= int(others[1])


def test_nothing_fits(quick):
    config = make_config("enable_rampup_batch_size=False", devices=1)
    with pytest.raises(ConfigError, match="one row per 1 device needs .* device_memory_gib=0.0001"):
        largest_batch(config.recipe, *arguments_of(config, quick, 0.0001))


@pytest.mark.slow
def test_the_ways_of_a_batch_by_speed(quick):
    """Each policy's two largest micro batches, with a machine whose time is made up."""
    config = make_config("enable_rampup_batch_size=False", "per_device_batch_size=4", devices=1)
    ramp = RampupBatchManager(config.batch, 1)
    rate = LearningRate.of(config.schedule, ramp)
    timed = dataclasses.replace(quick, work=lambda text: {"step_seconds": 1 / len(text)})
    ways = by_speed(pods(config.recipe, rate, make_mesh(config), timed, 1.0, 1), ramp.stages[0])
    assert len(ways) == 6 and {way["remat_policy"] for way in ways} == {"none", "minimal", "full"}
    for way in ways:
        shape = (way["per_device_batch_size"], way["gradient_accumulation_steps"])
        assert shape in ((4, 1), (2, 2)) and way["global_batch_size"] == 4
    times = [way["step_seconds"] for way in ways]
    assert times == sorted(times)


def test_fit_is_a_command(capsys):
    """It refuses a machine that it cannot compile for as maxramp.compile does."""
    assert plan_main(["configs/base.yml", "--fit", "compile_topology=h200:2"]) == 2
    assert "compile_topology=h200:2 " in capsys.readouterr().err
