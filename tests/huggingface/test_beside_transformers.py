"""Models of folders beside transformers itself: the extra `compare` brings it."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import batch_of, make_mesh
from later import Later
from opened import config_of, load, logits, named_arrays
from peers import assert_near, opened, theirs
from small_models import (
    CONFIGS,
    EXPERTS,
    TOKENS_BT,
    fuse_experts,
    tensors,
    write_file,
    write_folder,
)
from test_weights import assert_same_tensors, write

from maxramp.huggingface import config_json, writing
from maxramp.huggingface.safetensors import find_tensors
from maxramp.model.decoder import Decoder
from maxramp.model.parts.positions import Positions
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


def test_a_draft_is_that_of_transformers(tmp_path):
    """GLM's, by its own layer for drafts."""
    write_folder(tmp_path, "glm4_moe", drafts=True)
    main = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    main._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4\..*"]
    drafts = Later("transformers.modeling_layers").MtpModel.from_pretrained(main)
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
