"""Arithmetic in bfloat16 at the width and vocabulary of a released model, with one layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BASE, batch_of, make_mesh

from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.training.state import initial_state
from maxramp.training.step import make_train_step

STEPS = 20


def losses(name, dtype, rows):
    arguments = [BASE, f"model_name={name}", "base_num_decoder_layers=1", f"dtype={dtype}"]
    arguments += ["enable_rampup_batch_size=False", "per_device_batch_size=2", "eval_interval=-1"]
    arguments += ["dataset_type=synthetic", f"max_target_length={rows.shape[-1] - 1}"]
    config = resolve(load(arguments), 1, 1, 1)
    step = make_train_step(config.recipe, lambda samples, batch: jnp.float32(1e-3))
    results = []
    with jax.set_mesh(make_mesh(config)):
        state = initial_state(config.recipe)
        step = jax.jit(step, donate_argnums=0)
        for batch in rows:
            state, metrics = step(state, batch_of(batch[None]))
            results.append(float(metrics["loss"]))
    return np.array(results)


@pytest.mark.long
def test_losses_are_those_of_float32():
    """Within 1%, while the loss falls; of a Qwen3 0.6B too, in three minutes."""
    random = np.random.default_rng(0)
    words = random.integers(0, 40_000, 50)  # of which the text consists
    rows = words[random.integers(0, 50, (STEPS, 2, 33))].astype(np.int32)
    exact, rough = (losses("smollm2-135m", dtype, rows) for dtype in ("float32", "bfloat16"))
    assert exact[-1] < exact[0] - 2
    np.testing.assert_allclose(rough, exact, rtol=0.01)
