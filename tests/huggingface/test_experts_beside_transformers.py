"""Families of experts beside transformers: both layouts of their tensors, read and written."""

import pytest
from later import Later
from opened import config_of, load, logits
from peers import assert_near, opened, theirs
from small_models import CONFIGS, EXPERTS, TOKENS_BT, fuse_experts, tensors, write_folder
from test_weights import assert_same_tensors, write

from maxramp.huggingface.safetensors import find_tensors

Later("transformers")
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", EXPERTS)
def test_both_layouts_of_experts_are_read(tmp_path, name):
    model = opened(write_folder(tmp_path / "in", name))
    held = tensors(CONFIGS[name])
    for is_fused in (False, True):
        folder = tmp_path / f"{is_fused}"
        model.save_pretrained(folder, save_original_format=not is_fused)
        assert {*find_tensors(str(folder))} == {*(fuse_experts(held) if is_fused else held)}
        config = config_of(folder)
        assert_near(logits(load(folder, config), config, TOKENS_BT), theirs(model))


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_written_in_one_tensor_a_layer(tmp_path, name):
    """transformers opens them, with the tensors that it would write itself."""
    folder = write_folder(tmp_path / "in", name)
    config = config_of(folder)
    write(tmp_path / "out", config, load(folder, config), file_bytes=30_000, fuse_experts=True)
    assert_same_tensors(tmp_path / "out", fuse_experts(tensors(CONFIGS[name])))
    assert_near(theirs(opened(tmp_path / "out")), theirs(opened(folder)), 1e-7)
