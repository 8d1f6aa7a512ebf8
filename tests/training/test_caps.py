"""Caps of logits and scores, and layers that differ: Gemma's training."""

import jax
import numpy as np
import pytest
from conftest import batch_of, make_config, make_mesh

from maxramp.model.decoder import Decoder
from maxramp.training.log_probs import scores, token_log_probs
from maxramp.training.loss import next_token_prediction

TINY = ("decoder_block=gemma2", "sliding_window_size=6", "mlp_activations=[gelu,linear]")
TINY += ("logits_via_embedding=True", "attn_logits_soft_cap=50", "dataset_type=synthetic")
TINY += ("enable_rampup_batch_size=False", "per_device_batch_size=1")


@pytest.mark.parametrize(
    "mesh", [(), pytest.param(("ici_tensor_parallelism=2",), marks=pytest.mark.slow)]
)
def test_caps_of_logits_are_in_all_that_is_made_of_them(mesh):
    """The loss, log-probabilities and scores, with gradients; beside plain formulas of logits."""
    keys = ("final_logits_soft_cap=0.7", "loss_block_tokens=6", "z_loss_multiplier=0.1")
    config = make_config(*TINY, *keys, *mesh, devices=2 if mesh else 1)
    batch = batch_of((np.arange(34, dtype=np.int32) * 7 % 264).reshape(2, 17))
    execution = config.model
    objective = next_token_prediction(config.recipe.loss, execution)

    def minimize(model):
        log_p_BT, _, _ = token_log_probs(model, execution, batch, 6, temperature=0.5)
        return log_p_BT.sum() + objective(model, batch)[0], log_p_BT

    def plain(model):
        logits_BTV = model(batch.tokens, execution)
        chosen_BTV = np.eye(264)[batch.targets]
        warm, cold = (jax.nn.log_softmax(logits_BTV / t) for t in (1, 0.5))
        chosen, log_p_BT = ((x * chosen_BTV).sum(-1) for x in (warm, cold))
        z = jax.nn.logsumexp(logits_BTV, -1)
        return log_p_BT.sum() - chosen.sum() + 0.1 * (z**2).sum(), (log_p_BT, chosen)

    with jax.set_mesh(make_mesh(config)):
        model = jax.jit(lambda: Decoder(execution, jax.random.key(0)))()
        gradient, log_p_BT = jax.jit(jax.grad(minimize, has_aux=True))(model)
        expected, (cold, warm) = jax.jit(jax.grad(plain, has_aux=True))(model)

        @jax.jit
        def score(model):
            x_BTD, _ = model.hidden(batch.tokens, execution)
            return scores(x_BTD, model.head("float32"), batch.targets, 6, model.logits_cap)[0]

        np.testing.assert_allclose(score(model), warm, atol=1e-5)
    np.testing.assert_allclose(log_p_BT, cold, atol=1e-5)
    for own, other in zip(*map(jax.tree.leaves, (gradient, expected)), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-4 * np.abs(other).max())
