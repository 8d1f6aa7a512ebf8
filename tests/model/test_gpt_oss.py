"""gpt-oss, with its sinks, windows, biases and cut gates: one update on any mesh."""

import functools

import jax
import pytest
from conftest import make_config
from one_step import assert_same_update, packed_batch, take_step

from maxramp.model.mixers import attention
from maxramp.model.parts import experts, routing, weights

ROWS = 16
KEYS = (
    *("decoder_block=gpt_oss", "attention_bias=True", "routed_bias=True", "sliding_window_size=5"),
    *("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=16", "max_target_length=32"),
    *("load_balance_loss_weight=0.1", "base_num_decoder_layers=4", "opt_type=sgd"),
    *("gradient_clipping_threshold=0", "enable_rampup_batch_size=False"),
)
ADAPTERS = ("lora_rank=2", "lora_targets=[q_proj,o_proj]")
# Axes, keys of the mesh, those that one device has as well, and accumulation.
CASES = {
    "experts": ("expert=2 fsdp=2 tensor=2", (), (), 2),
    "heads shared out": ("context=2 expert=2", (), ("log_gradient_noise_scale=True",), 1),
    "gathered": ("context=4", ("context_parallel_strategy=all_gather",), (), 1),
    "adapters": ("tensor=2", (), ADAPTERS, 1),
    "a pipeline": (
        "pipeline=2 tensor=2 expert=2",
        ("num_pipeline_microbatches=4", "remat_policy=minimal"),
        *((), 2),
    ),
}


@functools.cache
def trained(*arguments, devices=8, accumulation=1):
    """What a step on packed rows makes."""
    rows = f"per_device_batch_size={ROWS // devices}"
    config = make_config(*KEYS, rows, *arguments, devices=devices)
    return take_step(config, packed_batch(config, ROWS, accumulation))


def draw(role, axes, shape, spec, dtype, leading=""):
    """In place of `weights.zeros`: biases and sinks that count."""
    x = jax.random.normal(jax.random.key(len(role)), shape, dtype, out_sharding=spec)
    return weights.new_weight(x, role, axes, leading)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_one_update_on_any_mesh(monkeypatch, name):
    for module in (attention, experts, routing):
        monkeypatch.setattr(module, "zeros", draw)
    axes, mesh, keys, accumulation = CASES[name]
    sizes = (f"ici_{size.replace('=', '_parallelism=')}" for size in axes.split())
    actual = trained(*sizes, *mesh, *keys, accumulation=accumulation)
    expected = trained("ici_fsdp_parallelism=1", *keys, devices=1, accumulation=accumulation)
    assert_same_update(actual, expected)
