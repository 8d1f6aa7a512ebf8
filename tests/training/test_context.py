"""Devices that share out the tokens of a row make the update that one device makes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import batch_of, make_config, make_mesh
from jax.sharding import NamedSharding

from maxramp.errors import ConfigError
from maxramp.model.order import order_by_layer
from maxramp.model.parts.attention import Rule, attend
from maxramp.model.parts.positions import Positions
from maxramp.parallel.sharding import BATCH_ABT, ROWS_BT, TOKENS_BT, X_BTHh
from maxramp.training.loss import next_token_prediction
from maxramp.training.state import init_state
from maxramp.training.step import eval_step, make_train_step

ROWS = 16


def parallel(**sizes):
    return tuple(f"ici_{axis}_parallelism={size}" for axis, size in sizes.items())


EXPERTS = ("decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2")
EXPERTS += ("load_balance_loss_weight=0.1", "router_z_loss_weight=0.1")
# The mesh, other keys that one device has as well, and accumulation.
CASES = {
    "fsdp, tensor, accumulation": (parallel(context=2, tensor=2), (), 2),
    "more devices than key/value heads": (parallel(context=4, data=2), (), 1),
    "a pipeline": (
        (
            *parallel(context=2, pipeline=2),
            *("num_pipeline_repeats=2", "num_pipeline_microbatches=4", "remat_policy=full"),
        ),
        (),
        2,
    ),
    "a pipeline's weights gathered once": (
        (*parallel(context=2, pipeline=2), "pipeline_fsdp_ag_once=True", "remat_policy=minimal"),
        (),
        1,
    ),
    "the noise scale": (parallel(context=2), ("log_gradient_noise_scale=True",), 2),
    "a window": (
        parallel(context=4),
        ("decoder_block=mistral", "sliding_window_size=5", "remat_policy=minimal_with_context"),
        1,
    ),
    "norms of heads": (
        parallel(context=2, tensor=2),
        ("decoder_block=qwen3", "use_qk_norm=True"),
        1,
    ),
    "experts": (parallel(context=2, expert=2), EXPERTS, 2),
    "experts, a capacity": (
        parallel(context=2, expert=2),
        (*EXPERTS, "capacity_factor=1.0", "routed_bias_update_rate=0"),
        1,
    ),
    "adapters": (parallel(context=2), ("lora_rank=2", "lora_dropout=0.2"), 2),
}


@functools.cache
def trained(*arguments, devices=8, accumulation=1):
    """Weights after a step, its metrics, and the held-out sums of its rows, packed."""
    constant = ("enable_rampup_batch_size=False", f"per_device_batch_size={ROWS // devices}")
    constant += ("base_num_decoder_layers=4", "opt_type=sgd", "gradient_clipping_threshold=0")
    config = make_config(*constant, *arguments, devices=devices)
    rng = np.random.default_rng(0)
    rows_RS = rng.integers(0, 264, (ROWS, config.model.max_target_length + 1), dtype=np.int32)
    arrays = rows_RS, rng.random(rows_RS.shape) < 0.15
    batch = batch_of(*(x.reshape(accumulation, -1, x.shape[-1]) for x in arrays))
    mesh = make_mesh(config)
    step = make_train_step(config.recipe, lambda samples, rows: jnp.float32(1))
    objective = next_token_prediction(config.recipe.objective, config.model)

    def evaluate(model, batch):
        return eval_step(model, (jnp.float32(0),) * 2, batch, objective=objective)

    with jax.set_mesh(mesh):
        state = jax.jit(functools.partial(init_state, config.recipe))()
        batch = jax.device_put(batch, NamedSharding(mesh, BATCH_ABT))
        sums = jax.device_get(jax.jit(evaluate)(state.model, batch))
        after, metrics = jax.jit(step)(state, batch)
        models = (order_by_layer(x.model) for x in (state, after))
        return *map(jax.device_get, (*map(jax.tree.leaves, models), metrics)), sums


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if number == 0 else pytest.mark.slow)
        for number, name in enumerate(CASES)
    ],
)
def test_one_update(name):
    mesh, keys, accumulation = CASES[name]
    first, last, metrics, sums = trained(*mesh, *keys, accumulation=accumulation)
    # A capacity is a row's, and so are draws of dropout: one device has the same.
    expected = trained(*parallel(fsdp=1), *keys, devices=1, accumulation=accumulation)
    for before, x, y in zip(first, last, expected[1], strict=True):
        change = np.abs(y - before).max()
        assert np.abs(x - y).max() < 1e-5 * change + 2.0**-22 * np.abs(y).max()
    for value in ("loss", "grad_norm"):
        np.testing.assert_allclose(metrics[value], expected[2][value], rtol=1e-5)
    np.testing.assert_array_equal(metrics["batch_fingerprint"], expected[2]["batch_fingerprint"])
    np.testing.assert_allclose(sums, expected[3], rtol=1e-5)
    for value in metrics.keys() - {"loss", "grad_norm", "batch_fingerprint"}:
        np.testing.assert_allclose(metrics[value], expected[2][value], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kernel", ["dot_product", "splash_interpreted", "packed_interpreted"])
def test_documents_leak_nothing(kernel):
    """Of odd lengths, over four devices: what a document makes of its tokens has exactly no
    gradient to those of another, and values are those of one device."""
    if kernel == "packed_interpreted":
        pytest.importorskip("jax.experimental.pallas.triton")
    T, lengths = 128, (37, 3, 51, 36, 1)
    segments_BT = np.repeat(np.arange(5, dtype=np.int32), lengths)[None]
    config = make_config(*parallel(context=4, fsdp=1), f"max_target_length={T}", devices=4)
    with jax.set_mesh(make_mesh(config)):
        rule = Rule(Positions(jax.device_put(segments_BT, ROWS_BT)), window=30)
        keys = jax.random.split(jax.random.key(0), 3)
        heads = zip(keys, (4, 2, 2), strict=True)
        qkv = [jax.random.normal(k, (1, T, n, 8), "float32", out_sharding=X_BTHh) for k, n in heads]

        @jax.jit
        def of_third(q, k, v):
            out_BTHh = attend(q, k, v, rule, kernel)
            is_third_BT = jax.reshard(jnp.asarray(segments_BT == 2), TOKENS_BT)
            return jnp.where(is_third_BT[..., None, None], out_BTHh, 0).sum(), out_BTHh

        gradients, out = jax.grad(of_third, argnums=(0, 1, 2), has_aux=True)(*qkv)
    is_third_T = segments_BT[0] == 2
    for dx_BTHh in gradients:
        assert (np.asarray(dx_BTHh)[0, ~is_third_T] == 0).all()
        assert (np.asarray(dx_BTHh)[0, is_third_T] != 0).any()
    with jax.set_mesh(make_mesh(make_config(f"max_target_length={T}", devices=1))):
        q, k, v = map(np.asarray, qkv)
        rule = Rule(Positions(jnp.asarray(segments_BT)), window=30)
        expected = attend(*map(jnp.asarray, (q, k, v)), rule)
    np.testing.assert_allclose(out, expected, atol=2e-6)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (("max_target_length=30",), "use 28 or 32 tokens"),
        (("base_num_query_heads=6", "base_num_kv_heads=2"), "use 1, 2, 3, 6"),
        (("phases={0: {row_length: 8}, 64: {row_length: 2}}",), "its 2 tokens"),
    ],
)
def test_what_cannot_be_shared_out(keys, says):
    with pytest.raises(ConfigError, match=says):
        make_config(*parallel(context=4), *keys, devices=8)
