"""Runs that train adapters: restarts, what they hand over, and what they refuse."""

import shutil

import numpy as np
import pytest
from conftest import BASE, complete, run, steps_of
from small_models import CONFIGS, tensors, write_file, write_folder

pytestmark = pytest.mark.slow
LORA = ("lora_rank=4", "lora_alpha=8", "lora_dropout=0.1")


def train_arguments(folder, name, base, *keys):
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
    keys = train_arguments(tmp_path, "a", base, *LORA)
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
    done = complete(*train_arguments(tmp_path, "b", adapter, "steps=2"))
    assert "8,960 of adapters train" in done.stdout
    line = refused(*train_arguments(tmp_path, "c", adapter, "lora_alpha=3"))
    assert "lora_alpha=3" in line and "adapter" in line
    write_folder(tmp_path / "base", "smollm2")  # of other widths
    assert "adapts another model" in refused(*train_arguments(tmp_path, "c", adapter))
    write_folder(tmp_path / "base", "llama2")
    whole = ("--merge", "--to", str(tmp_path / "whole"))
    complete(str(tmp_path / "a"), *whole, module="convert")
    assert (tmp_path / "whole/config.json").exists()
    assert not (tmp_path / "whole/adapter_config.json").exists()


def test_adapters_keep_the_checkpoint_that_they_began_with(tmp_path):
    base = write_folder(tmp_path / "base", "llama2")
    whole = train_arguments(tmp_path, "r", base, "export_huggingface=False")
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
