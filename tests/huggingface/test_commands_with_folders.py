"""Commands that begin with a released model: train, its restarts, convert, generate."""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import BASE, complete, run, steps_of
from opened import assert_equal, contents
from preference_pairs import write_pairs, write_tokenizer
from small_models import CONFIGS, write_file, write_folder

from maxramp.config.load import load
from maxramp.data.tokenizers import train_bpe
from maxramp.errors import ConfigError
from maxramp.files.place import lock
from maxramp.handover.export import export
from maxramp.handover.opening import open_model
from maxramp.huggingface.adapter import AdapterFolder

CONSTANT = ("enable_rampup_batch_size=False", "per_device_batch_size=2", "eval_interval=-1")
VOCAB = 300
BASE_OF = "base_model_name_or_path"


def train_arguments(tmp_path, name, *more):
    """Of `train`, a run of 4 steps with two checkpoints."""
    return [
        *(BASE, "model_name=hf", f"load_parameters_path={tmp_path / 'model'}", *CONSTANT),
        *("steps=4", "checkpoint_period=2", "max_target_length=32", "learning_rate=1e-2"),
        *("enable_tensorboard=False", f"base_output_directory={tmp_path}", f"run_name={name}"),
        *more,
    ]


def with_tokenizer(tmp_path, family="qwen3"):
    """A model whose tokenizer was trained on a few sentences; its end marks are a list."""
    changes = {"vocab_size": VOCAB, "bos_token_id": None}
    folder = write_folder(tmp_path / "model", family, **changes)
    texts = [f"the {a} {b} fox" for a in ("quick", "slow", "lazy") for b in ("brown", "red")]
    (folder / "tokenizer.json").write_bytes(train_bpe(iter(texts * 20), VOCAB))
    config = {"bos_token": None, "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    write_pairs(tmp_path / "texts.jsonl", [{"text": text} for text in texts * 100])
    return folder


DATA = ("dataset_type=grain", "eval_fraction=0")


@pytest.mark.slow
def test_a_run_continues_and_exports_without_the_folder_that_it_began_with(tmp_path):
    folder = with_tokenizer(tmp_path, "qwen3_5")
    data = (*DATA, f"grain_train_files={tmp_path / 'texts.jsonl'}")
    for name in "ab":
        complete(*train_arguments(tmp_path, name, *data))
    shutil.rmtree(tmp_path / "b" / "checkpoints" / "4")
    shutil.rmtree(folder)
    again = run(*train_arguments(tmp_path, "b", *data))
    assert again.returncode == 2 and "allow_changed=[tokenizer_path]" in again.stderr
    complete(*train_arguments(tmp_path, "b", *data, "allow_changed=[tokenizer_path]"))
    losses, expected = ([r["loss"] for r in steps_of(tmp_path / name)] for name in "ba")
    assert losses == expected and len(losses) == 4
    for name in "ab":
        line = (str(tmp_path / name), "--to", str(tmp_path / f"{name}-out"))
        assert "has no tensors mtp.*" in complete(*line, module="convert").stderr
    assert_equal(tmp_path / "a-out", tmp_path / "b-out")
    for file in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        kept = (tmp_path / "b" / "huggingface" / file).read_bytes()
        assert (tmp_path / "b-out" / file).read_bytes() == kept
    wrote = json.loads((tmp_path / "b-out" / "config.json").read_text())
    more = {"vocab_size": VOCAB, "bos_token_id": None, "rope_theta": 100.0}
    assert wrote == CONFIGS["qwen3_5"] | more
    prompt = ("--prompt", "the quick", "--max_new_tokens", "4", "--temperature", "0", "--json")
    models = (str(tmp_path / name) for name in ("b", "b-out"))
    answers = [run(model, *prompt, module="generate").stdout for model in models]
    assert answers[0] == answers[1] and json.loads(answers[0])["tokens"]


def test_another_tokenizer_is_exported_with_its_special_ids(tmp_path):
    """The one that the documents had, and not the one that the model came with."""
    folder = with_tokenizer(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_bytes(train_bpe(iter(["some other words"] * 9), 290))
    opened = open_model(str(folder), [f"tokenizer_path={other}"])
    export(opened, opened.load(), tmp_path / "out", "")
    kept = {n: (tmp_path / "out" / n).read_bytes() for n in ("tokenizer.json", "config.json")}
    assert kept["tokenizer.json"] == (other / "tokenizer.json").read_bytes()
    for name in ("config.json", "generation_config.json"):
        ids = json.loads((tmp_path / "out" / name).read_bytes())
        assert (ids["bos_token_id"], ids["eos_token_id"]) == (0, 1)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"


def hand_over(folder, to, *arguments, dtype="", **keys):
    """Exports the model of a folder."""
    opened = open_model(str(folder), arguments)
    opened.config = opened.config.replace(**keys)
    export(opened, opened.load(), to, dtype)


def other_tokenizer(folder, size):
    """A folder with another tokenizer."""
    folder.mkdir()
    words = " ".join(f"{a}{b}" for a in "abcdefgh" for b in "ijklmnop")
    (folder / "tokenizer.json").write_bytes(train_bpe(iter([words] * 9), size))
    return f"tokenizer_path={folder}"


def test_files_that_another_export_left_are_not_exported(tmp_path):
    """Weights that lay at the same path before, and other files."""
    folder = with_tokenizer(tmp_path)
    hand_over(folder, tmp_path / "out")
    left = tmp_path / "again"
    shutil.copytree(tmp_path / "out", left)
    (left / "config.json").unlink()
    zeros = {name: np.zeros_like(x) for name, x in contents(left).items()}
    write_file(left / "model.safetensors", zeros)
    source = json.loads((left / ".source.json").read_bytes())
    (left / ".source.json").write_text(json.dumps(source | {"weights": "0" * 16}, sort_keys=True))
    (left / "special_tokens_map.json").write_text("{}")
    hand_over(folder, tmp_path / "again")
    assert_equal(tmp_path / "again", tmp_path / "out")
    names = [{path.name for path in (tmp_path / name).iterdir()} for name in ("again", "out")]
    assert names[0] == names[1]


def test_an_export_that_cannot_be_made_is_refused(tmp_path):
    folder, out = with_tokenizer(tmp_path), tmp_path / "out"
    with pytest.raises(ConfigError, match="has 320 tokens, and the model has vocab_size=300"):
        hand_over(folder, out, other_tokenizer(tmp_path / "large", 320))
    with pytest.raises(ConfigError, match="vocab_size=340 .* give tokenizer_path=FILE"):
        hand_over(folder, out, f"tokenizer_path={tmp_path}/gone.json", vocab_size=340)
    (folder / "generation_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"generation_config.json: holds no JSON object"):
        hand_over(folder, out, other_tokenizer(tmp_path / "small", 290))
    (folder / "generation_config.json").unlink()
    weights = contents(folder)
    weights["model.norm.weight"][3] = 7e4
    write_file(folder / "model.safetensors", weights)
    with pytest.raises(ConfigError, match="model.norm.weight: has numbers that float16 cannot"):
        hand_over(folder, out, dtype="float16")
    assert not (out / "config.json").exists()
    with open(tmp_path / ".out.lock", "w") as file:
        assert not lock(file)
        with pytest.raises(ConfigError, match="another export is writing it"):
            hand_over(folder, out)
    hand_over(folder, out)  # what was begun there was an export
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").touch()
    (tmp_path / "link").symlink_to("nowhere")
    for occupied in (out, tmp_path / "notes", tmp_path / "link"):
        with pytest.raises(ConfigError, match="is there already"):
            hand_over(folder, occupied)


def test_a_folder_whose_tokenizer_is_damaged_does_not_read_bytes(tmp_path):
    folder = with_tokenizer(tmp_path)
    for text, says in (("{", "is not JSON"), ('{"post_processor": [1]}', "post_processor=")):
        (folder / "tokenizer.json").write_text(text)
        with pytest.raises(ConfigError, match=f"tokenizer.json: {says}"):
            open_model(str(folder), []).tokenizer()
    config = {"added_tokens_decoder": {"300": {"content": "<|new|>"}}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_bytes(train_bpe(iter(["fox"] * 9), 270))
    with pytest.raises(ConfigError, match=r"<\|new\|> is 300, and .* has no such token"):
        open_model(str(folder), []).tokenizer()


def test_keys_that_contradict_a_folder_without_model_name(tmp_path):
    opened = open_model(str(with_tokenizer(tmp_path)), [])
    model = opened.load()
    values = opened.config.values
    assert opened.weights.prepare(model, values)
    with pytest.raises(ConfigError, match="rope_max_timescale=50.0: .*config.json makes it 100.0"):
        opened.weights.prepare(model, values | {"rope_max_timescale": 50.0})


def refused(tmp_path, *more):
    with pytest.raises(ConfigError) as error:
        load(train_arguments(tmp_path, "r", *more), "train")
    return str(error.value)


def test_a_folder_gives_sizes_and_refuses_others(tmp_path):
    with_tokenizer(tmp_path)
    data = (*DATA, f"grain_train_files={tmp_path / 'texts.jsonl'}")
    config = load(train_arguments(tmp_path, "r", *data), "train")
    assert config.model.base_emb_dim == 32 and config.model.use_qk_norm
    assert (config.data.add_bos, config.data.add_eos) == (False, True)
    assert config.data.tokenizer_path == str(tmp_path / "model" / "tokenizer.json")
    (tmp_path / "larger.yml").write_text("vocab_size: 384\n")
    _, *keys = train_arguments(tmp_path, "r", *data)
    larger = load([str(tmp_path / "larger.yml"), *keys], "train")
    assert larger.model.vocab_size == 384
    (tmp_path / "model/tokenizer.json").unlink()
    assert "has neither tokenizer.json" in refused(tmp_path, *data)
    ids = load(train_arguments(tmp_path, "r", *data, "tokenize_train_data=False"), "train")
    assert ids.model.base_emb_dim == 32 and not ids.data.tokenizer_path
    with_tokenizer(tmp_path)
    assert "base_emb_dim=128: " in refused(tmp_path, *data, "base_emb_dim=128")
    assert "makes it 300" in refused(tmp_path, *data, "vocab_size=256")
    assert "dataset_type=text trains on bytes" in refused(tmp_path)
    (tmp_path / "adapter").mkdir()
    says = json.dumps({"peft_type": "LORA", "r": 2, BASE_OF: f"{tmp_path / 'model'}"})
    (tmp_path / "adapter/adapter_config.json").write_text(says)
    write_file(tmp_path / "adapter/adapter_model.safetensors", {})
    adapter = (*data, f"load_parameters_path={tmp_path / 'adapter'}", "lora_rank=16")
    assert "adapter/adapter_config.json makes it 2; give that" in refused(tmp_path, *adapter)
    says = says.replace("{", '{"lora_alpha": null, ', 1)
    (tmp_path / "adapter/adapter_config.json").write_text(says)
    assert "lora_alpha=None must be a number" in refused(tmp_path, *adapter)
    nowhere = f"load_parameters_path={tmp_path / 'nowhere'}"
    assert "no config.json there" in refused(tmp_path, *data, nowhere)
    checkpoint = tmp_path / "nowhere/checkpoints/4"
    checkpoint.mkdir(parents=True)
    (checkpoint / "checkpoint.json").touch()
    assert "nowhere --to FOLDER" in refused(tmp_path, *data, nowhere)
    for name in ("8/config.json", "12/adapter_config.json", "16/.source.json"):  # the last is torn
        file = tmp_path / "nowhere/exported" / name
        file.parent.mkdir(parents=True)
        file.touch()
    assert refused(tmp_path, *data, nowhere).endswith("nowhere/exported/12")


@pytest.mark.slow
@pytest.mark.parametrize(
    "devices, mesh",
    [(4, ("ici_pipeline_parallelism=2",)), pytest.param(1, (), marks=pytest.mark.long)],
)
def test_a_finished_run_is_exported_once(tmp_path, devices, mesh):
    """The folder that convert makes, for each end of the run; from any mesh."""
    with_tokenizer(tmp_path)
    data = (*DATA, f"grain_train_files={tmp_path / 'texts.jsonl'}", "export_huggingface=true")
    command = train_arguments(tmp_path, "r", *data, *mesh)
    done = complete(*command, devices=devices)
    exported = tmp_path / "r" / "exported" / "4"
    assert f"wrote {exported}" in done.stdout
    complete(str(tmp_path / "r"), "--to", str(tmp_path / "out"), module="convert")
    files = sorted(file.name for file in exported.iterdir())
    assert files == sorted(file.name for file in (tmp_path / "out").iterdir())
    for file in files:
        assert (exported / file).read_bytes() == (tmp_path / "out" / file).read_bytes()
    before = exported.stat().st_ino
    again = run(*command, devices=devices)  # a finished run: nothing to do
    assert again.returncode == 0 and "wrote" not in again.stdout
    assert exported.stat().st_ino == before
    shutil.rmtree(exported)  # as if the job had been killed before
    again = run(*command, devices=devices)
    assert again.returncode == 0 and exported.is_dir()
    longer = run(*[key.replace("steps=4", "steps=6") for key in command], devices=devices)
    assert longer.returncode == 0
    before = contents(tmp_path / "r" / "exported" / "6")
    shutil.rmtree(tmp_path / "r" / "checkpoints" / "6")
    other = [*command, "steps=6", "learning_rate=1e-3"]
    trained = run(*other, devices=devices)  # another state after six steps
    assert trained.returncode == 0 and "6 is of another state than" in trained.stderr
    stale = contents(tmp_path / "r/exported/6.stale")
    jax.tree.map(np.testing.assert_array_equal, stale, before)
    complete(str(tmp_path / "r"), "--to", str(tmp_path / "now"), module="convert")
    assert_equal(tmp_path / "r/exported/6", tmp_path / "now")
    now = contents(tmp_path / "now")
    assert not all(np.array_equal(stale[name], x) for name, x in now.items())


@pytest.mark.slow
def test_a_run_keeps_the_side_files_of_its_first_weights(tmp_path):
    """Not of those of a start that saved nothing; where it goes on from another's state, of its."""
    other = with_tokenizer(tmp_path).rename(tmp_path / "other")
    folder = with_tokenizer(tmp_path)
    (folder / "chat_template.jinja").unlink()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    data = (*DATA, f"grain_train_files={tmp_path / 'texts.jsonl'}", "steps=1")
    first = (f"load_parameters_path={other}", "enable_checkpointing=False")
    for more in (first, ()):
        complete(*train_arguments(tmp_path, "r", *data, *more))
        named = other if more else folder
        kept = {path.name: path.read_bytes() for path in (tmp_path / "r/huggingface").iterdir()}
        assert ("chat_template.jinja" in kept) == bool(more)
        assert all((named / name).read_bytes() == data for name, data in kept.items())
    full = (f"load_full_state_path={tmp_path / 'r'}", "steps=2", "export_huggingface=true")
    config = tmp_path / "r" / "config.yml"
    complete(str(config), f"base_output_directory={tmp_path}", "run_name=next", *full)
    exported = json.loads((tmp_path / "next/exported/2/generation_config.json").read_bytes())
    assert exported == {"eos_token_id": 7}


@pytest.mark.slow
def test_an_answer_to_a_chat_is_that_of_transformers(tmp_path):
    """The template's text, and greedy tokens behind it, up to the mark that ends the answer; in a
    conversation the folder's draft proposes them."""
    torch, transformers = map(pytest.importorskip, ("torch", "transformers"))
    size = write_tokenizer(tmp_path)
    changes = {"vocab_size": size, "bos_token_id": None, "eos_token_id": size - 2}
    folder = write_folder(tmp_path, "qwen3_5", drafts=True, **changes)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Who?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        whole = model.generate(**ids, max_new_tokens=12, do_sample=False)[0]
    line = ("--chat", "--prompt", "Who?", "--max_new_tokens", "12", "--temperature", "0", "--json")
    done = complete(str(folder), *line, module="generate", optimized=True)
    answer = json.loads(done.stdout)
    assert answer["prompt"] == text
    assert answer["tokens"] == whole[ids["input_ids"].shape[1] :].tolist()
    command = [sys.executable, "-m", "maxramp.generate", str(folder), *line[:1], *line[3:]]
    # with room for the second message
    command += ["max_target_length=128", "--num_speculative_tokens", "2"]
    talk = subprocess.run(command, input="Who?\n\nWho?\n", capture_output=True, text=True)
    assert talk.returncode == 0, talk.stderr
    first, second = map(json.loads, talk.stdout.splitlines())
    assert first["tokens"] == answer["tokens"] and "tokens a pass" in talk.stderr
    assert second["prompt"].startswith(f"{text}{answer['answer']}")
    assert second["prompt"].count("Who?") == 2 + answer["answer"].count("Who?")
    marked = run(str(folder), "--chat", "--prompt", "a<|im_end|>b", module="generate")
    assert marked.returncode == 2 and "a message holds <|im_end|>" in marked.stderr


def test_adapters_need_a_model(tmp_path):
    """They may adapt themselves, by their own word; or lack it."""
    (tmp_path / "adapter").mkdir()
    config = tmp_path / "adapter" / "adapter_config.json"
    for base in (tmp_path / "adapter", tmp_path / "nowhere"):
        config.write_text(json.dumps({"peft_type": "LORA", "r": 2} | {BASE_OF: str(base)}))
        says = f"adapter_config.json: {BASE_OF}={base} is not a model"
        with pytest.raises(ConfigError, match=says):
            open_model(str(tmp_path / "adapter"), [])
    config.rename(tmp_path / "adapter" / "adapter_model.safetensors")
    with pytest.raises(ConfigError, match="has adapter_model.safetensors and no adapter_config"):
        open_model(str(tmp_path / "adapter"), [])


def test_a_regular_expression_that_adapts_no_layer_does_not_adapt_all(tmp_path):
    says = {"peft_type": "LORA", "r": 2, BASE_OF: "base", "target_modules": ".*mtp.*q_proj"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(says))
    tensors = {
        f"base_model.model.mtp.0.q_proj.lora_{x}.weight": np.zeros((2, 2), np.float32) for x in "AB"
    }
    write_file(tmp_path / "adapter_model.safetensors", tensors)
    with pytest.raises(ConfigError, match=r"mtp.\*q_proj is not supported: .* of no layer of a"):
        assert not AdapterFolder(str(tmp_path)).layers


@pytest.mark.slow
def test_the_chat_template_of_a_run_is_exported(tmp_path):
    """Where its tokenizer has none: with the whole model, with adapters, and given to generate."""
    size = write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    template = config.pop("chat_template")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    model = write_folder(tmp_path / "model", "qwen3", vocab_size=-(-size // 8) * 8)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).rename(model / name)
    file = tmp_path / "chats.jinja"
    file.write_text(template)
    chat = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "yes"}]
    write_pairs(tmp_path / "chats.jsonl", [{"messages": chat}] * 40)
    keys = ("use_sft=True", "dataset_type=grain", f"grain_train_files={tmp_path / 'chats.jsonl'}")
    keys += (f"chat_template={file}", "export_huggingface=True", "packing=False")
    for name, more in (("whole", ()), ("adapters", ("lora_rank=2",))):
        complete(*train_arguments(tmp_path, name, *keys, *more))
        exported = tmp_path / name / "exported" / "4"
        assert (exported / "chat_template.jinja").read_text() == template
        chatting = open_model(str(exported), []).tokenizer()
        assert chatting.chat(chat[:1]).endswith("a?<|im_end|><|im_start|>assistant\n")
    # convert needs the file, unless the tokenizer has a template.
    own = tmp_path / "own"
    file.rename(tmp_path / "moved.jinja")
    convert = (str(tmp_path / "whole"), "--to")
    done = run(*convert, str(tmp_path / "lost"), module="convert")
    assert done.returncode == 2 and f"chat_template={file}" in done.stderr
    assert "put it back" in done.stderr and not (tmp_path / "lost").exists()
    shutil.copytree(model, own)
    (own / "chat_template.jinja").write_text("{{ messages }}")
    done = run(*convert, str(tmp_path / "to"), f"tokenizer_path={own}", module="convert")
    assert done.returncode == 0 and "was for training" in done.stderr
    assert (tmp_path / "to" / "chat_template.jinja").read_text() == "{{ messages }}"
    (tmp_path / "moved.jinja").rename(file)
    ask = (str(model), "--chat", "--prompt", "a?", "--max_new_tokens", "2")
    lacks = run(*ask, module="generate")
    assert lacks.returncode == 2 and "give chat_template=FILE" in lacks.stderr
    assert run(*ask, f"chat_template={file}", module="generate").returncode == 0
