"""Latent attention: one update on any mesh, and nothing between documents."""

import functools

import pytest
from conftest import make_config
from one_step import assert_documents_apart, assert_same_update, packed_batch, take_step

ROWS = 16
KEYS = (
    *("decoder_block=deepseek_v3", "base_num_kv_heads=8", "base_num_decoder_layers=3"),
    *("q_lora_rank=24", "kv_lora_rank=16", "qk_nope_head_dim=6", "qk_rope_head_dim=4"),
    *("v_head_dim=5", "routed_score_func=sigmoid", "routed_bias=True", "shared_experts=1"),
    *("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=16", "norm_topk_prob=True"),
    *("first_num_dense_layers=1", "load_balance_loss_weight=0.1", "max_target_length=32"),
    "head_dim=32",
    *("rope_type=yarn", "rope_factor=4", "original_max_position_embeddings=16", "mscale=0.7"),
)
EVEN = ("first_num_dense_layers=0", "base_num_decoder_layers=4")
ADAPTERS = ("lora_rank=2", "lora_dropout=0.2")
ADAPTERS += ("lora_targets=[q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,o_proj]",)
# Keys of the mesh, those that one device has as well, and accumulation.
CASES = {
    "fsdp, tensor": ("tensor=2", ("remat_policy=minimal",), ("q_lora_rank=0",), 2),
    "the noise scale": ("tensor=2 context=2", ("log_gradient_noise_scale=True",), (), 2),
    "ulysses": (
        *("context=4", ("context_parallel_strategy=ulysses", "ici_data_parallelism=2")),
        *((), 2),
    ),
    "gathered": ("context=4", ("context_parallel_strategy=all_gather",), (), 1),
    "gathered in order": (
        "context=2 tensor=2",
        (
            *("context_parallel_strategy=all_gather", "context_parallel_load_balance=False"),
            "ici_data_parallelism=2",
        ),
        *((), 2),
    ),
    "experts": ("expert=2 context=2", ("remat_policy=minimal_with_context",), (), 1),
    "adapters": ("context=2 tensor=2", (), ADAPTERS, 2),
    "a pipeline": ("pipeline=2 tensor=2", ("num_pipeline_microbatches=4",), EVEN, 2),
    "a pipeline of parts": ("pipeline=2 context=2", (), EVEN, 1),
}


@functools.cache
def trained(*arguments, devices=8, accumulation=1):
    """What a step on packed rows makes."""
    constant = ("enable_rampup_batch_size=False", f"per_device_batch_size={ROWS // devices}")
    constant += ("opt_type=sgd", "gradient_clipping_threshold=0")
    config = make_config(*KEYS, *constant, *arguments, devices=devices)
    return take_step(config, packed_batch(config, ROWS, accumulation))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_update_on_any_mesh(name):
    axes, mesh, keys, accumulation = CASES[name]
    sizes = (f"ici_{size.replace('=', '_parallelism=')}" for size in axes.split())
    actual = trained(*sizes, *mesh, *keys, accumulation=accumulation)
    expected = trained("ici_fsdp_parallelism=1", *keys, devices=1, accumulation=accumulation)
    assert_same_update(actual, expected, 1e-5)


def test_a_document_does_not_see_the_one_before_it():
    assert_documents_apart(*KEYS)
