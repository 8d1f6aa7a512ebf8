"""A folder of a storage does what one of the disk does; one of two that claim it gets it."""

import concurrent.futures
import json
import os
import subprocess
import sys
import time

import pytest
from conftest import ROOT

from maxramp.checkpoints import folder as folder_lib
from maxramp.checkpoints.folder import Checkpoint
from maxramp.errors import ConfigError, TrainingError
from maxramp.files import run_folder
from maxramp.files.place import (
    make_folder,
    move_tree,
    place,
    remove_tree,
    set_aside,
    sizes,
    write_whole,
)
from maxramp.files.run_folder import Claim, MirroredFiles, claim_folder, is_gone, this_process

pytestmark = pytest.mark.slow
FILES = {"a": b"1", "deep/b.json": b"22", "deep/er/c": b""}


def fill(folder):
    for name, data in FILES.items():
        path = folder
        for part in name.split("/"):
            path = path / part
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, data)


@pytest.fixture(params=["disk", "gs", "s3"])
def folder(request, storages, tmp_path):
    if request.param == "disk":
        return tmp_path / "x"
    return place(f"{storages(request.param).address}/{tmp_path.name}/x")


def test_a_folder(folder):
    assert not folder.exists() and not folder.is_dir() and sizes(folder) == {}
    with pytest.raises(FileNotFoundError) as raised:
        (folder / "a").read_bytes()
    assert raised.value.filename == str(folder / "a") and raised.value.strerror
    fill(folder)
    assert folder.is_dir() and folder.exists() and not folder.is_file()
    assert (folder / "a").is_file() and not (folder / "a").is_dir()
    assert sizes(folder) == {name: len(data) for name, data in FILES.items()}
    assert (folder / "deep" / "b.json").read_bytes() == b"22"
    assert (folder / "deep" / "b.json").read_text(encoding="utf-8") == "22"
    assert [str(p) for p in folder.glob("d*/*.json")] == [str(folder / "deep" / "b.json")]
    assert not [*folder.glob("none/*")]
    assert not folder.with_name("xy").exists() and not (folder / "dee").exists()
    listed = {p.name: (p.is_dir(), p.is_file()) for p in folder.iterdir()}
    assert listed == {"a": (False, True), "deep": (True, False)}
    write_whole(folder / "a", b"333")
    assert (folder / "a").read_bytes() == b"333"
    move_tree(folder, folder.with_name("y"))
    assert not folder.exists() and sizes(folder.with_name("y"))["deep/b.json"] == 2
    (folder.with_name("y") / "a").unlink()
    (folder.with_name("y") / "a").unlink(missing_ok=True)
    remove_tree(folder.with_name("y"))
    remove_tree(folder.with_name("y"))
    assert not folder.with_name("y").exists()
    make_folder(folder)
    assert folder.is_dir()


def test_names(folder):
    path = folder / "runs" / "7.torn"
    assert (path.name, path.stem, path.suffix) == ("7.torn", "7", ".torn")
    assert path.parent == folder / "runs" and path.with_name("8").name == "8"
    assert place(str(path)) == path.absolute() and sorted([path, folder])[0] == folder


def test_only_whole_checkpoints_count(storage, tmp_path):
    """checkpoint.json is written last and goes first; what is somebody's is not removed."""
    folder = place(f"{storage.address}/{tmp_path.name}/checkpoints")
    for step in (4, 8, 12):
        write_whole(folder / str(step) / "model" / "d", b"22")
    write_whole(folder / "16" / "of" / "others", b"")
    for step in (4, 8):
        folder_lib.commit(Checkpoint(folder / str(step), step, 8 * step, [], "", {}, {}))
    assert folder_lib.steps_in(folder) == [4, 8]
    assert folder_lib.read(folder_lib.find(folder)).consumed_samples == 64
    (folder / "8" / "model" / "d").unlink()
    with pytest.raises(folder_lib.TornError, match="model/d: missing"):
        folder_lib.read(folder / "8")
    set_aside(folder / "8", folder_lib.TORN)
    folder_lib.remove(folder / "4")
    folder_lib.discard(folder)
    assert sorted(p.name for p in folder.iterdir()) == ["16", "8.torn"]
    assert (folder / "16" / "of" / "others").is_file()


