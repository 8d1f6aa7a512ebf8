"""Which meshes `compile --meshes` lists, and the largest batch that `plan --fit` prints."""

import dataclasses
import json
import math
import re
import shlex
import signal
import subprocess
import sys
import types
from subprocess import PIPE

import pytest
from compilers import GPU, skip_without
from conftest import BASE, TINY, make_config

from maxramp.commandline import show_keys
from maxramp.compile import main as compile_main
from maxramp.config.load import load
from maxramp.errors import ConfigError
from maxramp.parallel.keys import MeshKeys
from maxramp.parallel.mesh import format_sizes
from maxramp.plan import main as plan_main
from maxramp.planning import compiled
from maxramp.planning import machine as machines
from maxramp.planning.compile_target import CompileTarget, count_fitting
from maxramp.planning.machine import Machine, Rates
from maxramp.planning.mesh_cost import CostModel
from maxramp.planning.meshes import MeshSearch, list_meshes, splits, spread
from maxramp.planning.plan import estimate
from maxramp.rampup.schedule import RampupBatchManager

D, F, H, K, HEAD, V, L, T, ROWS = 64, 96, 4, 2, 16, 320, 4, 32, 16
MODEL = [
    *TINY,
    *(f"base_emb_dim={D}", f"base_mlp_dim={F}", f"base_num_query_heads={H}", f"vocab_size={V}"),
    *(f"base_num_kv_heads={K}", f"head_dim={HEAD}", f"base_num_decoder_layers={L}"),
    *(f"max_target_length={T}", "dtype=bfloat16", "steps=40", "remat_policy=full"),
    *(f"global_batch_size={ROWS}", f"micro_batch_size={ROWS}", "logits_via_embedding=False"),
]
RATES = Rates(flops=1e9, memory=1e30, links=1e6, network=1e4)


def machine(devices: int, rates: Rates = RATES, slices: int = 1) -> Machine:
    described = [types.SimpleNamespace(platform="tpu")] * devices
    return Machine("v5p", described, memory_gib=1.0, peak_tflops=1.0, slices=slices, rates=rates)


def search(*keys: str, on: Machine) -> MeshSearch:
    return MeshSearch(load([BASE, *MODEL, *keys], "compile"), on, lambda line: None)


def parts(*keys: str, devices: int = 4, rates: Rates = RATES) -> dict[str, float]:
    """Estimates a step on the mesh of the keys."""
    on = machine(devices, rates)
    config = load([BASE, *MODEL, *keys], "compile")
    target = CompileTarget.from_machine(config, on, lambda line: None)
    spec = target.ramp.stages[-1].spec
    model = target.config.recipe.with_spec(spec).model
    return CostModel(target.config.recipe, on).step(model, spec).parts


MATRICES = L * (2 * D * H * HEAD + 2 * D * K * HEAD + 3 * D * F) + 2 * D * V
TOKENS = ROWS * T


def test_estimates_are_those_computed_by_hand():
    # Weights twice and gradients, in bfloat16, of which a device has a quarter.
    fsdp = parts("ici_fsdp_parallelism=4")
    assert fsdp["weights"] == pytest.approx(MATRICES * 3 * 2 * 3 / 4 / 1e6)
    # 6 FLOPs for a weight that a token meets, and 0.8 of the forward pass again.
    products = (MATRICES - D * V) * 6 * (1 + 0.8 / 3) * TOKENS / 4
    assert fsdp["products"] == pytest.approx(products / 1e9, rel=2e-3)
    # All rows on each device, and 13 transfers of their stream in a layer.
    tensor = parts("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2")
    streams = L * (9 + 4 * 0.8) * TOKENS / 2 * D * 2 / 2
    assert tensor["tensor"] == pytest.approx(streams / 1e6, rel=1e-6)
    # The sum over two copies goes there and back.
    data = parts("ici_data_parallelism=2", "ici_fsdp_parallelism=2")
    scales = (2 * L + 1) * D
    copies = 2 * 4 * (MATRICES / 2 + scales) / 2
    assert data["copies"] == pytest.approx(copies / 1e6, rel=1e-6)
    # Queries and results, keys and values.
    context = ["ici_fsdp_parallelism=2", "ici_context_parallelism=2"]
    ulysses = parts(*context, "context_parallel_strategy=ulysses")
    exchanged = L * (2 + 0.8) * TOKENS / 4 * 2 * (H + K) * HEAD * 2
    assert ulysses["context"] == pytest.approx(exchanged / 2 / 1e6)
    gathered = parts(*context, "context_parallel_strategy=all_gather")
    keys_and_values = L * (2.5 + 0.8) * TOKENS / 4 * 2 * 2 * K * HEAD * 2
    assert gathered["context"] == pytest.approx(keys_and_values / 2 / 1e6)


