"""What compiled steps of pipelines, Muon and experts do and send on pods, by arithmetic."""

import pytest
from compilers import needs_libtpu, skip_without
from conftest import BASE

from maxramp.config.load import load
from maxramp.model.size import pipeline_ticks
from maxramp.planning.compiled import compile_stages
from maxramp.planning.plan import make_plan

# T tokens of a row, D model width, F MLP width, V vocabulary, H and K heads of width h, L layers.
T, D, F, V, H, K, h, L = 256, 256, 512, 512, 4, 2, 128, 4
MODEL = [
    *(f"max_target_length={T}", f"base_emb_dim={D}", f"base_mlp_dim={F}", f"vocab_size={V}"),
    *(f"base_num_query_heads={H}", f"base_num_kv_heads={K}", f"head_dim={h}"),
    *(f"base_num_decoder_layers={L}", "dtype=bfloat16", "remat_policy=full", "loss_block_tokens=0"),
    *("steps=1", "enable_rampup_batch_size=False", "dataset_type=synthetic", "eval_interval=-1"),
]
# 8 devices, and the rows of a pass on each.
POD = ["compile_topology=v5p:2x2x2", "num_pipeline_microbatches=4", "per_device_batch_size=2"]
GPUS = ["compile_topology=h200:2x4", "num_pipeline_microbatches=4", "per_device_batch_size=2"]
SLICES = [*POD, "compile_topology=v5p:2x2x1", "dcn_pipeline_parallelism=2"]
CASES = {
    "one torus": [*POD, "ici_pipeline_parallelism=2"],
    "one torus, circular": [*POD, "ici_pipeline_parallelism=2", "num_pipeline_repeats=2"],
    "slices": [*SLICES, "compile_topology_num_slices=2"],
    "slices, copies": [
        *(*SLICES, "compile_topology=v5e:2x2", "compile_topology_num_slices=4"),
        *("dcn_data_parallelism=2", "gradient_accumulation_steps=2", "pipeline_fsdp_ag_once=True"),
    ],
    "nodes": [*GPUS, "ici_pipeline_parallelism=2"],
    "nodes, tensor, circular": [
        *(*GPUS, "per_device_batch_size=1", "ici_tensor_parallelism=2", "num_pipeline_repeats=2"),
        "ici_pipeline_parallelism=2",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.long) if case in ("one torus", "slices") else case
        for case in CASES
    ],
)
def test_a_pipeline_computes_and_sends_what_arithmetic_says(case):
    """All stages compute in all turns, the bubble too, and send an x on and one back: no more."""
    gpus = "h200" in CASES[case][0]
    skip_without("h200" if gpus else "v5p")
    keys = dict(argument.split("=", 1) for argument in CASES[case])
    result = compile_stages(load([BASE, *MODEL, *CASES[case]]))
    (stage,) = result["stages"]
    m, R, S = 4, int(keys.get("num_pipeline_repeats", 1)), result["mesh"]["stage"]
    assert S == 2
    turns, tensor = pipeline_ticks(m, S, R), result["mesh"]["tensor"]
    passes = int(keys.get("gradient_accumulation_steps", 1))

    tokens = passes * 2 * T / tensor  # of a device, in a step
    # Layers are recomputed: four products for each weight, but three for the last one, whose result
    # no gradient needs. Of causal attention's a kernel makes 2, twice, and backward 5 on
    # GPUs, each of half of T x T, and 4 + 3 on TPUs, where a row is one block, computed whole.
    dense = 4 * 2 * (2 * D * (H + K) * h + 3 * D * F) - 2 * D * F
    attention = (9 / 2 if gpus else 11) * 2 * H * h * T
    head = 3 * 2 * D * V
    expected = tokens * (L * (dense + attention) * turns / (m * R) + head)
    assert stage["flops_per_device"] == pytest.approx(expected, rel=1e-3)

    rows_of_a_turn = 2 / (m / S)
    x_bytes = rows_of_a_turn * T * D / tensor * 2
    inside = stage["collective_gib"].get("collective-permute", 0)
    network = stage["network_gib"].get("collective-permute", 0)
    crosses = gpus or "slices" in case
    assert (network if crosses else inside) * 2**30 == passes * turns * 2 * 2 * x_bytes
    assert not (inside if crosses else network)
    assert stage["fits"]


