"""A draft beside transformers' own layer for drafts."""

import functools

import jax
import numpy as np
import pytest
from conftest import make_mesh
from later import Later
from opened import config_of, load
from small_models import TOKENS_BT, write_folder

from maxramp.model.decoder import Decoder
from maxramp.model.parts.positions import Positions

torch, transformers = Later("torch"), Later("transformers")
pytestmark = pytest.mark.slow


def test_a_draft_is_that_of_transformers(tmp_path):
    """GLM's, by transformers' own layer for drafts."""
    from transformers.modeling_layers import MtpModel

    write_folder(tmp_path, "glm4_moe", drafts=True)
    main = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4\..*"]
    drafts = MtpModel.from_pretrained(main)
    tokens = torch.tensor(TOKENS_BT, dtype=torch.long)
    with torch.no_grad():
        hidden = main.model(tokens).last_hidden_state[:, :-1]
        positions = torch.arange(1, tokens.shape[1])[None]
        x = drafts.forward_layer(0, hidden, positions, None, input_ids=tokens[:, 1:])
        expected = main.lm_head(x).numpy()
    config = config_of(tmp_path, "mtp_num_layers=1")
    model = load(tmp_path, config)

    def compute(model: Decoder, tokens_BT: jax.Array) -> jax.Array:
        ahead_BT = np.roll(tokens_BT, -1, axis=1)
        x_BTD, ahead_BTD = model.embed("float32", tokens_BT, ahead_BT)
        x_BTD, _ = model.run(x_BTD, config.model, Positions())
        return model.logits(model.draft(0, x_BTD, ahead_BTD, config.model, Positions())[0])

    with jax.set_mesh(make_mesh(config)):
        actual = jax.jit(functools.partial(compute, tokens_BT=TOKENS_BT.astype(np.int32)))(model)
    np.testing.assert_allclose(actual[:, :-1], expected, atol=1e-5 * np.ptp(expected), rtol=0)
