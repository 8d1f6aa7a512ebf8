"""Pipelines through the compilers of TPU pods and GPU clusters: what a compiled step does and what
travels between its stages, held against arithmetic. The chip's own kernels compute the attention.
"""

import pytest
from compilers import skip_without
from conftest import BASE

from maxramp.config.load import load
from maxramp.model.size import pipeline_ticks
from maxramp.planning.compiled import compile_stages

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
    """Every stage computes in every turn, those of the bubble included, and sends in each an x of
    its turn on and one back towards the first stage, forward and backward: no more."""
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
