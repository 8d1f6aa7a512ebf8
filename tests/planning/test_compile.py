"""The preflight on the TPU compiler itself, which needs libtpu and no TPU; and what it refuses."""

import importlib.util
import itertools
import json
import shlex

import jax
import jax.numpy as jnp
import pytest
from compilers import needs_libtpu, skip_without
from conftest import BASE, TINY, check_refusal, complete, table
from in_process import run_here

from maxramp.compile import main as compile_main
from maxramp.compile import print_stages
from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.errors import ConfigError
from maxramp.keys.base import CONFIGS
from maxramp.model.size import training_flops_per_token
from maxramp.plan import main as plan_main
from maxramp.planning import gpu, machine, topology
from maxramp.planning.compile_target import CompileTarget
from maxramp.planning.compiled import compile_stages
from maxramp.planning.stages import with_nodes
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.device_memory import GIB, bytes_by_parts, compiled_bytes

POD = [
    *TINY,
    *("compile_topology=v5p-16", "base_emb_dim=256", "base_mlp_dim=512", "head_dim=128"),
    *("base_num_query_heads=4", "base_num_kv_heads=2", "base_num_decoder_layers=3"),
    *("max_target_length=256", "vocab_size=512", "dtype=bfloat16", "run_name=pod"),
    *("ici_tensor_parallelism=2", "attention=dot_product", "per_device_batch_size=2"),
    "step_batch_size_schedule=0:16 64:32 640:64",
    *("step_batch_size_unit=samples", "phases_unit=samples", "phases.640.ici_tensor_parallelism=1"),
    "steps=40",
]


def arguments(*more: str) -> list[str]:
    return [BASE, *POD, *more]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The JSON and the folder of a real run."""
    folder = tmp_path_factory.mktemp("compiled")
    line = arguments(f"base_output_directory={folder}")
    done = complete(*line, "--json", module="compile", timeout=500)
    result = json.loads(done.stdout)
    assert result == json.loads((folder / "pod" / "compiled.json").read_text())
    return result, folder / "pod" / "compiled.json", done


@needs_libtpu
def test_every_stage_is_compiled_for_the_pod(compiled, capsys):
    result, _, done = compiled
    assert (result["compile_topology"], result["devices"]) == ("v5p:2x2x2", 8)
    sizes = [(s["mesh"]["fsdp"], s["mesh"]["tensor"]) for s in result["stages"]]
    assert sizes == [(4, 2), (4, 2), (8, 1)]
    move = result["stages"][2]["move"]
    assert [s["move"] for s in result["stages"][:2]] == [None, None] and move["fits"]
    assert 0 < sum(move["collective_gib"].values()) < move["peak_gib"]
    print_stages(result)
    printed = capsys.readouterr().out
    assert "stage 2 begins with a move of the state to fsdp 8: all-to-all" in printed
    names = ("global_batch_size", "per_device_batch_size", "gradient_accumulation_steps")
    shapes = [tuple(s[name] for name in names) for s in result["stages"]]
    assert shapes == [(16, 2, 1), (32, 2, 2), (64, 2, 4)]
    assert [s["run_steps"] for s in result["stages"]] == [4, 18, 18]
    assert done.stderr.count("compiling ") == done.stderr.count("compiled in") + 1 == 4


@needs_libtpu
def test_loops_are_counted_as_often_as_they_run_and_the_figures_agree(compiled):
    """A step's products are the analytic count and the scores that a causal mask leaves out."""
    config = load(arguments())
    attention = 6.0 * 3 * 4 * 128 * 256  # layers, heads, head_dim, length
    for s in compiled[0]["stages"]:
        tokens = s["global_batch_size"] * 256 / 8
        expected = tokens * (training_flops_per_token(config.model, 256) + attention)
        # The loss's blocks are recomputed: one product of the head more, of three.
        head = 2.0 * 256 * 512 * tokens
        assert s["flops_per_device"] == pytest.approx(expected + head, rel=0.02)
        memory = s["memory_gib"]
        assert s["fits"] and memory["limit"] == 95
        assert 0 < memory["arguments"] + memory["temporaries"] <= memory["peak"] * 1.01
        assert s["step_seconds"] == s["compute_seconds"] + s["collective_seconds"] > 0
        assert s["network_gib"] == {} and s["network_seconds"] == 0
        assert s["tokens_per_second"] == pytest.approx(8 * tokens / s["step_seconds"])
        assert 0 < s["mfu"] < 1
        assert s["hours"] == pytest.approx(s["run_steps"] * s["step_seconds"] / 3600)
        assert s["device_hours"] == pytest.approx(8 * s["hours"]) and s["price"] is None
        # fsdp gathers weights and scatters or sums gradients.
        assert s["collective_gib"]["all-gather"] > 0
    totals = compiled[0]["totals"]
    assert totals["samples"] == 4 * 16 + 18 * 32 + 18 * 64
    assert totals["constant_final_batch"]["steps"] == 28
    assert totals["hours"] == pytest.approx(sum(s["hours"] for s in compiled[0]["stages"]))