def test_a_pipeline_idles_and_gathers_its_weights_in_every_tick():
    whole = parts("ici_fsdp_parallelism=4")
    pipeline = parts("ici_pipeline_parallelism=2", "num_pipeline_microbatches=4")
    assert pipeline["products"] == pytest.approx(whole["products"] * 5 / 4)
    layers = MATRICES - 2 * D * V
    gathered = (layers / 2 * 5 + 2 * D * V) * 3 * 2 / 2
    assert pipeline["weights"] == pytest.approx(gathered / 1e6)


def test_a_group_on_several_nodes_waits_for_the_network():
    sizes = "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"
    inside, alone = parts(*sizes, rates=RATES._replace(node=2)), parts(*sizes)
    assert inside["tensor"] == alone["tensor"]
    # 2 devices on 2 nodes: each gets the other's half over the network.
    assert inside["weights"] == pytest.approx(alone["weights"] * 1e6 / 1e4)


def test_what_runs_beside_products_does_not_wait():
    exposed = parts("ici_fsdp_parallelism=4")
    hidden = parts("ici_fsdp_parallelism=4", rates=RATES._replace(flops=1e3, hidden=0.95))
    assert hidden["weights"] == pytest.approx(0.05 * exposed["weights"])
    slow = parts("ici_fsdp_parallelism=4", rates=RATES._replace(hidden=0.95))
    beside = min(exposed["products"] + exposed["attention"], 0.95 * exposed["weights"])
    assert slow["weights"] == pytest.approx(exposed["weights"] - beside)


@pytest.mark.parametrize("number", [1, 8, 12, 64])
def test_meshes_are_all_products_once(number):
    sizes = list(splits(number, 6))
    assert all(math.prod(x) == number for x in sizes)
    exponents = {1: [], 8: [3], 12: [2, 1], 64: [6]}[number]
    assert len(set(sizes)) == len(sizes) == math.prod(math.comb(n + 5, 5) for n in exponents)


def test_slices_are_joined_by_axes_that_divide_rows():
    meshes = {MeshKeys.from_values(keys) for keys in list_meshes(8)}
    laid = [mesh for whole in meshes for mesh in spread(whole, 2)]
    assert len(laid) == len({*laid}) == 3 * math.comb(2 + 5, 5)
    for mesh in laid:
        assert math.prod(mesh.group("dcn").values()) == 2
        assert mesh.slices["tensor"] == mesh.slices["context"] == 1


def test_the_memory_is_the_plans():
    meshes = search(on=machine(8))
    for way in meshes.rank(0)[::4]:
        own = estimate(way.target.config.recipe, way.spec)["total"]
        assert way.estimate.gib == pytest.approx(own, rel=0.02), way.name


NOTATIONS = {
    "one size": (),
    "a ramp": (
        *("global_batch_size=-1", "step_batch_size_schedule=0:8 64:16 128:32"),
        "step_batch_size_unit=samples",
    ),
    "MaxText's": ("global_batch_size=-1", "micro_batch_size=-1", "per_device_batch_size=2"),
    "a phase with a mesh": (
        *("phases_unit=samples", "phases.64.ici_tensor_parallelism=2"),
        "phases.64.learning_rate=1e-3",
    ),
}


@pytest.mark.parametrize("keys", NOTATIONS.values(), ids=NOTATIONS)
def test_the_keys_that_are_printed_run_as_ranked(keys):
    slices = 2 if keys == NOTATIONS["one size"] else 1
    meshes = search(*keys, on=machine(8, slices=slices))
    stage = meshes.stages[-1].index
    ranked = meshes.rank(stage)
    assert [way.keys for way in meshes.rank(stage, 5)[:5]] == [way.keys for way in ranked[:5]]
    for way in ranked[::9]:
        phases = {"phases": dict(meshes.phases)} if meshes.phases else {}
        pasted = shlex.split(show_keys(way.keys | phases))
        loaded = load([BASE, *MODEL, *keys, *pasted], "compile")
        target = CompileTarget.from_machine(loaded, meshes.machine, lambda line: None)
        assert target.ramp.stages[stage].spec == way.spec, way.name


