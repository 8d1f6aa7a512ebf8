"""The largest batch under each remat policy: the search, and the real compiler's edge."""

import dataclasses
import re
import sys
import types

import pytest
from conftest import make_config

from maxramp.errors import ConfigError
from maxramp.plan import main as plan_main
from maxramp.planning import compiled
from maxramp.planning import machine as machines
from maxramp.planning.compile_target import CompileTarget, count_fitting
from maxramp.rampup.schedule import RampupBatchManager


@pytest.mark.parametrize("most", (0, 1, 2, 7, 8, 100, 1023))
def test_few_compiles_find_the_largest_size_that_fits(most):
    asked = set()

    def fits(rows):
        asked.add(rows)
        return rows <= most

    assert count_fitting(range(1, sys.maxsize), fits) == most
    assert len(asked) <= 2 * most.bit_length() + 1
    divisors = [size for size in range(1, 721) if 720 % size == 0]
    asked.clear()
    assert count_fitting(divisors, fits) == sum(size <= most for size in divisors)
    assert len(asked) <= 10
    assert count_fitting([], fits) == 0


@pytest.fixture(scope="module")
def one_device():
    """One device of this process."""
    machine = machines.local_machine()
    return dataclasses.replace(machine, devices=machine.devices[:1])


def target_for(config, machine, limit=1.0):
    """The compiler of a machine, and the shape of the config's last stage."""
    ramp = RampupBatchManager(config.batch, len(machine.devices))
    target = CompileTarget(config.replace(device_memory_gib=limit), ramp, machine)
    return target, ramp.stages[-1].spec


@pytest.mark.slow
def test_the_largest_batch_of_this_machine_fits(one_device):
    """What it prints fits by the compiler's account, and one row more does not."""
    config = make_config("enable_rampup_batch_size=False", "max_target_length=64", devices=1)
    target, _ = target_for(config, one_device, 0.004)
    lines = target.largest_batch().splitlines()
    size, used, limit, above = re.fullmatch(
        r"per_device_batch_size: (\d+)  # (\S+) of (\S+) GiB; \d+ would need (\S+)", lines[0]
    ).groups()
    assert int(size) > 1 and float(used) <= float(limit) == 0.004 <= float(above)
    others = re.fullmatch(
        r"remat_policy: none  # the cheapest that fits; minimal fits (\d+); full fits (\d+)",
        lines[1],
    ).groups()
    assert int(size) <= int(others[0]) <= int(others[1])


def test_a_row_that_does_not_fit_is_refused(one_device):
    config = make_config("enable_rampup_batch_size=False", devices=1)
    target, _ = target_for(config, one_device, 0.0001)
    with pytest.raises(ConfigError, match="one row per 1 device needs .* device_memory_gib=0.0001"):
        target.largest_batch()


def test_a_program_that_cannot_be_counted_names_the_machine(one_device):
    config = make_config("base_num_decoder_layers=1", "enable_rampup_batch_size=False", devices=1)

    def work(text):
        raise ValueError("the loop while.1 does not say how often it runs")

    machine = dataclasses.replace(one_device, work=work)
    target, spec = target_for(config, machine)
    with pytest.raises(ConfigError, match="compile_topology=.*: .* while.1 does not say .*; try"):
        target.step(spec.resize(1, 1))


@pytest.mark.parametrize("share, least", [(1, "one row"), (4, "4 rows")])
def test_no_way_that_fits_names_the_fewest_rows(monkeypatch, one_device, share, least):
    config = make_config("ici_pipeline_parallelism=2", f"num_pipeline_microbatches={2 * share}")
    ramp = RampupBatchManager(config.batch, 8)
    monkeypatch.setattr(
        CompileTarget, "from_config", lambda config, say: CompileTarget(config, ramp, one_device)
    )
    monkeypatch.setattr(CompileTarget, "fastest_ways", lambda target, spec: [])
    with pytest.raises(ConfigError, match=f"not even {least} a group of devices would fit"):
        compiled.compile_ways(config)


@pytest.mark.parametrize("platform, own", [("tpu", 4), ("cuda", 3), ("cpu", 3)])
def test_policies_that_make_the_same_program_are_one(one_device, platform, own):
    """Splash attention alone has a result to keep by its name."""
    keys = ("dtype=bfloat16", "head_dim=128", "max_target_length=128")
    config = make_config("enable_rampup_batch_size=False", *keys, devices=1)
    machine = dataclasses.replace(one_device, devices=[types.SimpleNamespace(platform=platform)])
    policies = target_for(config, machine)[0].policies
    assert len(policies) == own and (own == 4) == ("minimal_with_context" in policies)


@pytest.mark.slow
def test_the_ways_of_a_batch_by_speed(one_device):
    """Each policy's two largest micro batches, with a machine whose time is made up."""
    config = make_config("enable_rampup_batch_size=False", "per_device_batch_size=4", devices=1)
    timed = dataclasses.replace(one_device, work=lambda text: {"step_seconds": 1 / len(text)})
    target, spec = target_for(config, timed)
    ways = target.fastest_ways(spec)
    assert len(ways) == 6 and {way["remat_policy"] for way in ways} == {*target.policies}
    for way in ways:
        shape = (way["per_device_batch_size"], way["gradient_accumulation_steps"])
        assert shape in ((4, 1), (2, 2)) and way["global_batch_size"] == 4
    times = [way["step_seconds"] for way in ways]
    assert times == sorted(times)


def test_fit_is_a_command(capsys):
    assert plan_main(["configs/base.yml", "--fit", "compile_topology=h200:2"]) == 2
    assert "compile_topology=h200:2 " in capsys.readouterr().err
