"""The hash of weights: the same on any mesh, and another where a value or its place is."""

import jax
import numpy as np
import pytest
from conftest import make_config, make_mesh, mix_bits

from maxramp.model.parts.weights import fingerprint_of_weights
from maxramp.model.pipeline import order_by_layer
from maxramp.training.state import initial_state


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
