"""Models of folders beside transformers itself: the extra `compare` brings it."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import batch_of, make_mesh
from later import Later
from opened import config_of, load, logits, named_arrays
from peers import assert_near, opened, theirs
from small_models import CONFIGS, EXPERTS, TOKENS_BT, tensors, write_file, write_folder

from maxramp.huggingface import config_json, writing
from maxramp.model.decoder import Decoder
from maxramp.training.loss import next_token_prediction
from maxramp.training.state import initial_state
from maxramp.training.step import make_train_step

torch = Later("torch")
transformers = Later("transformers")
pytestmark = pytest.mark.slow


def test_a_model_saved_without_a_head_beside_an_index_of_others(tmp_path):
    """Its embedding is its head; model.safetensors counts, and not what the index names."""
    folder = write_folder(tmp_path / "in", "smollm2")
    bare = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
    bare.save_pretrained(tmp_path / "out")
    stale = {name: 0 * x for name, x in tensors(CONFIGS["smollm2"]).items()}
    write_file(tmp_path / "out/model-00001-of-00001.safetensors", stale)
    index = {"weight_map": dict.fromkeys(stale, "model-00001-of-00001.safetensors")}
    (tmp_path / "out/model.safetensors.index.json").write_text(json.dumps(index))
    config = config_of(tmp_path / "out")
    expected = theirs(opened(tmp_path / "out"))
    assert np.abs(expected).max() > 0.1
    assert_near(logits(load(tmp_path / "out", config), config, TOKENS_BT), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_opens_a_model_that_was_made_here(tmp_path, name):
    """Without a config.json that came in, also where base.yml leaves a key open."""
    config = config_of(write_folder(tmp_path / "in", name))
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, query_pre_attn_scalar=-1)
    )
    with jax.set_mesh(make_mesh(config)):
        model = jax.jit(lambda: Decoder(config.model, jax.random.key(1)))()
    values = config_json.make_config(config.model, {}, "float32")
    form = writing.Format(config.model.decoder_block, "float32", 40, file_bytes=30_000)
    writing.write(tmp_path / "out", model, form, {"config.json": json.dumps(values).encode()}, {})
    assert_near(theirs(opened(tmp_path / "out")), logits(model, config, TOKENS_BT))


def split_experts(arrays, kind):
    """What transformers calls by its own names, by those of a folder."""
    mlp = "block_sparse_moe" if kind == "mixtral" else "mlp"
    names = ("w1", "w3", "w2") if kind == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    actual = {}
    for name, x in arrays.items():
        layer, is_expert, matrix = name.partition("mlp.experts.")
        if kind == "gpt_oss" and is_expert and matrix != "down_proj_bias":
            what = "bias" if matrix.endswith("_bias") else "weight"
            own = ("down_proj",) if matrix == "down_proj" else ("gate_proj", "up_proj")
            for e, n in np.ndindex(len(x), len(own)):
                actual[f"{layer}{mlp}.experts.{e}.{own[n]}.{what}"] = x[e, ..., n :: len(own)].T
        elif not is_expert or kind == "gpt_oss":
            actual[name.replace("mlp.gate.", f"{mlp}.gate.")] = x
        else:
            own = names[:2] if matrix == "gate_up_proj" else names[2:]
            for e, x_e in enumerate(x):
                for part, x_own in zip(own, np.split(x_e, len(own)), strict=True):
                    actual[f"{layer}{mlp}.experts.{e}.{part}.weight"] = x_own
    return actual


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_are_those_of_transformers(tmp_path, name):
    """Gradients of the loss, per tensor within 1e-4 of its largest entry."""
    folder = write_folder(tmp_path, name)
    config, model = config_of(folder, "max_target_length=23"), opened(folder)
    own_model = load(folder, config)
    assert_near(logits(own_model, config, TOKENS_BT), theirs(model))
    rows = torch.tensor(TOKENS_BT, dtype=torch.long)
    model(rows, labels=rows).loss.backward()
    objective = next_token_prediction(config.recipe.loss, config.model)
    batch = batch_of(TOKENS_BT.astype(np.int32))

    def loss(weights):
        total, aux = objective(weights, batch)
        return total / aux.shown["tokens"]

    with jax.set_mesh(make_mesh(config)):
        gradient = jax.jit(jax.grad(loss))(own_model)
    expected = {name: x.grad.numpy() for name, x in model.named_parameters()}
    if CONFIGS[name]["model_type"].removesuffix("_text") in EXPERTS:
        expected = split_experts(expected, name)
    for tensor, own in named_arrays(gradient, config.model.decoder_block).items():
        grad = expected.get(tensor, np.zeros(own.shape))  # a bias of experts' choice has none
        np.testing.assert_allclose(own, grad, atol=1e-4 * np.abs(grad).max(), rtol=0)


def test_losses_of_training_are_those_of_torch(tmp_path):
    """200 steps of AdamW: as near as torch is to itself from weights that differ by 1e-7."""
    folder = write_folder(tmp_path, "qwen3")
    random = np.random.default_rng(1)
    # Text with something to learn: each token follows from the one before, but for some noise.
    rows = np.zeros((200, 8, 24), np.int64)
    rows[..., 0] = random.integers(0, 40, (200, 8))
    for t in range(1, 24):
        follows = (rows[..., t - 1] * 3 + 1) % 40
        rows[..., t] = np.where(random.random((200, 8)) < 0.9, follows, rows[..., t - 1])

    def torch_results(change):
        torch.manual_seed(0)
        model = opened(folder).train()
        with torch.no_grad():
            for x in model.parameters():
                x += change * torch.randn_like(x)
        plain = [x for x in model.parameters() if x.ndim > 1]
        norms = [x for x in model.parameters() if x.ndim == 1]
        groups = [{"params": plain, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), eps=1e-8)
        losses = []
        for batch in rows:
            batch = torch.tensor(batch)
            loss = model(batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return np.array(losses)

    plain = torch_results(0.0)
    spread = np.abs(torch_results(1e-7) - plain).max()
    ours = losses_here(folder, rows)
    assert plain[0] - plain[-1] > 1
    assert np.abs(ours - plain).max() <= 3 * spread + 1e-6, (np.abs(ours - plain).max(), spread)


def losses_here(folder, rows):
    config = config_of(
        folder,
        *("max_target_length=23", "gradient_clipping_threshold=0", "adam_weight_decay=0.1"),
        *("adam_b1=0.9", "adam_b2=0.95", "adam_eps=1e-8", "adamw_mask=[scale,bias]"),
    )
    step = make_train_step(config.recipe, lambda samples, batch: jnp.float32(3e-3))
    losses = []
    with jax.set_mesh(make_mesh(config)):
        state = initial_state(config.recipe, load(folder, config))
        step = jax.jit(step)
        for batch in rows:
            state, metrics = step(state, batch_of(batch[None].astype(np.int32)))
            losses.append(float(metrics["loss"]))
    return np.array(losses)
