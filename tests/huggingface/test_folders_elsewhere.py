"""Folders in object storages, and jobs of several processes that read and write one."""

import json
import subprocess
import sys
import time

import pytest
from conftest import BASE, command, complete, environment, run
from jobs import finish, start
from opened import assert_equal
from small_models import write_folder

from maxramp.files.place import place
from maxramp.handover.opening import open_model
from maxramp.huggingface import folder as released

pytestmark = pytest.mark.slow


def train_arguments(model, root):
    """Of a run of two steps that change nothing, and hand over what they began with."""
    return (
        *(BASE, "model_name=hf", f"load_parameters_path={model}", "steps=2", "learning_rate=0"),
        *("dataset_type=synthetic", "max_target_length=24", "export_huggingface=true"),
        *(f"base_output_directory={root}", "eval_interval=-1", "enable_rampup_batch_size=False"),
        "per_device_batch_size=1",
    )


@pytest.mark.parametrize(
    "storage", ["s3", pytest.param("gs", marks=pytest.mark.long)], indirect=True
)
def test_folders_in_a_storage_are_read_and_written(storage, tmp_path):
    """What is read there, trained from there, and written there."""
    folder = write_folder(tmp_path / "in", "qwen2.5", files=3, dtype="bfloat16")
    root = place(f"{storage.address}/{tmp_path.name}")
    for path in folder.iterdir():
        (root / "in" / path.name).write_bytes(path.read_bytes())
    complete(str(root / "in"), "--to", str(root / "out"), module="convert")
    assert_equal(folder, root / "out")
    keys = train_arguments(root / "in", root)
    for more in (("run_name=r",), ("run_name=adapters", "lora_rank=2")):
        complete(*keys, *more)
    adapters = open_model(str(root / "adapters/exported/2"), [])
    assert adapters.weights.adapted_model == str(root / "in")
    assert_equal(folder, root / "r" / "exported" / "2")
    config = json.loads((root / "r" / "huggingface" / "config.json").read_bytes())
    assert config == json.loads((folder / "config.json").read_bytes())
    (root / "in" / "model-00002-of-00003.safetensors").unlink()
    torn = run(str(root / "in"), "--to", str(root / "none"), module="convert")
    assert torn.returncode == 2 and "model-00002-of-00003.safetensors" in torn.stderr


def test_a_kill_leaves_no_model(storages, tmp_path):
    """Where files of an export were written, but not all of them; the same command ends it."""
    storage, folder = storages("s3"), write_folder(tmp_path / "in", "qwen2.5")
    root = place(f"{storage.address}/{tmp_path.name}")
    line = command(*train_arguments(folder, root), "run_name=r")
    since, environ = len(storage.requests), environment() | storage.environment

    def is_written():
        return any(r.startswith("PUT") and "exported/2/" in r for r in storage.requests[since:])

    process = subprocess.Popen(line, env=environ, stdout=subprocess.DEVNULL)
    while not is_written():
        assert process.poll() is None
        time.sleep(0.001)
    process.kill()
    process.wait()
    exported = root / "r" / "exported" / "2"
    assert not released.is_whole(exported)
    again = subprocess.run(line, env=environ, capture_output=True, text=True, check=True)
    assert f"wrote {exported}" in again.stdout
    assert_equal(folder, exported)


CONVERT = """
import sys
from maxramp.files.place import place
from maxramp.handover.opening import open_model
from maxramp.huggingface import writing
from maxramp.processes import backend
from maxramp.processes.ending import end_process

opened = open_model(sys.argv[1], ["ici_tensor_parallelism=2"])
backend.start(opened.config.backend)
model, beside = opened.load(), opened.origin.side_files
form = writing.Format("qwen3", "float32", 40, file_bytes=30_000)
writing.write(place(sys.argv[2]), model, form, beside, {})
end_process(0)
"""


def test_several_processes_write_the_same_folder(tmp_path):
    """Each reads its part of every tensor, and writes files of its own."""
    folder = write_folder(tmp_path / "in", "qwen3", files=2)
    out = tmp_path / "out"
    command = [sys.executable, "-c", CONVERT, str(folder), str(out)]
    for _, error, status in finish(start(command, 2, 2, [tmp_path] * 2)):
        assert status == 0, error
    assert len(list(out.glob("model-*.safetensors"))) > 2
    assert_equal(folder, out)
