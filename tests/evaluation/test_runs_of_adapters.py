"""Tasks of a run whose model has adapters, whose samples are pairs, and whose mesh changes."""

import json

import pytest
from conftest import BASE, complete
from made_tasks import write_tasks
from preference_pairs import keys_of, pairs, write_pairs, write_tokenizer
from small_models import write_folder

from maxramp.run.metrics import read_records

pytestmark = pytest.mark.long


def test_a_run_with_adapters_is_evaluated_as_by_the_command(tmp_path, cache_dir, offline):
    pytest.importorskip("lm_eval")
    tasks, model = write_tasks(tmp_path / "tasks"), tmp_path / "model"
    model.mkdir()
    size = write_tokenizer(model)
    write_folder(model, "llama3.1", vocab_size=288, bos_token_id=0, eos_token_id=size - 2)
    file = write_pairs(tmp_path / "pairs.jsonl", pairs(16))
    line = (BASE, *keys_of(model, file), "lora_rank=2", "learning_rate=0.1", "steps=4")
    line += ("per_device_batch_size=2", "phases.8.ici_tensor_parallelism=2")
    line += ("phases.8.ici_fsdp_parallelism=1", "phases_unit=samples", "model_name=hf")
    line += (f"evaluate_tasks_include_path={tasks}", "evaluate_tasks=[made_choices,made_writing]")
    line += ("evaluate_tasks_interval=4", f"jax_cache_dir={cache_dir}", "enable_tensorboard=False")
    line += (f"base_output_directory={tmp_path}", "run_name=all")
    complete(*line, devices=2, timeout=600)
    records = [r for r in read_records(tmp_path / "all/metrics.jsonl") if "eval_seconds" in r]
    assert [r["consumed_samples"] for r in records] == [4, 8, 12, 16]

    output, names = tmp_path / "found.json", "made_choices,made_writing"
    asked = ("--tasks", names, "--include_path", str(tasks), "--output_path", str(output))
    complete(str(tmp_path / "all"), *asked, module="evaluate", timeout=600)
    results = json.loads(output.read_text())["results"]
    for name, metric in (
        ("made_choices", "acc"),
        ("made_choices", "acc_norm"),
        ("made_writing", "exact_match"),
    ):
        assert records[-1][f"task_{name}_{metric}"] == results[name][f"{metric},none"]
