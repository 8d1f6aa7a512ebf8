"""Families compute what transformers 5.23.0 computes for them; patterns run layers in order."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_config, make_mesh

from maxramp.model.decoder import Decoder
from maxramp.model.families.table import FAMILIES
from maxramp.model.parts import rotary
from maxramp.model.parts.embedding import look_up
from maxramp.model.parts.positions import Pass, Positions
from maxramp.model.pattern import Layer, Mixing, Pattern, Rope

# transformers' ROPE_INIT_FUNCTIONS["llama3"] at rope_theta 500,000, low_freq_factor 1,
# high_freq_factor 4, original_max_position_embeddings 8,192: by factor and head_dim the inverse
# frequency of some pairs.
FREQUENCIES = {
    (8.0, 128): {0: 1.0, 1: 0.8146172, 28: 0.003211446, 29: 0.002166571, 34: 0.0001785078}
    | {35: 9.556212e-05, 36: 7.784655e-05, 63: 3.068926e-07},
    (32.0, 64): {0: 1.0, 1: 0.6636013, 14: 0.003211446, 15: 0.001290548, 17: 9.708286e-05}
    | {18: 1.946164e-05, 31: 9.418306e-08},
}

KEYS = (
    *("base_emb_dim=32", "base_num_query_heads=4", "base_num_kv_heads=2", "head_dim=16"),
    *("base_mlp_dim=48", "base_num_decoder_layers=2", "vocab_size=40", "max_target_length=24"),
    *("rope_max_timescale=100", "dataset_type=synthetic"),
    *("enable_rampup_batch_size=False", "per_device_batch_size=1"),
)
# Logits of tokens 0 to 3 in float64 behind the first 4, 12 and 24 tokens of 0, 7, 14, ... mod 40,
# with the weights of `weights`.
LOGITS = {
    (): [
        [1.061524, -2.788832, -0.6833473, 0.3514469],
        [-0.8515779, 1.708866, -0.4129009, 2.027129],
        [0.7523563, -0.6009015, 0.1367025, 0.2429114],
    ],
    (
        *("rope_type=llama3.1", "rope_factor=8", "rope_low_freq_factor=1"),
        *("rope_high_freq_factor=4", "original_max_position_embeddings=16"),
    ): [
        [1.334074, -2.571832, -0.5170651, 0.304672],
        [0.8240119, -1.555861, -0.512061, -0.2244285],
        [-0.6326288, -0.4231415, 1.033469, 1.396137],
    ],
    ("decoder_block=mistral", "sliding_window_size=5"): [
        [1.061524, -2.788832, -0.6833474, 0.3514464],
        [-0.2995807, -3.437736, 0.3058939, -0.8351295],
        [0.3739095, -0.105446, 0.6179884, 0.9020613],
    ],
}


@pytest.mark.parametrize(("factor", "head_dim"), FREQUENCIES)
def test_scaled_rotary_frequencies(factor, head_dim):
    """The angles at position 1, by Llama 3.1's and 3.2's factors."""
    rope = Rope(500_000.0, factor, "llama3.1", low=1.0, high=4.0, length=8192)
    cos, sin = rotary.angles(rope, jnp.array([1]), head_dim)
    angles = np.arctan2(sin[0], cos[0])
    for pair, frequency in FREQUENCIES[factor, head_dim].items():
        assert angles[pair] == pytest.approx(frequency, rel=2e-6)


def test_models_have_the_rope_of_their_cards():
    def rope(name):
        return Rope.from_keys(
            make_config(f"model_name={name}", "enable_rampup_batch_size=False").model
        )

    assert rope("llama3.1-8b") == Rope(500_000.0, 8.0, "llama3.1", 1.0, 4.0, 8192)
    expected = Rope(500_000.0, 32.0, "llama3.1", 1.0, 4.0, 8192)
    assert rope("llama3.2-1b") == rope("llama3.2-3b") == expected
    assert rope("llama3-8b") == Rope(500_000.0)


def weights():
    """By path, drawn in the order in which transformers' were."""
    D, H, K, h, F, V = 32, 4, 2, 16, 48, 40
    random = np.random.default_rng(0)

    def draw(*shape):
        return random.standard_normal(shape) * 0.2

    arrays = {"embedding_VD": draw(V, D), "head_DV": draw(D, V), "norm.scale_D": 1 + draw(D)}
    layers = []
    for _ in range(2):
        layers.append({"mixer.query_DHh": draw(D, H, h), "mixer.key_DKh": draw(D, K, h)})
        layers[-1] |= {"mixer.value_DKh": draw(D, K, h), "mixer.out_HhD": draw(H, h, D)}
        layers[-1] |= {"mlp.gate_DF": draw(D, F), "mlp.up_DF": draw(D, F)}
        layers[-1] |= {"mlp.out_FD": draw(F, D), "mixer_norm.scale_D": 1 + draw(D)}
        layers[-1] |= {"mlp_norm.scale_D": 1 + draw(D)}
    for name in layers[0]:
        arrays[f"layers.dense.{name}"] = np.stack([layer[name] for layer in layers])
    return arrays


