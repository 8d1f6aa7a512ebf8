"""Positions are scaled as transformers 5.23.0 scales them."""

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import make_config

from maxramp.model.parts.positions import rotary_angles
from maxramp.model.pattern import Rope

# transformers' ROPE_INIT_FUNCTIONS["llama3"] at rope_theta 500,000, low_freq_factor 1,
# high_freq_factor 4, original_max_position_embeddings 8,192: by factor and head_dim the inverse
# frequency of some pairs.
FREQUENCIES = {
    (8.0, 128): {0: 1.0, 1: 0.8146172, 28: 0.003211446, 29: 0.002166571, 34: 0.0001785078}
    | {35: 9.556212e-05, 36: 7.784655e-05, 63: 3.068926e-07},
    (32.0, 64): {0: 1.0, 1: 0.6636013, 14: 0.003211446, 15: 0.001290548, 17: 9.708286e-05}
    | {18: 1.946164e-05, 31: 9.418306e-08},
}


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
