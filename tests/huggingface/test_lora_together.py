"""Adapters with what else a run does: packed chats, phases, evaluation, pairs, two processes."""

import json

import numpy as np
import pytest
from conftest import ROOT, command, complete, run
from jobs import finish, start
from preference_pairs import pairs, write_pairs, write_tokenizer
from small_models import write_folder

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
