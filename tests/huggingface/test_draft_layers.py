"""Draft layers of folders: read and written where they train."""

import json

import numpy as np
import pytest
from conftest import make_mesh
from opened import config_of, load
from small_models import CONFIGS, shapes, tensors, write_file, write_folder
from test_weights import assert_same_tensors, write

from maxramp.errors import ConfigError
from maxramp.handover.weights import open_weights
from maxramp.training.state import abstract_state


def draft_tensors(name):
    """Those of a folder's draft layer: as its last full layer, and what joins two vectors."""
    config, random = CONFIGS[name], np.random.default_rng(2)
    D, last = config["hidden_size"], "model.layers.3."
    begin = "model.layers.4." if name == "glm4_moe" else "mtp.layers.0."
    by_name = {n.replace(last, begin): x for n, x in shapes(config).items() if n.startswith(last)}
    if name == "glm4_moe":
        own = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
        own = [f"{begin}{n}.weight" for n in own]
    else:
        own = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        own = [f"mtp.{n}.weight" for n in own]
    by_name |= dict(zip(own, ((D,), (D,), (D, 2 * D), (D,)), strict=True))
    mean = float(name == "glm4_moe")
    held = {
        n: mean + 0.3 * random.standard_normal(x)
        if "norm" in n
        else random.standard_normal(x) * (0.5 if n.endswith("bias") else 0.2)
        for n, x in by_name.items()
    }
    if name == "glm4_moe":
        copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        main = tensors(config)
        held |= {f"{begin}{n}.weight": main[f"{x}.weight"] for n, x in copies.items()}
    return {n: x.astype(np.float32) for n, x in held.items()}


def write_with_drafts(folder, name):
    write_folder(folder, name)
    held = tensors(CONFIGS[name]) | draft_tensors(name)
    write_file(folder / "model.safetensors", held)
    return held


@pytest.mark.parametrize("name", ["glm4_moe", "qwen3_5"])
def test_draft_layers_are_read_and_written(tmp_path, name):
    """Bit by bit, where they train; copies of embedding and head follow these."""
    held = write_with_drafts(tmp_path / "in", name)
    config = config_of(tmp_path / "in", "mtp_num_layers=1")
    write(tmp_path / "out", config, load(tmp_path / "in", config))
    assert_same_tensors(tmp_path / "out", held)
    key = "num_nextn_predict_layers" if name == "glm4_moe" else "mtp_num_hidden_layers"
    assert json.loads((tmp_path / "out/config.json").read_text())[key] == 1


def test_drafts_that_a_folder_lacks_are_refused(tmp_path):
    for name in ("glm4_moe", "llama2"):
        folder = write_folder(tmp_path / name, name)
        config = config_of(folder, "mtp_num_layers=1")
        model = abstract_state(config.recipe, make_mesh(config)).model
        with pytest.raises(ConfigError, match="mtp_num_layers=1: .* has 0 draft layers .* use 0"):
            open_weights(str(folder)).prepare(model, config.values)
