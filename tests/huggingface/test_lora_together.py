"""Adapters with what else a run does: packed chats, phases, evaluation, pairs, two processes."""

import json
import shutil

import numpy as np
import pytest
from conftest import BASE, ROOT, command, complete, run, steps_of
from jobs import finish, start
from preference_pairs import pairs, write_pairs, write_tokenizer
from small_models import CONFIGS, tensors, write_file, write_folder

from maxramp.huggingface.adapter import TENSORS
from maxramp.huggingface.safetensors import find_tensors
from maxramp.run.metrics import read_records

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")
pytestmark = pytest.mark.slow

# What a phase changes besides the batch: the rate, and the mesh.
ANOTHER = "learning_rate: 0.02, ici_fsdp_parallelism: 1, ici_data_parallelism: 2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A released model with a chat template, pairs and chats."""
    folder = tmp_path_factory.mktemp("together")
    (folder / "base").mkdir()
    size = write_tokenizer(folder / "base")
    write_folder(folder / "base", "llama2", vocab_size=size, eos_token_id=size - 2)
    records = pairs(24)
    chats = [{"messages": record["chosen"]} for record in records]
    for name, file_records in (("pairs", records), ("chats", chats[4:]), ("held", chats[:4])):
        write_pairs(folder / f"{name}.jsonl", file_records)
    return folder


def train_arguments(folder, kind, name, *keys):
    return (
        *(str(ROOT / f"configs/post_train/{kind}.yml"), f"load_parameters_path={folder}/base"),
        *(f"base_output_directory={folder}", f"run_name={name}", "enable_tensorboard=False"),
        *("dtype=float32", "weight_dtype=float32", "lora_rank=2", "learning_rate=0.01"),
        *("eval_fraction=0", "eval_per_device_batch_size=1", "remat_policy=none"),
        *("per_device_batch_size=-1", "phases_unit=samples", "ici_fsdp_parallelism=2", *keys),
    )


def on_two_processes(folder, *keys):
    """The lines that the first prints."""
    done = finish(start(command(*keys), 2, 1, [folder] * 2))
    assert [status for *_, status in done] == [0, 0], done
    return done[0][0]


def assert_same(folder, one, other):
    """The metrics of two runs and the adapters that they hand over."""
    measured = ["restarted", "nodes", "time", "goodput", "second", "tflops", "memory", "bytes"]
    records = (read_records(folder / name / "metrics.jsonl") for name in (one, other))
    for a, b in zip(*records, strict=True):
        assert a.keys() - {"restarted", "save_seconds"} == b.keys() - {"save_seconds"}
        for key, x in a.items():
            if not any(word in key for word in measured):
                same = b[key] if isinstance(x, str) else pytest.approx(b[key], rel=1e-4, abs=1e-6)
                assert x == same, key
    (own,), (others,) = (list((folder / name / "exported").iterdir()) for name in (one, other))
    actual, wanted = (find_tensors(str(path), TENSORS) for path in (own, others))
    assert actual.keys() == wanted.keys()
    for name, tensor in actual.items():
        x, y = (np.asarray(t.read(0, t.rows)) for t in (tensor, wanted[name]))
        np.testing.assert_allclose(x, y, atol=1e-5, err_msg=name)
    return own, actual


