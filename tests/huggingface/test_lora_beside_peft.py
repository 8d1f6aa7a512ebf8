"""Adapters beside PEFT: the same logits with the same adapter both ways, and the same gradients."""

import json
import pathlib

import jax
import numpy as np
import peers
import pytest
from conftest import batch_of, make_mesh
from later import Later
from opened import logits, named_arrays
from peers import assert_near, theirs
from small_models import CONFIGS, write_folder

from maxramp.errors import ConfigError
from maxramp.handover.export import export
from maxramp.handover.opening import open_model
from maxramp.huggingface.adapter import TENSORS
from maxramp.huggingface.safetensors import find_tensors
from maxramp.model.adapters import is_adapter, merge_adapters, stored_part, without_adapters
from maxramp.model.parts.weights import join_parts, part_of
from maxramp.training.loss import next_token_prediction

torch = Later("torch")
peft = Later("peft")
transformers = Later("transformers")
pytestmark = pytest.mark.slow

TOKENS_BT = np.random.default_rng(0).integers(0, 40, (8, 24), dtype=np.int32)
MESH = ("ici_fsdp_parallelism=2", "ici_data_parallelism=4")
TWO_LAYERS = {"layers_to_transform": [1, 3]}
CASES = [
    ("smollm2", {}),
    ("qwen2.5", {}),
    ("qwen3", {"use_rslora": True, "r": 8}),
    ("llama2", TWO_LAYERS | {"target_modules": ["q_proj", "v_proj"], "lora_alpha": 3}),
    ("qwen3_5", {}),
    ("qwen3_next", {"target_modules": ["in_proj_qkvz", "in_proj_ba", "out_proj", "k_proj"]}),
    (
        "deepseek_v3",
        {"target_modules": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]},
    ),
    ("glm4_moe", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
    ("gpt_oss", {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}),
    ("qwen2.5", {"target_modules": r".*\.layers\.[13]\..*(k_proj|down_proj)"}),
]


def adapted_by_peft(base: pathlib.Path, to: pathlib.Path, **config):
    """PEFT's model with adapters, both of whose matrices are random, and a folder of them."""
    torch.manual_seed(0)
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", **config}
    config = peft.LoraConfig(task_type="CAUSAL_LM", **config)
    model = peft.get_peft_model(peers.opened(base), config)
    for name, x in model.named_parameters():
        if "lora_" in name:
            x.data = torch.randn_like(x) * 0.2
    model.save_pretrained(to)
    return model.eval()


def opened_here(path: pathlib.Path):
    """The model of a folder, on eight devices, and its weights."""
    opened = open_model(str(path), [*MESH, "hardware=cpu"])
    return opened, opened.load()