def test_a_phase_of_a_mesh_alone_is_the_same_program():
    """Which is compiled once: the search finds a mesh for both."""
    phase = ("phases_unit=samples", "phases.64.ici_tensor_parallelism=2")
    first, last = search(*phase, on=machine(8)).stages
    assert first.spec == last.spec


def test_what_the_config_refuses_is_not_ranked():
    on = machine(8)
    sizes = [way.spec.mesh.sizes for way in search(on=on).rank(0)]
    assert {x["tensor"] for x in sizes} == {1, 2}  # 2 key/value heads
    assert {x["expert"] for x in sizes} == {1}
    assert {x["stage"] for x in sizes} == {1, 2, 4}  # 4 layers
    experts = ("decoder_block=mixtral", "num_experts=4", "base_moe_mlp_dim=32")
    assert {w.spec.mesh.sizes["expert"] for w in search(*experts, on=on).rank(0)} == {1, 2, 4}
    assert not search(on=machine(5)).rank(0)  # 16 rows


def test_the_configs_own_mesh_is_compiled_once_and_what_does_not_fit_is_last(monkeypatch):
    meshes = search("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", on=machine(4))
    ranked = meshes.rank(0)
    ways = meshes.with_own(ranked, 2, 0)
    assert [w.name for w in ways] == [ranked[0].name, "fsdp 2 x tensor 2", ranked[1].name]
    assert len(meshes.with_own(ranked, len(ranked), 0)) == len(ranked)
    bad = search("ici_tensor_parallelism=3", on=machine(4))  # which makes no mesh
    assert bad.with_own(ranked, 2, 0) == ranked[:2]
    by_way = {id(way): {"fits": n == 1, "step_seconds": n} for n, way in enumerate(ways)}
    monkeypatch.setattr(meshes, "compile", lambda way: by_way[id(way)])
    assert [entry["fits"] for _, entry in meshes.compile_all(ways)] == [True, False, False]


@pytest.mark.slow
def test_ctrl_c_shows_what_is_compiled(tmp_path):
    skip_without("v5p")
    keys = [*MODEL, "compile_topology=v5p:2x2x1", f"base_output_directory={tmp_path}"]
    command = [sys.executable, "-m", "maxramp.compile", BASE, *keys, "--meshes", "3", "--json"]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
        assert any("mesh 2 of" in line for line in iter(process.stderr.readline, ""))
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate()
    result = json.loads(output)
    assert process.returncode == 130 and len(result["stages"][0]["meshes"]) == 1
    assert errors.endswith(f"stopped: 1 of {result['planned']} meshes are compiled\n")


@pytest.mark.slow
def test_a_ramp_whose_stages_want_other_meshes_gets_a_phase(tmp_path, capsys, monkeypatch):
    """On 4 devices 2 rows need parts of rows, 64 do not; what is printed makes that run."""
    skip_without(GPU)
    monkeypatch.setenv("COLUMNS", "80")
    keys = [
        *(*MODEL, "compile_topology=h200:1x4", f"base_output_directory={tmp_path}"),
        *("global_batch_size=-1", "step_batch_size_schedule=0:2 8:64", "steps=20"),
        "step_batch_size_unit=samples",
    ]
    assert compile_main([BASE, *keys, "--meshes", "1"]) == 0
    printed = capsys.readouterr().out
    pasted = shlex.split(re.search("^keys +(.*)$", printed, re.MULTILINE)[1])
    target = CompileTarget.from_config(load([BASE, *keys, *pasted], "compile"), print)
    target.ramp.check(target.ramp.stages)
    first, last = (stage.spec.mesh for stage in target.ramp.stages)
    assert first.ranks <= 2 and last.ranks == 4
    shown = printed.splitlines()
    for index, mesh in enumerate((first, last)):
        (heading,) = (n for n, line in enumerate(shown) if line.startswith(f"stage {index},"))
        assert format_sizes(mesh.sizes) in "".join(shown[heading : heading + 6])


def test_bad_numbers_are_refused_in_a_line(capsys):
    assert compile_main([BASE, "compile_topology=h200:1x4", "--meshes", "0"]) == 2
    assert compile_main([BASE, "compile_topology=h200:1x4", "--meshes", "2", "--best"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2


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
