"""Positions are scaled as transformers 5.23.0 scales them; patterns run layers in order."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_config, make_mesh

from maxramp.model.decoder import Decoder
from maxramp.model.families.table import FAMILIES
from maxramp.model.parts.embedding import look_up
from maxramp.model.parts.positions import Pass, Positions, rotary_angles
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


@pytest.mark.parametrize(("factor", "head_dim"), FREQUENCIES)
def test_scaled_rotary_frequencies(factor, head_dim):
    """The angles at position 1, by Llama 3.1's and 3.2's factors."""
    rope = Rope(500_000.0, factor, "llama3.1", low=1.0, high=4.0, length=8192)
    cos, sin = rotary_angles(rope, jnp.array([1]), head_dim)
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
        angles = {ROPE: rotary_angles(ROPE, jnp.arange(24), 16)}
        shared = Pass(config.model, Positions(), angles)
        for layer, block in zip(pattern, model.one_by_one().layers, strict=True):
            x_BTD, _ = block(x_BTD, layer.mixing(config.model), shared)
        return model.logits(model.norm(x_BTD))

    with jax.set_mesh(make_mesh(config)):
        model = jax.jit(lambda: Decoder(config.model, jax.random.key(0)))()
        logits = jax.jit(lambda model: model(tokens_BT, config.model))(model)
        np.testing.assert_allclose(logits, jax.jit(one_by_one)(model), atol=1e-5)