def test_a_storage_that_is_away_tears_nothing(storage, away, tmp_path):
    """No answer is no answer: a restart must not go back to an older checkpoint for it."""
    folder = place(f"{storage.address}/{tmp_path.name}/checkpoints")
    write_whole(folder / "4" / folder_lib.FILE, b"{}")
    away(403)
    with pytest.raises((OSError, ConfigError)):
        folder_lib.read(folder / "4")
    for ask in (folder_lib.steps_in, folder_lib.find):
        with pytest.raises((OSError, ConfigError)):
            ask(folder)


def test_a_mirror_sends_what_changes(storage, away, tmp_path, monkeypatch):
    monkeypatch.setattr("maxramp.files.run_folder._END_SECONDS", 1.0)
    folder, warnings = place(f"{storage.address}/{tmp_path.name}/run"), []
    mirror = claim_folder(folder, "it", warnings.append)
    assert isinstance(mirror, MirroredFiles)
    log = mirror.local / "metrics.jsonl"
    (mirror.local / "tensorboard").mkdir()
    (mirror.local / "tensorboard" / "events").write_bytes(b"e")
    with log.open("ab", buffering=0) as file:
        for _ in range(3):
            file.write(b"line\n")
            mirror.publish()
            assert (folder / "metrics.jsonl").read_bytes() == log.read_bytes()
    asked = len(storage.requests)
    mirror.publish()
    assert not [r for r in storage.requests[asked:] if "metrics" in r]  # it has not changed
    mirror.close()
    assert not mirror.local.exists() and not (folder / ".lock").exists() and not warnings

    again = claim_folder(folder, "again", warnings.append)
    assert (again.local / "metrics.jsonl").read_bytes() == b"line\n" * 3
    assert (again.local / "tensorboard" / "events").read_bytes() == b"e"
    (again.local / "next_stage.json").write_bytes(b"{}")
    again.publish()
    assert (folder / "next_stage.json").is_file()
    (again.local / "next_stage.json").unlink()
    again.publish()
    assert not (folder / "next_stage.json").exists()
    away(403)
    (again.local / "late").write_bytes(b"late")
    with pytest.raises(OSError, match="late|Forbidden|forbidden"):
        again.publish()
    again.close()
    away(0)
    assert str(again.local) in warnings[-1]
    assert (again.local / "late").read_bytes() == b"late"  # nothing is lost
    remove_tree(again.local.parent)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(run_folder, "_BEAT", 0.2)
    monkeypatch.setattr(run_folder, "_SILENCE", 2.0)


def test_one_of_many_gets_it(storage):
    path, claims, refused = place(f"{storage.address}/many/.lock"), [], []

    def try_it(number):
        try:
            claims.append(Claim(path, f"claimant {number}"))
        except BlockingIOError as error:
            refused.append(str(error))

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        [*pool.map(try_it, range(6))]
    (held,) = claims
    owner = json.loads(path.read_bytes())["owner"]
    assert refused == [owner] * 5
    held.release()
    assert not path.exists()
    Claim(path, "the next").release()


def test_a_silent_owner_loses_it(storage):
    """As a machine that lost its network: it learns so before it writes again."""
    path = place(f"{storage.address}/silent/.lock")
    silent = Claim(path, "the first")
    silent._ending.set()  # its heart beats no more
    began = time.monotonic()
    second = Claim(path, "the second")
    assert time.monotonic() - began >= 2
    silent._renewed = 0.0
    with pytest.raises(TrainingError, match="was taken over by the second"):
        silent.renew()
    second.renew()
    second.release()


def test_a_killed_owner_on_this_machine_is_known(storage, monkeypatch):
    """Its claim is taken over without a wait."""
    path = place(f"{storage.address}/killed/.lock")
    program = (
        "import sys, time\n"
        "from maxramp.files.run_folder import Claim\n"
        "from maxramp.files.place import place\n"
        "Claim(place(sys.argv[1]), 'it'); print('claimed', flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", program, str(path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert owner.stdout.readline() == "claimed\n"
    monkeypatch.setattr(run_folder, "_SILENCE", 40.0)
    with pytest.raises(BlockingIOError, match="it"):
        Claim(path, "too early")
    owner.kill()
    owner.wait()
    began = time.monotonic()
    Claim(path, "in time").release()
    assert time.monotonic() - began < 20


def test_processes_are_told_apart():
    own = this_process()
    assert not is_gone(own)
    assert is_gone(own | {"started": "1"}) and is_gone(own | {"pid": 2**22 + 1})
    assert not is_gone(own | {"machine": "another", "pid": 2**22 + 1})
    assert not is_gone(None) and not is_gone({})
