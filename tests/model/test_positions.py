"""Tokens of a row may lie in any order, if what their batch says of them lies with them."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from conftest import batch_of, make_config, make_mesh
from jax.sharding import NamedSharding

from maxramp.errors import ConfigError
from maxramp.model.parts.attention import select
from maxramp.parallel.sharding import ROWS_BT
from maxramp.training.state import initial_state
from maxramp.training.step import loss_of

MESH = ("ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2")
WINDOW = ("decoder_block=mistral", "sliding_window_size=5", "base_num_decoder_layers=1")
PIPELINE = ("ici_pipeline_parallelism=2", "base_num_decoder_layers=4")
PIPELINE += ("num_layers_per_pipeline_stage=1",)


def permuted(batch, seed):
    """The batch [B, T] with the tokens of each row in an order of its own, and their positions."""
    B, T = batch.tokens.shape
    order_BT = np.random.default_rng(seed).permuted(np.tile(np.arange(T), (B, 1)), axis=1)
    segments = batch.segments if batch.segments is not None else np.zeros((B, T), np.int32)
    first = [[np.flatnonzero(row == segment)[0] for segment in row] for row in segments]
    positions = (np.arange(T) - first).astype(np.int32)
    moved = {
        name: np.take_along_axis(getattr(batch, name), order_BT, 1)
        for name in ("tokens", "targets", "segments")
        if getattr(batch, name) is not None
    }
    positions = np.take_along_axis(positions, order_BT, 1)
    return dataclasses.replace(batch, **moved, positions=positions)


@pytest.mark.parametrize(
    ("devices", "keys", "packed"),
    [
        (1, WINDOW, True),
        pytest.param(8, MESH, False, marks=pytest.mark.slow),
        pytest.param(8, PIPELINE, True, marks=pytest.mark.slow),
    ],
    ids=["packed rows, a window", "rows of one text, a mesh", "a circular pipeline"],
)
def test_rows_of_permuted_tokens(devices, keys, packed):
    """The same loss and gradients; with other positions, others."""
    constant = ("enable_rampup_batch_size=False", f"per_device_batch_size={8 // devices}")
    config = make_config(*constant, *keys, devices=devices)
    random, mesh = np.random.default_rng(0), make_mesh(config)
    rows = random.integers(0, 264, (8, 17), dtype=np.int32)
    batch = batch_of(rows, random.random(rows.shape) < 0.2 if packed else None)
    moved = permuted(batch, 1)
    objective = loss_of(config.recipe)

    @jax.jit
    def gradient(model, batch):
        return jax.value_and_grad(lambda model: objective(model, batch)[0])(model)

    with jax.set_mesh(mesh):
        model = initial_state(config.recipe).model
        place = functools.partial(jax.device_put, device=NamedSharding(mesh, ROWS_BT))
        loss, expected = gradient(model, place(batch))
        moved_loss, actual = gradient(model, place(moved))
        other_loss, _ = gradient(
            model, place(dataclasses.replace(moved, positions=moved.positions[::-1]))
        )
    assert moved_loss == pytest.approx(float(loss), rel=1e-6)
    assert abs(other_loss - loss) > 1e-4 * loss
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.abs(one - other).max() < 2e-5 * np.abs(other).max()


def test_kernels_want_tokens_in_order():
    """One place says so: autoselected falls back to the plain products."""
    gpu = ("gpu", "bfloat16", 64, 128)
    assert select("autoselected", *gpu) == "cudnn_flash"
    assert select("autoselected", *gpu, in_order=False) == "dot_product"
    for kernel, where in (("cudnn_flash", gpu), ("splash", ("tpu", *gpu[1:]))):
        with pytest.raises(ConfigError, match=f"attention={kernel} needs tokens that lie in order"):
            select(kernel, *where, in_order=False)
