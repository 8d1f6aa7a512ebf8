"""The model's size, its operations, its initial weights and their hash."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BASE, ROOT, make_config, make_mesh, mix_bits
from jax.interpreters.partial_eval import dce_jaxpr
from jax.sharding import NamedSharding

from maxramp.config import load as loading
from maxramp.config.resolve import resolve
from maxramp.model.decoder import Decoder, num_parameters
from maxramp.model.keys import SHAPE_KEYS
from maxramp.model.parts import attention
from maxramp.model.parts.embedding import look_up
from maxramp.model.parts.weights import dense, fingerprint_of_weights, new_weight
from maxramp.model.pattern import Rope
from maxramp.model.pipeline import order_by_layer
from maxramp.model.size import training_flops_per_token
from maxramp.parallel.axes import AXES
from maxramp.parallel.mesh import abstract_mesh
from maxramp.parallel.sharding import (
    EMBEDDING_VD,
    MLP_IN_DF,
    MLP_OUT_FD,
    STREAM_BTD,
    TOKENS_BT,
    X_BTD,
    X_BTF,
    gradient_spec,
    weight_spec,
)
from maxramp.training.loss import cross_entropy_sums
from maxramp.training.state import initial_state

# Weights as published with the models.
PUBLISHED = {
    **{"llama2-7b": 6_738_415_616, "llama2-13b": 13_015_864_320, "llama2-70b": 68_976_648_192},
    **{"llama3-8b": 8_030_261_248, "llama3-70b": 70_553_706_496, "llama3-405b": 405_853_388_800},
    **{"llama3.1-8b": 8_030_261_248, "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824},
    **{"llama3.1-70b": 70_553_706_496, "mistral-7b": 7_241_732_096},
    **{"mistral-7b-v0.3": 7_248_023_552, "qwen2.5-0.5b": 494_032_768},
    **{"qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512},
    **{"qwen2.5-14b": 14_770_033_664, "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648},
    **{"qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096},
    **{"qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264},
    **{"gemma2-2b": 2_614_341_888, "gemma2-9b": 9_241_705_984, "gemma2-27b": 27_227_128_320},
    **{"gemma3-270m": 268_098_176, "gemma3-1b": 999_885_952},
    # Less the vision tower's 416,866,032 weights and its projection.
    "gemma3-4b": 4_300_079_472 - 416_866_032 - (1152 * 2560 + 1152),
    "gemma3-12b": 12_187_325_040 - 416_866_032 - (1152 * 3840 + 1152),
    "gemma3-27b": 27_432_406_640 - 416_866_032 - (1152 * 5376 + 1152),
    **{"olmo2-7b": 7_298_617_344, "olmo2-13b": 13_716_198_400, "olmo2-32b": 32_234_279_936},
    **{"olmo3-7b": 7_298_011_136, "olmo3-32b": 32_233_522_176, "mixtral-8x7b": 46_702_792_704},
    **{"mixtral-8x22b": 140_620_634_112, "qwen3-30b-a3b": 30_532_122_624},
    **{"qwen3-235b-a22b": 235_093_634_560, "olmoe-1b-7b": 6_919_161_856},
    "dots1-142b": 142_774_381_696,
    # Without the draft layer; transformers' classes with these sizes.
    **{"glm4.5-air-106b": 106_852_251_264, "glm4.5-355b": 352_797_829_024},
    **{"gpt-oss-20b": 20_914_757_184, "gpt-oss-120b": 116_829_156_672},
    **{"deepseek-v3-671b": 671_026_419_200, "kimi-k2-1t": 1_026_408_232_448},
    "moonlight-16b": 15_960_110_208,
    # Text models, without mtp.
    **{"qwen3-next-80b-a3b": 79_674_391_296, "qwen3.5-0.8b": 752_393_024},
    **{"qwen3.5-2b": 1_881_825_088, "qwen3.5-4b": 4_205_751_296, "qwen3.5-9b": 8_953_803_264},
    **{"qwen3.5-27b": 26_895_998_464, "qwen3.5-35b-a3b": 34_660_610_688},
    **{"qwen3.5-122b-a10b": 122_111_526_912, "qwen3.5-397b-a17b": 396_346_350_336},
    **{"smollm2-135m": 134_515_008, "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384},
}
MODELS = sorted(path.stem for path in (ROOT / "configs" / "models").glob("*.yml"))
ONE_ROW = ("enable_rampup_batch_size=False", "per_device_batch_size=1")
SMALL = (
    *(*ONE_ROW, "base_emb_dim=24", "base_num_query_heads=6", "base_num_kv_heads=2", "head_dim=4"),
    *("base_mlp_dim=40", "base_num_decoder_layers=3", "vocab_size=260", "max_target_length=12"),
)
EXPERTS = (
    *("decoder_block=dots1", "use_qk_norm=true", "routed_bias=true", "routed_score_func=sigmoid"),
    *("num_experts=4", "num_experts_per_tok=2", "base_moe_mlp_dim=20", "shared_experts=1"),
    "first_num_dense_layers=1",
)
LATENT = ("decoder_block=deepseek_v3", "base_num_kv_heads=6", "q_lora_rank=20", "kv_lora_rank=12")
LATENT += ("qk_nope_head_dim=4", "qk_rope_head_dim=4", "v_head_dim=6", "head_dim=32", *EXPERTS[2:])
DELTA = ("decoder_block=qwen3_5", "use_qk_norm=true", "head_dim=8", "gdn_num_key_heads=2")
DELTA += ("gdn_num_value_heads=4", "gdn_key_head_dim=4", "gdn_value_head_dim=6")


def load(*arguments):
    return resolve(loading.load([BASE, *arguments]), 1, 1, 1)


def no_devices():
    """A mesh without devices: enough to trace a model of any size."""
    return jax.sharding.use_abstract_mesh(abstract_mesh(dict.fromkeys(AXES, 1)))


def abstract_model(config):
    with no_devices():
        return jax.eval_shape(lambda: Decoder(config.model, jax.random.key(0)))


def test_shape_keys_are_those_that_change_a_weight():
    """Each key of the model, changed alone; a family is a name for some of them."""
    changing = [_keys_of_shapes(load(*SMALL, *own)) for own in ((), EXPERTS, DELTA, LATENT)]
    assert set.union(*changing) == {*SHAPE_KEYS, "lora_rank"}


def _keys_of_shapes(config):
    def shapes(**changed):
        model = abstract_model(config.replace(**changed))
        return {str(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(model)}

    other = {"mlp_activations": ["gelu", "linear"], "base_num_kv_heads": 3, "remat_policy": "full"}
    other |= {"dtype": "bfloat16", "weight_dtype": "bfloat16"}
    other |= {"context_parallel_strategy": "ulysses", "rope_attention_factor": 1.5}
    other |= {"attention": "dot_product", "rope_type": "llama3.1", "sliding_window_size": 8}
    other |= {"query_pre_attn_scalar": 8, "local_rope_max_timescale": 100.0}
    other |= {"attn_logits_soft_cap": 5.0, "final_logits_soft_cap": 5.0}
    other |= {"lora_rank": 4, "lora_dropout": 0.5}
    is_softmax = config.model.routed_score_func == "softmax"
    other |= {"routed_score_func": "sigmoid" if is_softmax else "softmax"}
    other |= {"grouped_matmul": "blocks", "expert_dispatch": "gather"}
    other |= {"first_num_dense_layers": 2, "shared_experts": 2}
    other |= {"load_balance_loss_scope": "step", "capacity_factor": 2.0, "base_moe_mlp_dim": 30}
    other |= {"q_lora_rank": 8}
    other |= {"mtp_num_layers": 1, "quantization": "fp8_full"}
    other |= {"n_routing_groups": 2, "topk_routing_group": 1, "routed_bias_update_rate": 0.1}
    other |= {"load_balance_loss_weight": 0.1, "router_z_loss_weight": 0.1}
    before, keys = shapes(), {"decoder_block"}
    for field in dataclasses.fields(config.model):
        name, value = field.name, config.values[field.name]
        if name != "decoder_block":
            new = other.get(name, not value if isinstance(value, bool) else 2 * value)
            assert new != value
            keys |= {name} if shapes(**{name: new}) != before else set()
    return keys


@pytest.mark.parametrize("name", MODELS)
def test_published_size(name):
    model = abstract_model(load(f"model_name={name}"))
    assert num_parameters(model) == PUBLISHED[name]


def test_models_have_the_rope_of_their_cards():
    def rope(name):
        return Rope.from_keys(load(f"model_name={name}").model)

    assert rope("llama3.1-8b") == Rope(500_000.0, 8.0, "llama3.1", 1.0, 4.0, 8192)
    expected = Rope(500_000.0, 32.0, "llama3.1", 1.0, 4.0, 8192)
    assert rope("llama3.2-1b") == rope("llama3.2-3b") == expected
    assert rope("llama3-8b") == Rope(500_000.0)


def product_flops(jaxpr):
    """Two operations per term of every matrix product in a jaxpr; loops count every round."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left, result = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
            total += 2 * math.prod(result) * math.prod(left[i] for i in contracted)
        assert equation.primitive.name not in ("while", "cond")
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += times * product_flops(inner)
    return total