@pytest.mark.parametrize(("name", "config"), CASES)
def test_an_adapter_of_peft_gives_its_logits_both_ways(tmp_path, name, config):
    """Its logits as it is and merged into its base; written again, PEFT opens it."""
    base = write_folder(tmp_path / "base", name)
    expected = theirs(adapted_by_peft(base, tmp_path / "adapter", **config), TOKENS_BT)
    plain = theirs(peers.opened(base), TOKENS_BT)
    assert np.abs(expected - plain).max() > 0.01 * np.abs(plain).max()
    opened, model = opened_here(tmp_path / "adapter")
    assert_near(logits(model, opened.config, TOKENS_BT), expected)
    assert_near(logits(without_adapters(model), opened.config, TOKENS_BT), plain)
    with jax.set_mesh(make_mesh(opened.config)):
        whole = jax.jit(lambda model: merge_adapters(model, "float32"))(model)
    assert_near(logits(whole, opened.config, TOKENS_BT), expected)
    export(opened, model, tmp_path / "again")
    again = peft.PeftModel.from_pretrained(peers.opened(base), tmp_path / "again")
    assert_near(theirs(again, TOKENS_BT), expected)
    written = json.loads((tmp_path / "again/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(base)
    chosen = [1, 3] if isinstance(config.get("target_modules"), str) else None
    assert written["layers_to_transform"] == config.get("layers_to_transform", chosen)


def test_layers_with_different_adapters_are_refused(tmp_path):
    base = write_folder(tmp_path / "base", "qwen2.5")
    pattern = r".*(layers\.0\..*q_proj|layers\.1\..*v_proj)"
    adapted_by_peft(base, tmp_path / "adapter", target_modules=pattern)
    with pytest.raises(ConfigError, match=r"0: self_attn.q_proj; 1: self_attn.v_proj"):
        open_model(str(tmp_path / "adapter"), [])


def test_a_merge_rounds_once(tmp_path):
    """Of a base in bfloat16, the sums in float32."""
    base = write_folder(tmp_path / "base", "qwen3", dtype="bfloat16")
    expected = adapted_by_peft(base, tmp_path / "adapter").merge_and_unload().state_dict()
    opened = open_model(str(tmp_path / "adapter"), [])
    opened.config = opened.config.replace(weight_dtype="bfloat16")
    export(opened, opened.load(), tmp_path / "whole", "float32", merge=True)
    for name, x in find_tensors(str(tmp_path / "whole")).items():
        np.testing.assert_allclose(x.read(0, x.rows), expected[name], atol=1e-6, err_msg=name)


def test_gradients_are_those_of_peft(tmp_path):
    """Of the loss, per tensor within 1e-4 of its largest entry."""
    base = write_folder(tmp_path / "base", "qwen2.5")
    peer = adapted_by_peft(base, tmp_path / "adapter", use_rslora=True)
    rows = torch.tensor(TOKENS_BT, dtype=torch.long)
    peer(rows, labels=rows).loss.backward()
    opened, model = opened_here(tmp_path / "adapter")
    config = opened.config
    objective, batch = next_token_prediction(config.loss, config.model), batch_of(TOKENS_BT)
    trained = stored_part(model)
    frozen = part_of(model, lambda weight: not is_adapter(weight))

    def loss(trained):
        total, aux = objective(join_parts(frozen, trained), batch)
        return total / aux.shown["tokens"]

    with jax.set_mesh(make_mesh(config)):
        gradient = jax.jit(jax.grad(loss))(trained)
    expected = {name.replace(".default", ""): x for name, x in peer.named_parameters()}
    arrays = named_arrays(gradient, config.model.decoder_block)
    assert len(arrays) == sum("lora_" in name for name in expected)
    for tensor, own in arrays.items():
        grad = expected[tensor].grad.numpy()
        np.testing.assert_allclose(own, grad, atol=1e-4 * np.abs(grad).max(), rtol=0)


@pytest.mark.parametrize("modules", [["q_proj", "v_proj"], "all-linear"])
def test_an_adapter_of_a_larger_model_is_read_and_written(tmp_path, modules):
    text = {key: x for key, x in CONFIGS["gemma3"].items() if key != "torch_dtype"}
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    ids = {"boi_token_index": 37, "eoi_token_index": 38, "image_token_index": 39}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, **ids
    )
    torch.manual_seed(0)
    base = transformers.Gemma3ForConditionalGeneration(config)
    for x in base.parameters():
        x.data = torch.randn_like(x) * 0.2
    base.save_pretrained(tmp_path / "base")
    config = {"target_modules": modules, "layers_to_transform": [0, 3]}
    if modules == "all-linear":
        del config["layers_to_transform"]
    peer = adapted_by_peft(tmp_path / "base", tmp_path / "adapter", **config)
    rows = TOKENS_BT % 37  # no token of a picture

    opened, lines = open_model(str(tmp_path / "adapter"), [*MESH, "hardware=cpu"]), []
    model = opened.load(lines.append)
    assert_near(logits(model, opened.config, rows), theirs(peer, rows))
    (line,) = (line for line in lines if line.startswith(f"{tmp_path}/adapter: "))
    assert "of no text model: base_model.model.model.vision_tower." in line
    export(opened, model, tmp_path / "again")
    again = peft.PeftModel.from_pretrained(peers.opened(tmp_path / "base"), tmp_path / "again")
    assert_near(theirs(again.eval(), rows), theirs(peer, rows))
    assert not [name for name in find_tensors(str(tmp_path / "again"), TENSORS) if "vision" in name]