@needs_libtpu
def test_a_plan_adds_the_compiled_figures(compiled, capsys):
    """The plan of the same command line, whose devices are those of compile_topology."""
    line = [*arguments("planned_tflops_per_device=100", "price_per_device_hour=4.2")]
    assert plan_main([*line, "--json", "--compiled", str(compiled[1])]) == 0
    plan = json.loads(capsys.readouterr().out)
    for entry, s in zip(plan["stages"], compiled[0]["stages"], strict=True):
        assert entry["compiled"]["hours"] == pytest.approx(s["hours"])
        assert entry["compiled"]["memory_gib"] == s["memory_gib"]
    totals = plan["totals"]
    assert totals["price"] == pytest.approx(4.2 * 8 * totals["node_hours"])
    hours, price = (totals["compiled"][name] for name in ("hours", "price"))
    assert hours == pytest.approx(compiled[0]["totals"]["hours"])
    assert price == pytest.approx(4.2 * 8 * hours)
    assert plan_main([*line, "--compiled", str(compiled[1])]) == 0
    assert "are at planned_tflops_per_device, these by" in capsys.readouterr().out


@needs_libtpu
def test_the_printed_command_runs_where_the_folder_cannot_be_written(tmp_path, capsys, monkeypatch):
    """As it is printed, where the run's folder cannot be had too: the table is never lost."""
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path)
    line = arguments("step_batch_size_schedule=0:16", "base_output_directory=file/runs")
    assert compile_main(line) == 0
    printed = capsys.readouterr()
    first, *_, note = printed.err.splitlines()
    assert note.startswith("note: ") and "file" in note and first.startswith("compiling 1 x 16")
    command = printed.out.splitlines()[-1].partition("python -m maxramp.plan ")[2]
    assert shlex.split(command) == [*line, "--compiled", "compiled.json"]
    assert plan_main(shlex.split(command)) == 0
    assert "chip-hours on 1 x v5p:2x2x2" in capsys.readouterr().out


@pytest.mark.long
@needs_libtpu
def test_a_stage_that_does_not_fit(tmp_path):
    """One that the compiler refuses by itself; and with what the same batch fits."""
    more = ("per_device_batch_size=512", "attention=dot_product", "max_target_length=2048")
    more += ("step_batch_size_schedule=0:4096", "steps=1", "loss_block_tokens=0", "dtype=float32")
    result = compile_stages(load(arguments(*more)))
    stage = result["stages"][0]
    assert not stage["fits"] and stage["memory_gib"]["peak"] > stage["memory_gib"]["limit"]
    near = stage["nearest_fit"]
    assert near["per_device_batch_size"] * near["gradient_accumulation_steps"] == 512
    assert near["peak_gib"] <= 95 and not result["totals"]["fits"]


@needs_libtpu
@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize(
    "name, cores, hosts, wraps",
    [
        *(("v4:2x2x2", 2, 2, (False,) * 3), ("v4:4x4x8", 2, 32, (True,) * 3)),
        *(("v5p:2x4x4", 2, 8, (False,) * 3), ("v5p:4x4x4", 2, 16, (True,) * 3)),
        *(("v5e:8x16", 1, 32, (False, True)), ("v5e:1x1", 1, 1, (False, False))),
        *(("v6e:4x4", 1, 4, (False, False)), ("v6e:16x16", 1, 64, (True, True))),
    ],
)
def test_a_slice_has_its_chips_hosts_and_wraps(name, cores, hosts, wraps, slices):
    """A device for each chip and place of every slice; wraps as in MaxText's accelerators."""
    slice_ = topology.parse(name)
    assert slice_.wraps == wraps
    devices = machine.describe_devices(slice_, slices)
    places = itertools.product(*(range(n) for n in (*slice_.shape, 1)[:3]))
    places = sorted((i, place) for place in places for i in range(slices))
    assert sorted((getattr(d, "slice_index", 0), tuple(d.coords)) for d in devices) == places
    assert {(d.num_cores, d.core_on_chip) for d in devices} == {(cores, 0)}
    assert len({d.process_index for d in devices}) == slices * hosts


SLICES = table("""
v5p-8 2x2x1 | v5p-16 2x2x2 | v5p-128 4x4x4 | v5p-384 4x4x12 | v5p-2048 8x8x16 | v5p:8x8x16 8x8x16
v5p-12288 16x16x24 | v4-8 2x2x1 | v4-512 4x8x8 | v5e-4 2x2 | v5e-8 2x4 | v5e-32 4x8
v5e-256 16x16 | v6e-256 16x16 | v6e-16 4x4 | v6e:1x1 1x1
""")


@pytest.mark.parametrize("names", SLICES)
def test_names_of_slices(names):
    """MaxText's names (its table of accelerators) and our own."""
    for name, shape in map(str.split, names):
        assert str(topology.parse(name)) == f"{name[:3].rstrip('-:')}:{shape}"