def gradient_of(config):
    """The jaxpr of the loss's gradient of two rows."""

    def loss(model, tokens_BS):
        execution = config.model
        x_BTD, _ = model.hidden(tokens_BS[:, :-1], execution)
        head_DV = model.head(execution.dtype)
        return cross_entropy_sums(x_BTD, head_DV, tokens_BS[:, 1:], 0.0, 0)[0]

    tokens_BS = jax.ShapeDtypeStruct((2, config.model.max_target_length + 1), jnp.int32)
    with no_devices():
        return jax.make_jaxpr(jax.grad(loss))(abstract_model(config), tokens_BS).jaxpr


def gradient_flops(config):
    """Operations of the matrix products in the gradient, per token."""
    return product_flops(gradient_of(config)) / (2 * config.model.max_target_length)


@pytest.mark.parametrize("scan", (False, True))
@pytest.mark.parametrize("tied", (False, True))
def test_training_flops(scan, tied):
    """The products of the traced gradient, less the half of attention that is computed and masked:
    of 2 T h operations a head and token, in 2 products, three times (forward, backward twice)."""
    config = load(*SMALL, f"scan_layers={scan}", f"logits_via_embedding={tied}")
    H, h, L, T = 6, 4, 3, 12
    masked = 2 * T * h * H * L * 2 * 3 / 2
    assert gradient_flops(config) - masked == training_flops_per_token(config.model, T)