TPU_POD, GPU_NODES = "compile_topology=v5p:2x2x2", "compile_topology=h200:2x4"
OPTIMIZED = {
    "copies": [TPU_POD, "ici_data_parallelism=2"],
    "stages": [TPU_POD, "ici_pipeline_parallelism=2", "num_pipeline_microbatches=4"],
    "GPUs, tensor": [GPU_NODES, "ici_tensor_parallelism=2"],
}


def compiled(*more):
    result = compile_stages(load([BASE, *MODEL, "per_device_batch_size=2", *more]))
    return result["stages"][0], result["mesh"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[pytest.mark.long] * (x == "stages")) for x in OPTIMIZED]
)
def test_muon_sends_and_computes_what_arithmetic_says(case):
    """A device's part of every matrix leaves it and comes back, in bfloat16, along each axis that
    matrices are sharded on; copies gather the results. Matrices of one shape are shared by all."""
    gpus = GPU_NODES in OPTIMIZED[case]
    skip_without("h200" if gpus else "v5p")
    (adamw, mesh), (muon, _) = (
        compiled(*OPTIMIZED[case], f"opt_type={o}") for o in ("adamw", "muon")
    )

    def received(stage, kind):
        sent = stage["collective_gib"], stage["network_gib"]
        return sum(by_kind.get(kind, 0) for by_kind in sent) * 2**30

    d, S, f, t = (mesh[axis] for axis in ("data", "stage", "fsdp", "tensor"))
    flops, travelled, gathered = 0, 0, 0
    # Queries and outputs, keys and values, the MLP's three.
    for count, M, N in ((2, D, H * h), (2, K * h, D), (3, D, F)):
        M, N, matrices = min(M, N), max(M, N), count * L // S  # of a stage
        copies = d if matrices > f * t else 1  # that share them
        own = -(-matrices // (copies * f * t))  # matrices that a device makes orthogonal
        flops += own * 5 * (4 * M * M * N + 2 * M * M * M)
        part = own * M * N * 2
        travelled += 2 * part * ((f - 1) / f + (t - 1) / t)
        gathered += part * (copies - 1)
    more = received(muon, "all-to-all") - received(adamw, "all-to-all")
    assert more == pytest.approx(travelled, rel=0.05)
    more = received(muon, "all-gather") - received(adamw, "all-gather")
    assert more == pytest.approx(gathered, rel=0.05, abs=0.01 * travelled)
    more = muon["flops_per_device"] - adamw["flops_per_device"]
    assert more == pytest.approx(flops, rel=0.02, abs=0.001 * adamw["flops_per_device"])
    # A mean for each matrix that is not there.
    matrices = L / S * (D * h * (2 * H + 2 * K) + 3 * D * F) * 4 / (f * t) / 2**30
    less = adamw["memory_gib"]["arguments"] - muon["memory_gib"]["arguments"]
    assert less == pytest.approx(matrices, rel=0.05)


@needs_libtpu
def test_a_step_of_experts():
    """Tokens travel to experts and back; the plan's memory is the compiler's within a half."""
    keys = (*MODEL, "decoder_block=mixtral", "num_experts=8", "num_experts_per_tok=2")
    pod = ("compile_topology=v5p:2x2x2", "ici_expert_parallelism=4", "per_device_batch_size=4")
    config = load([BASE, *keys, *pod])
    compiled, planned = compile_stages(config)["stages"][0], make_plan(config)["stages"][0]
    assert compiled["fits"] and compiled["mesh"]["expert"] == 4
    assert compiled["collective_gib"]["ragged-all-to-all"] > 0
    assert 2 / 3 < planned["memory_gib"]["total"] / compiled["memory_gib"]["peak"] < 3 / 2
