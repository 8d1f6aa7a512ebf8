"""Steps whose rows lie in parts on several devices, through the compilers of TPUs and GPUs."""

import pytest
from compilers import skip_without
from conftest import BASE

from maxramp.config.load import load
from maxramp.planning.compiled import compile_stages

# T tokens of a row, H and K heads of width h, L layers, C devices of a row, B rows of a rank.
T, H, K, h, L, C, B = 2048, 8, 4, 128, 3, 4, 2
MODEL = [
    *(f"max_target_length={T}", f"base_num_query_heads={H}", f"base_num_kv_heads={K}"),
    *(f"head_dim={h}", f"base_num_decoder_layers={L}", "base_emb_dim=256", "base_mlp_dim=512"),
    *("vocab_size=512", "dtype=bfloat16", "remat_policy=full", "steps=1", "eval_interval=-1"),
    *("enable_rampup_batch_size=False", f"per_device_batch_size={B / C}"),
    f"ici_context_parallelism={C}",
]


DELTA = [
    *("decoder_block=qwen3_5", "use_qk_norm=True", "gdn_num_key_heads=4", "gdn_num_value_heads=8"),
    *("base_num_decoder_layers=4", "ici_context_parallelism=2", "ici_fsdp_parallelism=2"),
    *("ici_tensor_parallelism=2", "per_device_batch_size=0.25"),
]


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["v5p:2x2x2", "h200:1x8"])
def test_compilers_take_parts_of_a_gated_delta_rule(machine):
    """Besides heads, only the last tokens of the part before travel, for a convolution over 4:
    forward, recomputed and back."""
    skip_without(machine)
    keys = (*DELTA, f"compile_topology={machine}", "context_parallel_strategy=ulysses")
    (stage,) = compile_stages(load([BASE, *MODEL, *keys]))["stages"]
    assert stage["fits"]
    channels = (4 + 4 + 8) * 128 / 2  # queries, keys and values of a device
    times = stage["collective_gib"]["collective-permute"] * 2**30 / ((4 - 1) * channels * 2)
    assert 3 * 3 <= times < 3 * 4  # of three layers; the compiler for GPUs repeats some


@pytest.mark.parametrize("strategy", ["ulysses", "all_gather"])
@pytest.mark.parametrize("machine", ["v5p:2x2x2", "h200:1x8"])
def test_compilers_take_parts_of_rows(machine, strategy):
    """Heads travel once forward, once recomputed, once back; no product has all tokens' scores."""
    skip_without(machine)
    keys = (f"compile_topology={machine}", f"context_parallel_strategy={strategy}")
    (stage,) = compile_stages(load([BASE, *MODEL, *keys]))["stages"]
    moved = stage["collective_gib"].get("all-to-all", 0) * 2**30
    if strategy == "ulysses":
        assert moved == pytest.approx(3 * L * 2 * (H + K) * h * B * T / C * 2 * (C - 1) / C)
    else:
        assert moved == 0
    scores = B * H * T / C * T * 4  # of one layer on a device, in float32
    assert stage["memory_gib"]["temporaries"] * 2**30 < scores


LATENT = [
    *("decoder_block=deepseek_v3", f"base_num_kv_heads={H}", "kv_lora_rank=256", "q_lora_rank=256"),
    *("routed_score_func=sigmoid", "routed_bias=True", "num_experts=4", "num_experts_per_tok=2"),
    "head_dim=32",
    *("base_moe_mlp_dim=128", "base_num_decoder_layers=2"),
]


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["v5p:2x2x2", "h200:1x8"])
def test_compilers_take_parts_of_latent_attention(machine):
    """Of heads only queries, of 192, and results, of 128, travel, as above; no keys and values."""
    skip_without(machine)
    keys = (f"compile_topology={machine}", "context_parallel_strategy=ulysses")
    (stage,) = compile_stages(load([BASE, *MODEL, *LATENT, *keys]))["stages"]
    moved = stage["collective_gib"]["all-to-all"] * 2**30
    assert moved == pytest.approx(3 * 2 * H * (192 + 128) * B * T / C * 2 * (C - 1) / C)
