"""Devices that share out the tokens of a row make the update that one device makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_config, make_mesh
from one_step import assert_same_update, parallel, update_of

from maxramp.model.parts.attention import AttentionMask, attend
from maxramp.model.parts.positions import Positions, balanced_order, run_length
from maxramp.parallel.sharding import ROWS_BT, SPLIT_D, TOKENS_BT, X_BTHh

FOUR = "base_num_decoder_layers=4"
EXPERTS = ("decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2")
EXPERTS += ("load_balance_loss_weight=0.1", "router_z_loss_weight=0.1")
GEMMA = ("logits_via_embedding=True", "mlp_activations=[gelu,linear]", "sliding_window_size=5")
GEMMA += ("query_pre_attn_scalar=8",)
GEMMA2 = (*GEMMA, "decoder_block=gemma2", "attn_logits_soft_cap=5", "final_logits_soft_cap=3")
GEMMA3 = (*GEMMA, "decoder_block=gemma3", "use_qk_norm=True", "base_num_decoder_layers=8")
OLMO3 = ("decoder_block=olmo3", "use_qk_norm=True", "sliding_window_size=5")
GATHERED = "context_parallel_strategy=all_gather"
WINDOW = ("decoder_block=mistral", "sliding_window_size=5")
CIRCULAR = ("num_pipeline_repeats=2", "num_pipeline_microbatches=4", "remat_policy=full")
ONCE = ("pipeline_fsdp_ag_once=True", "remat_policy=minimal")
CAPACITY = (*EXPERTS, "capacity_factor=1.0")
IN_ORDER = (GATHERED, "context_parallel_load_balance=False")
# The axes, their keys, those that one device has as well, and accumulation.
CASES = {
    "fsdp, tensor, accumulation": ("context=2 tensor=2", (), (), 2),
    "more devices than key/value heads": ("context=4 data=2", (), (), 1),
    "a pipeline": ("context=2 pipeline=2", CIRCULAR, (), 2),
    "a pipeline's weights gathered once": ("context=2 pipeline=2", ONCE, (), 1),
    "the noise scale": ("context=2", (), ("log_gradient_noise_scale=True",), 2),
    "a window": ("context=4", (), (*WINDOW, "remat_policy=minimal_with_context"), 1),
    "norms of heads": ("context=2 tensor=2", (), ("decoder_block=qwen3", "use_qk_norm=True"), 1),
    "experts": ("context=2 expert=2", (), EXPERTS, 2),
    "experts, a capacity": ("context=2 expert=2", (), (*CAPACITY, "routed_bias_update_rate=0"), 1),
    "caps": ("context=2 tensor=2", (), GEMMA2, 1),
    "two kinds of layers, copies": ("context=2 data=2", (), GEMMA3, 2),
    "two kinds of layers, gathered": ("context=4", (GATHERED,), GEMMA3, 2),
    "norms behind": ("context=2 tensor=2", (), OLMO3, 1),
    "gathered": ("context=4 data=2", (GATHERED,), (), 2),
    "gathered, a window": ("context=2 tensor=2", (GATHERED,), WINDOW, 1),
    "gathered, a pipeline": ("context=2 pipeline=2", (GATHERED,), (), 2),
    "gathered, experts": ("context=2 expert=2", (GATHERED,), EXPERTS, 1),
    "gathered, parts in order": ("context=4", IN_ORDER, CAPACITY, 1),
    "adapters": ("context=2", (), ("lora_rank=2", "lora_dropout=0.2"), 2),
}
MARKS = dict.fromkeys(CASES, pytest.mark.slow)
MARKS |= {"fsdp, tensor, accumulation": (), "gathered": ()}
# What they join does not meet in a layer.
MARKS |= dict.fromkeys(("norms of heads", "norms behind", "gathered, experts"), pytest.mark.long)
MARKS |= dict.fromkeys(("two kinds of layers, copies", "gathered, a pipeline"), pytest.mark.long)


@pytest.mark.parametrize("name", [pytest.param(name, marks=mark) for name, mark in MARKS.items()])
def test_parts_of_rows_make_the_update_of_one_device(name):
    axes, mesh, keys, accumulation = CASES[name]
    actual = update_of(FOUR, *parallel(axes), *mesh, *keys, accumulation=accumulation)
    # A capacity is a row's, and so are draws of dropout: one device has the same.
    one = (FOUR, *parallel("fsdp=1"), *keys)
    expected = update_of(*one, devices=1, accumulation=accumulation)
    assert_same_update(actual, expected)
    for name in actual[2].keys() - {"batch_fingerprint"}:
        np.testing.assert_allclose(actual[2][name], expected[2][name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ulysses", "all_gather", "balanced"])
@pytest.mark.parametrize("kernel", ["dot_product", "splash_interpreted", "packed_interpreted"])
def test_documents_leak_nothing(kernel, strategy):
    """No gradient to tokens of another; outputs of one device, of odd lengths over four devices."""
    if kernel == "packed_interpreted":
        pytest.importorskip("jax.experimental.pallas.triton")
    T, lengths = 1024, (301, 27, 403, 292, 1)
    segments_BT = np.repeat(np.arange(5, dtype=np.int32), lengths)[None]
    in_order = Positions(segments_BT)
    order_T = np.arange(T)
    if strategy == "balanced":
        (order_T,) = np.asarray(balanced_order(in_order.count_blocks(T, 128, 0), 128, 4))
        assert (order_T != np.arange(T)).any()
        moved = in_order.segments_BT, in_order.segment_positions(T), np.arange(T)[None]
        in_order = Positions(*(np.asarray(x, np.int32)[:, order_T] for x in moved))
    rng = np.random.default_rng(0)
    qkv = [rng.normal(size=(1, T, n, 8)).astype(np.float32)[:, order_T] for n in (4, 2, 2)]
    sinks_H = np.float32([1, -1, 2, 3])
    is_third_T = in_order.segments_BT[0] == 2

    @functools.partial(jax.grad, argnums=(0, 1, 2, 3), has_aux=True)
    def weigh_third(q, k, v, sinks_H, positions, kernel, strategy):
        mask = AttentionMask(positions, window=130, sinks_H=jax.reshard(sinks_H, SPLIT_D))
        out_BTHh = attend(q, k, v, mask, kernel, strategy)
        is_third_BT = jax.reshard(jnp.asarray(is_third_T[None]), TOKENS_BT)
        return jnp.where(is_third_BT[..., None, None], out_BTHh, 0).sum(), out_BTHh

    config = make_config(*parallel("context=4 fsdp=1"), f"max_target_length={T}", devices=4)
    with jax.set_mesh(make_mesh(config)):
        arrays = *(jax.device_put(x, X_BTHh) for x in qkv), sinks_H
        arrays = *arrays, jax.device_put(in_order, ROWS_BT)
        way = "all_gather" if strategy == "balanced" else strategy
        gradients, out = jax.jit(weigh_third, static_argnums=(5, 6))(*arrays, kernel, way)
    with jax.set_mesh(make_mesh(make_config(f"max_target_length={T}", devices=1))):
        arrays = *map(jnp.asarray, qkv), sinks_H, jax.tree.map(jnp.asarray, in_order)
        expected, out_1 = weigh_third(*arrays, "dot_product", "")
    np.testing.assert_allclose(out, out_1, atol=2e-6)
    np.testing.assert_allclose(gradients[3], expected[3], rtol=1e-4)
    for actual, other in zip(gradients[:3], expected[:3], strict=True):
        np.testing.assert_allclose(actual, other, atol=2e-5)
        assert (np.asarray(actual)[0, ~is_third_T] == 0).all()


@pytest.mark.parametrize("documents", [1, 5, 200])
@pytest.mark.parametrize(("devices", "window"), [(4, 0), (16, 0), (16, 1024)])
def test_devices_have_equal_work(devices, window, documents):
    """At most 1.05 times the mean of a mask's blocks on a device; more if parts are in order."""
    T = 131072
    cuts = np.sort(np.random.default_rng(documents).choice(T, documents - 1, replace=False))
    segments_BT = np.searchsorted(cuts, np.arange(T), side="right").astype(np.int32)[None]
    positions = Positions(segments_BT)
    run = run_length(T // devices)
    costs_Bn = positions.count_blocks(T, run, window)
    (order_T,) = np.asarray(balanced_order(costs_Bn, run, devices))
    assert (np.sort(order_T) == np.arange(T)).all()
    first_T = np.asarray(positions.first_seen(T, window))[0]

    def most_loaded(order_T):
        blocks_n = order_T[run - 1 :: run] // run - first_T[order_T[::run]] // run + 1
        loads_C = blocks_n.reshape(devices, -1).sum(1)
        return loads_C.max() / loads_C.mean()

    assert most_loaded(order_T) < 1.05
    if not window:
        assert most_loaded(np.arange(T)) > 1.05