def with_weights(config):
    model = jax.eval_shape(lambda: Decoder(config.model, jax.random.key(0)))
    arrays = weights()

    def place(path, x):
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        return jnp.asarray(arrays[name].astype(np.float32), out_sharding=x.sharding.spec)

    return jax.tree_util.tree_map_with_path(place, model)


@pytest.mark.parametrize("keys", LOGITS, ids=" ".join)
def test_logits_are_those_of_transformers(keys):
    config = make_config(*KEYS, *keys, devices=1)
    tokens_BT = (np.arange(24, dtype=np.int32) * 7 % 40)[None]
    with jax.set_mesh(make_mesh(config)):
        forward = functools.partial(Decoder.__call__, execution=config.model)
        logits = np.asarray(jax.jit(forward)(with_weights(config), tokens_BT)[0])
    np.testing.assert_allclose(logits[[3, 11, 23], :4], LOGITS[keys], atol=2e-5)


ROPE = Rope(10_000.0)
ALL, NEAR = Layer("dense", lambda keys: Mixing(ROPE)), Layer("dense", lambda keys: Mixing(ROPE, 3))
OTHER = Layer("other", lambda keys: Mixing(ROPE, 2))
PATTERNS = {
    "alternating windows": Pattern((NEAR, ALL), 2),
    "two kinds, and layers around the loop": Pattern((NEAR, OTHER), 2, (ALL,), (OTHER, NEAR)),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_layers_run_in_the_order_of_the_pattern(monkeypatch, name):
    """Each with the weights of its kind at its place: the result is that of one after the other."""
    pattern = PATTERNS[name]
    llama = FAMILIES["llama2"]
    block = llama.blocks()["dense"]
    family = dataclasses.replace(
        llama, pattern=lambda keys: pattern, blocks=lambda: {"dense": block, "other": block}
    )
    monkeypatch.setitem(FAMILIES, "llama2", family)
    count = f"base_num_decoder_layers={len(list(pattern))}"
    config = make_config(*KEYS, count, "remat_policy=full", devices=1)
    tokens_BT = (np.arange(24, dtype=np.int32) * 7 % 40)[None]

    def one_by_one(model):
        x_BTD = look_up(model.embedding_VD[...], tokens_BT)
        angles = {ROPE: rotary.angles(ROPE, jnp.arange(24), 16)}
        shared = Pass(config.model, Positions(), angles)
        for layer, block in zip(pattern, model.one_by_one().layers, strict=True):
            x_BTD, _ = block(x_BTD, layer.mixing(config.model), shared)
        return model.logits(model.norm(x_BTD))

    with jax.set_mesh(make_mesh(config)):
        model = jax.jit(lambda: Decoder(config.model, jax.random.key(0)))()
        logits = jax.jit(lambda model: model(tokens_BT, config.model))(model)
        np.testing.assert_allclose(logits, jax.jit(one_by_one)(model), atol=1e-5)