@pytest.mark.parametrize(("window", "seen"), [(5, 5 * 12 - 5 * 5 / 2), (12, 72), (50, 72)])
def test_training_flops_of_a_window(window, seen):
    """Of T x T products of queries and keys those below the diagonal, at most a window of them."""
    config = load(*SMALL, "decoder_block=mistral", f"sliding_window_size={window}")
    H, h, L, T = 6, 4, 3, 12
    masked = (T * T - seen) / T * 2 * h * H * L * 2 * 3
    assert gradient_flops(config) - masked == training_flops_per_token(config.model, T)


def test_remat_recomputes_what_it_says():
    """full: all products again but the last, which no gradient reads; minimal: attention's."""
    D, H, K, h, F, L, T = 24, 6, 2, 4, 40, 3, 12
    weights = L * (2 * D * h * (2 * H + 2 * K) + 2 * 2 * D * F)
    attention = L * 2 * 2 * T * h * H
    none, minimal, full = (
        gradient_flops(load(*SMALL, f"remat_policy={policy}"))
        for policy in ("none", "minimal", "full")
    )
    assert minimal - none == attention
    assert full - none == weights + attention


def test_a_kernels_result_is_kept_where_the_policy_says_so(monkeypatch):
    """Splash attention is computed once more under minimal and full, as MaxText's is."""
    monkeypatch.setattr(attention, "select", lambda *_: "splash_interpreted")
    size = ("base_num_kv_heads=6", "max_target_length=128")

    def kernels(policy):
        jaxpr = gradient_of(load(*SMALL, *size, f"remat_policy={policy}"))
        live, _ = dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))  # as a compiler does
        return str(live).count(" pallas_call[")

    none = kernels("none")
    assert kernels("minimal_with_context") == none > 1
    assert kernels("minimal") == kernels("full") == none + 1


def test_initial_weights():
    """1 / sqrt(inputs) or 1 / sqrt(D), cut at two deviations; norms are 1; layers, seeds differ."""
    config = make_config(*ONE_ROW)
    with jax.set_mesh(make_mesh(config)):
        make = jax.jit(functools.partial(Decoder, config.model))
        model, other = make(jax.random.key(0)), make(jax.random.key(1))
    inputs = {"embedding_VD": 32, "head_DV": 32, "out_HhD": 64, "out_FD": 64}
    others = jax.tree.leaves(other)
    for (path, weight), another in zip(jax.tree.leaves_with_path(model), others, strict=True):
        name = jax.tree_util.keystr(path).removesuffix(".value").rpartition(".")[-1]
        x, y = np.asarray(weight), np.asarray(another)
        if name == "scale_D":
            assert np.all(x == 1)
            continue
        std = inputs.get(name, 32) ** -0.5
        # The standard deviation of n values is known to 1 / sqrt(2n): here 1.1% at most.
        assert np.std(x) == pytest.approx(std, rel=0.04), name
        assert np.abs(x).max() <= 2 * std / 0.8796
        assert np.mean(x == y) < 0.01
        if x.shape[0] == 2:
            assert np.mean(x[0] == x[1]) < 0.01


