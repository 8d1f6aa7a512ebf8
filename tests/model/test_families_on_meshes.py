"""Families with layers, routers or sinks of their own: one update on any mesh, and nothing between
documents."""

import jax
import pytest
from one_step import assert_documents_apart, assert_same_update, parallel, update_of

from maxramp.model.mixers import attention
from maxramp.model.parts import experts, routing, weights

GATHERED, ORDERED = "context_parallel_strategy=all_gather", "context_parallel_load_balance=False"
ROUTED = ("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=16", "max_target_length=32")
ROUTED += ("load_balance_loss_weight=0.1",)
HYBRID = (
    *("use_qk_norm=True", "base_num_decoder_layers=4", "max_target_length=32", "head_dim=16"),
    *("gdn_num_key_heads=2", "gdn_num_value_heads=4", "gdn_key_head_dim=8"),
    # A norm of a head's first tokens multiplies rounding by the root of 1 / epsilon.
    *("gdn_value_head_dim=8", "normalization_layer_epsilon=1e-1"),
)
HYBRID_EXPERTS = (*HYBRID, *ROUTED, "shared_experts=1", "norm_topk_prob=True")
FAMILIES = {
    "qwen3_5": HYBRID,
    **dict.fromkeys(("qwen3_next", "qwen3_5_moe"), HYBRID_EXPERTS),
    "deepseek_v3": (
        *("base_num_kv_heads=8", "base_num_decoder_layers=3", "first_num_dense_layers=1"),
        *("q_lora_rank=24", "kv_lora_rank=16", "qk_nope_head_dim=6", "qk_rope_head_dim=4"),
        *("v_head_dim=5", "routed_score_func=sigmoid", "routed_bias=True", "shared_experts=1"),
        *("rope_type=yarn", "rope_factor=4", "original_max_position_embeddings=16", "mscale=0.7"),
        *(*ROUTED, "norm_topk_prob=True", "head_dim=32"),
    ),
    "gpt_oss": (
        *("attention_bias=True", "routed_bias=True", "sliding_window_size=5", *ROUTED),
        "base_num_decoder_layers=4",
    ),
}
EIGHT, DEEP = "base_num_decoder_layers=8", "base_num_decoder_layers=16"
EVEN = ("first_num_dense_layers=0", "base_num_decoder_layers=4")
ADAPTERS = ("lora_rank=2", "lora_dropout=0.2")
OF_HYBRIDS = "lora_targets=[in_proj_qkvz,in_proj_ba,out_proj,q_proj]"
OF_LATENTS = "lora_targets=[q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj]"
OF_SINKS = ("lora_rank=2", "lora_targets=[q_proj,o_proj]")
NOISE, COPIES = "log_gradient_noise_scale=True", "ici_data_parallelism=2"
FOUR, REPEATS = "num_pipeline_microbatches=4", "num_pipeline_repeats=2"
MINIMAL = "remat_policy=minimal"
# Axes, keys of the mesh, those that one device has as well, and accumulation.
CASES = {
    "qwen3_next": {
        "fsdp, tensor, accumulation": ("tensor=2", (), (), 2),
        "adapters": ("context=2 tensor=2", (), (*ADAPTERS, OF_HYBRIDS), 2),
        "a pipeline of parts": ("pipeline=2 context=2", (), (EIGHT,), 1),
    },
    "qwen3_5": {
        "gathered, the noise scale": ("context=4", (GATHERED,), (NOISE,), 2),
        "parts of 2 tokens": ("context=8", (), ("max_target_length=16",), 1),
        "a pipeline": ("pipeline=2 tensor=2", (FOUR, MINIMAL), (EIGHT,), 2),
        "a circular pipeline": ("pipeline=2 fsdp=4", (REPEATS, "remat_policy=full"), (DEEP,), 1),
    },
    "qwen3_5_moe": {"experts": ("expert=2 context=2", (), (), 1)},
    "deepseek_v3": {
        "fsdp, tensor": ("tensor=2", (MINIMAL,), ("q_lora_rank=0",), 2),
        "the noise scale": ("tensor=2 context=2", (NOISE,), (), 2),
        "ulysses": ("context=4", ("context_parallel_strategy=ulysses", COPIES), (), 2),
        "gathered": ("context=4", (GATHERED,), (), 1),
        "gathered in order": ("context=2 tensor=2", (GATHERED, ORDERED, COPIES), (), 2),
        "experts": ("expert=2 context=2", ("remat_policy=minimal_with_context",), (), 1),
        "adapters": ("context=2 tensor=2", (), (*ADAPTERS, OF_LATENTS), 2),
        "a pipeline": ("pipeline=2 tensor=2", (FOUR,), EVEN, 2),
        "a pipeline of parts": ("pipeline=2 context=2", (), EVEN, 1),
    },
    "gpt_oss": {
        "experts": ("expert=2 fsdp=2 tensor=2", (), (), 2),
        "heads shared out": ("context=2 expert=2", (NOISE,), (), 1),
        "gathered": ("context=4", (GATHERED,), (), 1),
        "adapters": ("tensor=2", (), OF_SINKS, 1),
        "a pipeline": ("pipeline=2 tensor=2 expert=2", (FOUR, MINIMAL), (), 2),
    },
}
# A pipeline of parts is slow enough.
LONG = {("deepseek_v3", "a pipeline"), ("deepseek_v3", "gathered in order")}
LONG |= {("qwen3_5", "a pipeline")}


def draw(role, axes, shape, spec, dtype, leading=""):
    """In place of `weights.zeros`: biases and sinks that count."""
    x = jax.random.normal(jax.random.key(len(role)), shape, dtype, out_sharding=spec)
    return weights.new_weight(x, role, axes, leading)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(family, name, marks=[pytest.mark.long] * ((family, name) in LONG))
        for family, names in CASES.items()
        for name in names
    ],
)
def test_one_update_on_any_mesh(monkeypatch, family, name):
    if family == "gpt_oss":
        for module in (attention, experts, routing):
            monkeypatch.setattr(module, "zeros", draw)
    axes, mesh, keys, accumulation = CASES[family][name]
    own = (f"decoder_block={family}", *FAMILIES[family])
    actual = update_of(*own, *parallel(axes), *mesh, *keys, accumulation=accumulation)
    expected = update_of(*own, *parallel("fsdp=1"), *keys, devices=1)
    # Any mesh of 8 rounds 16 layers by 0.9 to 2.4e-5.
    assert_same_update(actual, expected, 3e-5 if DEEP in keys else 1e-5)


@pytest.mark.parametrize("family", ["qwen3_5", "deepseek_v3"])
def test_a_document_does_not_see_the_one_before_it(family):
    assert_documents_apart(f"decoder_block={family}", *FAMILIES[family])
