"""Draft layers of folders: read and written where they train."""

import json

import pytest
from conftest import make_mesh
from opened import config_of, contents, load
from small_models import write_folder
from test_weights import assert_same_tensors, write

from maxramp.errors import ConfigError
from maxramp.handover.weights import open_weights
from maxramp.training.state import abstract_state


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