REFUSED = table("""
compile_topology= | compile_topology | v5p-2048
compile_topology=v9-8 | v9-8 | v4, v5e, v5p, v6e
compile_topology=v5p:3x3x3 | v5p:3x3x3 | multiples of 4
compile_topology=v5p:1x2x2 | v5p:1x2x2 | 2x2x1
compile_topology=v5p:8x8 | v5p:8x8 | three sides | v5p:4x4x4
compile_topology=v5e-512 | v5e-512 | v5e-256
compile_topology=v5p-7 | v5p-7 | v5p-8
compile_topology=big | compile_topology=big | v5p-2048
compile_topology_num_slices=0 | compile_topology_num_slices=0
""")
REFUSED_ON_A_POD = table("""
step_batch_size_schedule=0:18 | stage 0 | 18
ici_fsdp_parallelism=3 | ici_fsdp_parallelism=3 | mesh of 8
ici_tensor_parallelism=8 | base_num_query_heads=4 | tensor axis of 8
""")


@pytest.mark.parametrize(
    "case",
    [*REFUSED, *(pytest.param(case, marks=pytest.mark.slow) for case in REFUSED_ON_A_POD)],
    ids=lambda case: case[0],
)
def test_refused(case, tmp_path):
    argument, *parts = case
    if not argument.startswith("compile_topology"):
        skip_without("v5p")
    line = arguments(argument, f"base_output_directory={tmp_path}")
    check_refusal(run_here(*line, module="compile"), *parts)


@pytest.mark.parametrize(
    "cluster, extra", [(topology.parse("v5p-8"), "tpu"), (gpu.parse("h200:1x8"), "cuda13-compiler")]
)
def test_an_error_says_how_to_install_a_missing_compiler(monkeypatch, cluster, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"python -m pip install -e '\.\[{extra}\]'"):
        machine.describe_devices(cluster)


@pytest.mark.parametrize("content, part", [(None, "No such file"), ("[]", "maxramp.compile")])
def test_a_file_that_compile_did_not_write_is_refused(tmp_path, capsys, content, part):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    assert plan_main([*arguments("devices_per_node=8"), "--compiled", str(path)]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and part in printed.err and str(path) in printed.err


def test_shipped_pods_resolve():
    for path in sorted((CONFIGS / "pods").glob("*.yml")):
        loaded = load([str(path)])
        chips = topology.parse(loaded.planning.compile_topology).chips
        assert chips == loaded.batch.num_nodes * loaded.batch.devices_per_node
        assert chips in (64, 1024)
        config = resolve(loaded, chips, 1, 1)
        ramp = RampupBatchManager(config.batch, chips)
        ramp.check(ramp.stages)
        assert len(ramp.stages) > 1


@needs_libtpu
def test_shipped_pods_have_their_meshes():
    """Also where an axis is a part of a side of the torus."""
    for path in sorted((CONFIGS / "pods").glob("*.yml")):
        config = load([str(path)])
        chips = config.batch.num_nodes * config.batch.devices_per_node
        assert CompileTarget.from_config(config, print).mesh.size == chips


@needs_libtpu
def test_a_program_that_the_compiler_accepts_counts_as_one_that_fits():
    """Its parts are more than a chip has; the compiler refuses what is more than that in truth."""
    chip = machine.describe_devices(topology.parse("v5p:2x2x1"))[0]

    def loss(x, weights):
        def layer(x, weight):
            return jnp.tanh(x @ weight), x

        return jax.lax.scan(layer, x, weights)[0].sum()

    def compile_for(width):
        one = jax.sharding.SingleDeviceSharding(chip)
        x = jax.ShapeDtypeStruct((width, width), jnp.bfloat16, sharding=one)
        weights = jax.ShapeDtypeStruct((8, width, width), jnp.bfloat16, sharding=one)
        return jax.jit(jax.grad(loss)).lower(x, weights).compile()

    if not hasattr(compile_for(256).memory_analysis(), "total_allocation_bytes"):
        pytest.skip("this jax knows only the parts")
    compiled = compile_for(51200)
    assert compiled_bytes(compiled) < 95.74 * GIB < bytes_by_parts(compiled)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"\(100.34G\) exceeds available HBM"):
        compile_for(53248)
    # The same buffers, 53,248 wide, so the compiler counts as `compiled_bytes` does.
    assert compiled_bytes(compiled) * (53248 / 51200) ** 2 / GIB == pytest.approx(100.34, abs=0.01)


def test_a_topology_and_the_nodes_that_are_given():
    """A plan has what compile_topology has several of, unless the keys count it in another way."""

    def nodes(*more):
        keys = with_nodes(load(arguments("num_nodes=-1", "devices_per_node=-1", *more))).batch
        return keys.num_nodes, keys.devices_per_node

    assert nodes() == (1, 8)
    assert nodes("compile_topology_num_slices=3") == (3, 8)
    assert nodes("compile_topology=h200:16x4") == (16, 4)
    assert nodes("devices_per_node=4") == nodes("num_nodes=2") == (2, 4)
    for wrong in (("num_nodes=3",), ("devices_per_node=3",), ("num_nodes=2", "devices_per_node=8")):
        with pytest.raises(ConfigError, match="has 8 devices"):
            nodes(*wrong)