@pytest.mark.parametrize(
    "axes, x_spec, spec, y_spec",
    [("D F", X_BTD, MLP_IN_DF, X_BTF), ("F D", X_BTF, MLP_OUT_FD, STREAM_BTD)],
)
@pytest.mark.parametrize("apart", [(), ("data",)])
def test_products_of_few_tokens(axes, x_spec, spec, y_spec, apart):
    """On all axes, and their gradients: XLA alone returns the rows in another order."""
    config = make_config(*ONE_ROW, "ici_data_parallelism=2", "ici_tensor_parallelism=2")
    mesh, random = make_mesh(config), np.random.default_rng(0)
    x, weight, dy = (random.standard_normal(s) for s in ((8, 1, 16), (16, 32), (8, 1, 32)))

    def products(x, weight, dy):
        weight = jax.reshard(weight, weight_spec(spec, apart))
        y, back = jax.vjp(lambda x, w: dense(x, new_weight(w, "matrix", axes), y_spec), x, weight)
        dx, dweight = back(dy)
        assert jax.typeof(dweight).sharding.spec == gradient_spec(weight_spec(spec, apart))
        return y, dx, jax.reshard(dweight, spec)

    with jax.set_mesh(mesh):
        arrays = zip((x, weight, dy), (x_spec, spec, y_spec), strict=True)
        placed = (jax.device_put(np.float32(a), NamedSharding(mesh, s)) for a, s in arrays)
        outputs = jax.jit(products)(*placed)
    for one, other in zip(outputs, (x @ weight, dy @ weight.T, x[:, 0].T @ dy[:, 0]), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


@pytest.mark.parametrize("T, vectors_travel", [(3, True), (6, False), (16, False)])
@pytest.mark.parametrize("apart", [(), ("data",)])
def test_what_travels_to_look_tokens_up(T, vectors_travel, apart):
    """Vectors, or the table where a device has as many tokens as its part has rows: same bits."""
    config = make_config(*ONE_ROW, "ici_data_parallelism=2", "ici_tensor_parallelism=2")
    mesh, random = make_mesh(config), np.random.default_rng(0)
    table = random.standard_normal((16, 8), np.float32)
    tokens = random.integers(0, 16, (8, T), np.int32)
    with jax.set_mesh(mesh):
        table_VD = jax.device_put(table, NamedSharding(mesh, EMBEDDING_VD))
        tokens_BT = jax.device_put(tokens, NamedSharding(mesh, TOKENS_BT))
        spec = weight_spec(EMBEDDING_VD, apart)
        find = jax.jit(lambda table, tokens: look_up(jax.reshard(table, spec), tokens))
        program = find.lower(table_VD, tokens_BT).compile()
        np.testing.assert_array_equal(program(table_VD, tokens_BT), table[tokens])
    assert ("all-to-all" in program.as_text()) == vectors_travel


def hash_with_numpy(arrays):
    """As the docstring defines it."""
    words = []
    for c in (0x9E3779B9, 0x7F4A7C15):
        word = 0
        for n, x in enumerate(arrays, 1):
            bits = x.ravel().view(f"uint{8 * x.itemsize}").astype(np.uint32)
            index = np.arange(bits.size, dtype=np.uint32)
            mixed = mix_bits(mix_bits(index + np.uint32(n * c % 2**32)) ^ bits)
            word += int(mixed.sum(dtype=np.uint32))
        words.append(f"{word % 2**32:08x}")
    return "".join(words)


@pytest.mark.parametrize(
    "keys",
    [
        ("weight_dtype=bfloat16",),
        ("ici_fsdp_parallelism=4", "ici_tensor_parallelism=2"),
        ("ici_pipeline_parallelism=2", "num_pipeline_repeats=2", "base_num_decoder_layers=4"),
    ],
)
def test_weights_have_one_hash_on_every_mesh(keys):
    config = make_config(*keys)
    with jax.set_mesh(make_mesh(config)):
        model = order_by_layer(initial_state(config.recipe).model)
    fingerprint = fingerprint_of_weights(model)  # with no mesh set
    arrays = [np.asarray(x) for x in jax.tree.leaves(model)]
    assert fingerprint == hash_with_numpy(arrays)
    changed = [x.copy() for x in arrays]
    changed[-1].flat[-1] += 1
    assert fingerprint_of_weights(changed) == hash_with_numpy(changed) != fingerprint