def test_adapters_of_chats_are_the_same_on_two_processes(folder):
    """With layers chosen, Muon, phases and a held-out set; also after a stop at a phase."""
    keys = ("max_target_length=64", "opt_type=muon", "trainable_layers=[1,3]", "num_epoch=2")
    keys += (f"grain_train_files={folder}/chats.jsonl", f"eval_sets={{held: {folder}/held.jsonl}}")
    keys += (f"phases={{0: {{global_batch_size: 2}}, 4: {{global_batch_size: 4, {ANOTHER}}}}}",)
    keys += ("eval_interval=2", "lora_alpha=8")
    one = train_arguments(folder, "lora", "one", *keys)
    begun = run(*one, "stop_at_stage_end=True", devices=2)
    assert begun.returncode == 75, begun.stderr
    assert "20 chats to train on and 4 held out in held, in " in begun.stdout, begun.stdout
    complete(*one, devices=2)
    refused = run(*one, "trainable_layers=[1,2]", devices=2)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "trainable_layers=[1, 3] (now [1, 2])" in refused.stderr
    printed = on_two_processes(folder, *train_arguments(folder, "lora", "two", *keys))
    assert "of adapters train" in printed
    own, tensors = assert_same(folder, "one", "two")
    assert {name.split(".")[4] for name in tensors} == {"1", "3"}
    records = read_records(folder / "one/metrics.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    held = [record["eval_loss_held"] for record in records if "eval_loss_held" in record]
    assert losses[-1] < losses[0] and held[-1] < held[0]
    assert [r["global_batch_size"] for r in records if "loss" in r][:3] == [2, 2, 4]

    written = []
    asked = ("--chat", "--prompt", "5?", "--max_new_tokens", "6", "--temperature", "0", "--json")
    for path in (folder / "one", own):
        answer = complete(str(path), *asked, module="generate")
        written.append(json.loads(answer.stdout.splitlines()[-1])["tokens"])
    assert written[0] == written[1]


def test_adapters_of_pairs_are_the_same_on_two_processes(folder):
    """The reference is the base, also of adapters that are trained already; with phases."""
    keys = ("max_target_length=95", f"grain_train_files={folder}/pairs.jsonl", "eval_interval=-1")
    keys += (f"phases={{0: {{global_batch_size: 4}}, 8: {{global_batch_size: 8, {ANOTHER}}}}}",)
    complete(*train_arguments(folder, "dpo", "pairs", *keys), devices=2)
    printed = on_two_processes(folder, *train_arguments(folder, "dpo", "pairs_of_two", *keys))
    assert "log-probabilities of 24 pairs" in printed
    own, _ = assert_same(folder, "pairs", "pairs_of_two")
    first, *_, last = read_records(folder / "pairs/metrics.jsonl")
    assert first["loss"] == pytest.approx(np.log(2), rel=1e-6)
    assert first["rewards/margins"] == 0 < last["rewards/margins"]

    again = (*train_arguments(folder, "dpo", "again", *keys), f"load_parameters_path={own}")
    complete(*again, "learning_rate=0", "phases.8.learning_rate=0", devices=2)
    base_reference = reference(folder / "pairs")
    for name in ("pairs_of_two", "again"):
        np.testing.assert_allclose(reference(folder / name), base_reference, rtol=1e-5)
    first, *_ = read_records(folder / "again/metrics.jsonl")
    assert first["rewards/margins"] > 0 and first["loss"] < np.log(2)


def reference(run):
    """The log-probabilities that a run keeps, [N, 2]."""
    _, *lines = (run / "reference.jsonl").read_text().splitlines()
    return [(row["chosen"], row["rejected"]) for row in map(json.loads, lines)]


def test_adapters_of_changed_positions_are_exported_merged(folder):
    """What a run hands over is the whole model then, since PEFT opens the base as it was."""
    keys = ("max_target_length=95", f"grain_train_files={folder}/chats.jsonl", "num_epoch=1")
    keys += ("phases={0: {global_batch_size: 4}, 4: {rope_max_timescale: 50.0}}",)
    complete(*train_arguments(folder, "lora", "turned", *keys, "eval_interval=-1"), devices=2)
    (own,) = (folder / "turned/exported").iterdir()
    assert json.loads((own / "config.json").read_text())["rope_theta"] == 50.0


LORA = ("lora_rank=4", "lora_alpha=8", "lora_dropout=0.1")


def arguments_of(folder, name, base, *keys):
    return (
        *(BASE, "model_name=hf", f"load_parameters_path={base}", "dataset_type=synthetic"),
        *("enable_rampup_batch_size=False", "per_device_batch_size=4", "eval_interval=-1"),
        *("max_target_length=16", "steps=4", "checkpoint_period=2", "enable_tensorboard=False"),
        *(f"base_output_directory={folder}", f"run_name={name}", "export_huggingface=True"),
        *keys,
    )


def refused(*arguments, **options):
    done = run(*arguments, **options)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_adapters_restart_on_their_base_alone(tmp_path):
    """With the same losses; what it hands over begins another run, or makes a whole model."""
    base = write_folder(tmp_path / "base", "llama2")
    keys = arguments_of(tmp_path, "a", base, *LORA)
    done = complete(*keys)
    assert "8,960 of adapters train" in done.stdout
    assert (tmp_path / "a/exported/4/adapter_model.safetensors").exists()
    before = [record["loss"] for record in steps_of(tmp_path / "a")]

    for name in ("checkpoints/4", "exported"):
        shutil.rmtree(tmp_path / "a" / name)
    changed = dict(tensors(CONFIGS["llama2"]))
    changed["model.norm.weight"] = changed["model.norm.weight"] * np.float32(1.001)
    write_file(base / "model.safetensors", changed)
    assert "not the weights that" in refused(*keys)
    write_file(base / "model.safetensors", tensors(CONFIGS["llama2"]))
    assert "lora_alpha=8.0 (now 4.0)" in refused(*keys, "lora_alpha=4")
    assert "checkpoints/2 were trained with lora_rank=4;" in refused(*keys, "lora_rank=2")
    complete(*keys)
    assert [record["loss"] for record in steps_of(tmp_path / "a")] == before

    adapter = tmp_path / "a/exported/4"
    done = complete(*arguments_of(tmp_path, "b", adapter, "steps=2"))
    assert "8,960 of adapters train" in done.stdout
    line = refused(*arguments_of(tmp_path, "c", adapter, "lora_alpha=3"))
    assert "lora_alpha=3" in line and "adapter" in line
    write_folder(tmp_path / "base", "smollm2")  # of other widths
    assert "adapts another model" in refused(*arguments_of(tmp_path, "c", adapter))
    write_folder(tmp_path / "base", "llama2")
    whole = ("--merge", "--to", str(tmp_path / "whole"))
    complete(str(tmp_path / "a"), *whole, module="convert")
    assert (tmp_path / "whole/config.json").exists()
    assert not (tmp_path / "whole/adapter_config.json").exists()


def test_adapters_keep_the_checkpoint_that_they_began_with(tmp_path):
    base = write_folder(tmp_path / "base", "llama2")
    whole = arguments_of(tmp_path, "r", base, "export_huggingface=False")
    complete(*whole)
    config, lora = str(tmp_path / "r/config.yml"), (*LORA, "export_huggingface=True")
    lora = (config, "model_name=default", f"load_parameters_path={tmp_path / 'r'}", *lora)
    lora = (*lora, f"base_output_directory={tmp_path}", "run_name=l")
    for steps in (4, 6):
        tuned = complete(*lora, f"steps={steps}")
        complete(*whole, f"steps={steps + 2}", "max_num_checkpoints_to_keep=9")
    assert "load_parameters_path" not in tuned.stdout
    exported = tmp_path / "l/exported/6"  # whole: no other tool opens what they adapt
    assert (exported / "config.json").exists() and not (exported / "adapter_config.json").exists()
    (tmp_path / "r").rename(tmp_path / "moved")
    for step, status in ((4, 0), (6, 2)):
        moved = f"load_parameters_path={tmp_path / 'moved/checkpoints' / str(step)}"
        converted = (str(tmp_path / "l"), moved, "--merge", "--to", str(tmp_path / f"of-{step}"))
        done = run(*converted, module="convert")
        assert done.returncode == status, done.stderr
    assert "not the weights that" in done.stderr
    contents = {p.name: p.read_bytes() for p in exported.iterdir()}
    assert contents == {p.name: p.read_bytes() for p in (tmp_path / "of-4").iterdir()}
    shutil.rmtree(tmp_path / "l/exported")
    again = (str(tmp_path / "moved/config.yml"), *lora[1:], "steps=6")
    complete(*again, f"load_parameters_path={tmp_path / 'moved'}")
    assert {p.name: p.read_bytes() for p in exported.iterdir()} == contents
