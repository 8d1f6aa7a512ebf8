"""Folders of experts and of draft layers, and dense models that become experts."""

import json

import numpy as np
import pytest
from conftest import make_config, make_mesh
from opened import config_of, contents, load, logits
from small_models import TOKENS_BT, write_folder
from test_weights import MESHES, assert_same_tensors, on_mesh, write

from maxramp import convert
from maxramp.errors import ConfigError
from maxramp.handover.weights import open_weights
from maxramp.huggingface import config_json
from maxramp.model.families.table import unify_keys
from maxramp.training.state import abstract_state


def test_only_experts_are_fused(tmp_path, capsys):
    folder = write_folder(tmp_path / "in", "llama2")
    assert convert.main([str(folder), "--fuse_experts", "--to", str(tmp_path / "out")]) == 2
    assert "in has no experts to write; leave it out" in capsys.readouterr().err


UPCYCLED = {
    "mistral": ("decoder_block=mixtral",),
    "qwen3": ("decoder_block=qwen3_moe", "norm_topk_prob=true"),
}


@pytest.mark.parametrize(
    "name, mesh", [("mistral", "one"), pytest.param("qwen3", "experts", marks=pytest.mark.slow)]
)
def test_a_dense_model_becomes_experts_with_equal_logits(tmp_path, name, mesh):
    """Each as its MLP: the model begins equal to it, and its routers tell tokens apart."""
    folder = write_folder(tmp_path, name)
    dense, model = on_mesh(folder, "one")
    expected = logits(model, dense, TOKENS_BT)
    arguments = (*MESHES[mesh], *UPCYCLED[name], "num_experts=4", "num_experts_per_tok=2")
    config = config_of(folder, *arguments, devices=8 if MESHES[mesh] else 1)
    model = abstract_state(config.recipe, make_mesh(config)).model
    model = open_weights(str(folder)).prepare(model, config.values)()
    rows = np.tile(TOKENS_BT, (4 // len(TOKENS_BT), 1))
    results = logits(model, config, rows)[: len(TOKENS_BT)]
    np.testing.assert_allclose(results, expected, atol=1e-5 * np.ptp(expected))
    router = np.asarray(model.layers["sparse"].mlp.router.matrix_DE[...])
    assert 0.8 < router.std() * 32**0.5 < 1.2
    assert len(np.unique(router)) > 0.9 * router.size


@pytest.mark.parametrize("normalized", (True, False))
def test_a_run_says_that_its_experts_begin_at_another_loss(tmp_path, normalized):
    arguments = (f"norm_topk_prob={normalized}", "num_experts=4", "num_experts_per_tok=2")
    config = config_of(write_folder(tmp_path, "qwen3"), "decoder_block=qwen3_moe", *arguments)
    model, notes = abstract_state(config.recipe, make_mesh(config)).model, []
    open_weights(str(tmp_path)).prepare(model, config.values, notes.append)
    assert ["does not begin at that of the dense model" in note for note in notes] == (
        [] if normalized else [True]
    )


@pytest.mark.parametrize(
    "name, keys, says",
    [
        ("llama2", "decoder_block=qwen3_moe use_qk_norm=true", "its .*key_norm.* is in no model"),
        ("qwen3", "decoder_block=mixtral use_qk_norm=false", "config.json makes it True"),
        ("llama2", "decoder_block=mixtral base_moe_mlp_dim=24", "but the config makes it"),
    ],
)
def test_a_dense_model_that_cannot_become_these_experts_is_refused(tmp_path, name, keys, says):
    folder = write_folder(tmp_path, name)
    config = config_of(folder, *keys.split(), "num_experts=4", "num_experts_per_tok=2")
    model = abstract_state(config.recipe, make_mesh(config)).model
    with pytest.raises(ConfigError, match=says):
        open_weights(str(folder)).prepare(model, config.values)


@pytest.mark.parametrize("name", ["mixtral", "dots1"])
def test_what_is_exported_is_what_the_config_says(name):
    """Also where keys are open: a width, groups, or a dense width that no weight has."""
    own = {"mixtral": (), "dots1": ("use_qk_norm=True", "routed_score_func=sigmoid")}[name]
    own += ("routed_bias=True", "first_num_dense_layers=1") if name == "dots1" else ()
    config = make_config(f"decoder_block={name}", "num_experts=4", *own)
    values = config_json.make_config(config.model, {}, "float32")
    written, own = config_json.read_keys(values, ""), unify_keys(config.values)
    assert written == {key: own[key] for key in written}


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5"])
def test_draft_layers_are_read_and_written(tmp_path, name):
    """Bit by bit, where they train; copies of embedding and head follow these."""
    held = contents(write_folder(tmp_path / "in", name, drafts=True))
    config = config_of(tmp_path / "in", "mtp_num_layers=1")
    write(tmp_path / "out", config, load(tmp_path / "in", config))
    assert_same_tensors(tmp_path / "out", held)
    key = "mtp_num_hidden_layers" if name == "qwen3_5" else "num_nextn_predict_layers"
    assert json.loads((tmp_path / "out/config.json").read_text())[key] == 1


def test_drafts_that_a_folder_lacks_are_refused(tmp_path):
    for name in ("glm4_moe", "llama2"):
        folder = write_folder(tmp_path / name, name)
        config = config_of(folder, "mtp_num_layers=1")
        model = abstract_state(config.recipe, make_mesh(config)).model
        with pytest.raises(ConfigError, match="mtp_num_layers=1: .* has 0 draft layers .* use 0"):
            open_weights(str(folder)).prepare(model, config.values)
