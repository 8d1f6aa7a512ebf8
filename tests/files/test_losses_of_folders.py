"""What must not happen to the files of a folder and the objects of a storage, whoever fails."""

import shutil
import subprocess
import sys
import threading
import time

import pytest
from conftest import BASE, environment, make_config

from maxramp.checkpoints.folder import steps_in
from maxramp.checkpoints.saving import Saves
from maxramp.config.load import load
from maxramp.errors import ConfigError
from maxramp.files import storage
from maxramp.files.place import make_folder, place, remove_tree, sizes, write_whole
from maxramp.files.run_folder import MirroredFiles

memory = pytest.importorskip("fsspec.implementations.memory")


class Client(memory.MemoryFileSystem):
    """A storage in memory that takes addresses of any scheme, and keeps to itself."""

    cachable = False

    def __init__(self, **options):  # a run's own, once any test has read from memory://
        super().__init__(**options)
        self.store, self.pseudo_dirs = {}, [""]

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.partition("://")[2] or path)

    def ls(self, path, detail=True, **kwargs):
        return [e | {"name": e["name"].lstrip("/")} for e in super().ls(path, True, **kwargs)]

    def find(self, path, **kwargs):
        listed = super().find(path, **kwargs)
        return {name.lstrip("/"): listed[name] for name in listed}

    def pipe_file(self, path, value, **kwargs):
        self.makedirs(self._parent(path), exist_ok=True)
        super().pipe_file(path, value, **kwargs)

    def rm_file(self, path):
        super().rm_file(path)
        self.pseudo_dirs = [""]


class Held:
    """A claim that nobody contests."""

    def renew(self):
        pass

    check = release = renew


@pytest.fixture
def client(monkeypatch):
    client = Client()
    monkeypatch.setattr("maxramp.files.place.storage.store_of", lambda scheme: client)
    return client


def mirror_of(run, warn=print):
    """Of a run's folder that there is."""
    make_folder(place(run))
    return MirroredFiles(place(run), warn, Held())


def test_cleaning_the_temporary_folder_removes_nothing_there(client):
    run, warnings = place("gs://bucket/runs/run"), []
    names = {"metrics.jsonl", "config.yml", "next_stage.json"}
    for name in names:
        write_whole(run / name, b"{}")
    mirror = MirroredFiles(run, warnings.append, Held())
    (mirror.local / "next_stage.json").unlink()  # as every start does
    mirror.publish()
    names -= {"next_stage.json"}
    assert set(sizes(run)) == names
    (mirror.local / "config.yml").unlink()
    mirror.publish()
    (mirror.local / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="removed under the run"):
        mirror.publish()  # no checkpoint may count without its records
    shutil.rmtree(mirror.local)
    with pytest.raises(FileNotFoundError, match="removed under the run"):
        mirror.publish()
    mirror.close()
    assert set(sizes(run)) == names
    assert warnings[-1].endswith(f"not sent to {run} is lost")


def test_a_folder_with_the_name_of_a_glob(client):
    """Its removal takes no other run's objects along."""
    runs = [place(f"gs://bucket/runs/{name}") for name in ("exp1", "exp[12]", "exp*")]
    for run in runs:
        write_whole(run / "checkpoints" / "100" / "model" / "d", b"1")
    remove_tree(runs[1])
    remove_tree(runs[2])
    assert [sizes(run) != {} for run in runs] == [True, False, False]


DOTTED = [
    f"{key}={address}"
    for key in ("base_output_directory", "load_full_state_path")
    for address in ("gs://bucket/runs/./x", "s3://bucket/..", "gs://../x")
]


@pytest.mark.parametrize("key", ["run_name=a[1]", "base_output_directory=s3://b/a?/b", *DOTTED])
def test_addresses_whose_clients_would_not_agree_where_that_is_are_refused(key):
    says = f"{key} must be .* with no part . or .." if key in DOTTED else "which no address in an"
    with pytest.raises(ConfigError, match=says):
        load([BASE, "base_output_directory=gs://bucket/runs", key])
    for good in (
        "run_name=exp[12]",
        *(f"base_output_directory={x}" for x in ("../r", "gs://b/.r/a..b")),
    ):
        load([BASE, good])  # a disk takes any


def test_no_answer_is_no_empty_folder(client, monkeypatch):
    """Or a run would start anew because its storage is away."""
    folder = place("gs://bucket/run/checkpoints")
    assert steps_in(folder) == []
    write_whole(folder / "4" / "checkpoint.json", b"{}")
    assert steps_in(folder) == [4]

    def away(path, **kwargs):
        raise OSError("away")

    monkeypatch.setattr(client, "info", away)
    for ask in (steps_in, lambda path: path.is_dir(), lambda path: path.is_file()):
        with pytest.raises(OSError, match="away"):
            ask(folder)
    monkeypatch.setattr(storage, "PATIENCE", 0.1)
    for ask, reason in ((away, "away"), (lambda path: time.sleep(1), "no answer in 0 seconds")):
        monkeypatch.setattr(client, "info", ask)
        with pytest.raises(ConfigError, match=f"^KEY=gs://b/x: .* reached .{reason}"):
            storage.check_answers("KEY", "gs://b/x")


def test_a_slow_save_lets_the_next_ones_out(client):
    """Until it is done; and one that has failed is told of by the next."""
    folder, warnings = place("gs://bucket/run/checkpoints"), []
    saves = Saves(folder, make_config("max_failed_saves=9").checkpoints, warnings.append)
    go_on = threading.Event()
    saves.begin(4, lambda: go_on.wait(60))
    assert saves.is_late(8) and saves.is_late(12)
    (line,) = warnings
    assert "checkpoints/4 is still being written: no checkpoint after step 8" in line
    go_on.set()
    saves.settle()
    assert saves.newest == 4 and not saves.is_late(16)

    def fail():
        raise OSError("away")

    saves.begin(20, fail)
    saves.settle()
    assert "20 was not saved: away; checkpoint 4 stands; the run continues" in warnings[1]


def test_a_glob_of_a_storage(client, tmp_path):
    files = ["branches/20-48/branch.json", "branches/20-96/8/branch.json", "branch.json", "b/x.yml"]
    for folder in (place("gs://bucket/run"), tmp_path):
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, b"{}")
    for pattern in ("*.json", "branches/*/branch.json", "branches/20-*", "*/*/[0-9]*", "none/*"):
        listed, expected = (
            sorted(str(path).removeprefix(f"{folder}/") for path in folder.glob(pattern))
            for folder in (place("gs://bucket/run"), tmp_path)
        )
        assert listed == expected


def test_after_an_outage_it_sends_at_once(client, monkeypatch):
    """However long the round took that failed."""
    monkeypatch.setattr("maxramp.files.run_folder._PERIOD", 0.02)
    mirror, write = mirror_of("gs://bucket/run"), client.pipe_file
    failed, sent = threading.Event(), threading.Event()

    def fail_once(path, data, **kwargs):
        if failed.is_set():
            write(path, data, **kwargs)
            sent.set()
            return
        time.sleep(1.0)
        failed.set()
        raise OSError("away")

    monkeypatch.setattr(client, "pipe_file", fail_once)
    (mirror.local / "late").write_bytes(b"1")
    assert failed.wait(10) and sent.wait(10)  # not after 20 times 1 s
    mirror.close()


def test_the_records_are_sent_last(client, monkeypatch):
    """A kill between two objects must not lose what a start has cut off them."""
    mirror, write, sent = mirror_of("gs://bucket/run"), client.pipe_file, []
    monkeypatch.setattr(
        client, "pipe_file", lambda path, data: sent.append(path) or write(path, data)
    )
    names = ["metrics.jsonl", "metrics.dropped.jsonl", "a", "z"]
    for name in names:
        (mirror.local / name).write_bytes(b"1")
    mirror.publish()
    assert len(sent) == 4 and sent[-1] == "gs://bucket/run/metrics.jsonl"
    mirror.close()


WRITER = """
import pathlib, sys
from maxramp.files.place import write_whole
path, letter = pathlib.Path(sys.argv[1]), sys.argv[2].encode()
for _ in range(300):
    write_whole(path, letter * 10_000)
    content = path.read_bytes()
    assert len(content) == 10_000 and len(set(content)) == 1
"""


def test_two_processes_write_one_file(tmp_path):
    """Each of them writes all of it, and neither takes away what the other is writing."""
    path = tmp_path / "file"
    lines = ([sys.executable, "-c", WRITER, str(path), letter] for letter in "ab")
    pipes = {"stderr": subprocess.PIPE, "text": True}
    writers = [subprocess.Popen(line, env=environment(), **pipes) for line in lines]
    assert [writer.communicate(timeout=60)[1] for writer in writers] == ["", ""]
    assert path.read_bytes() in (b"a" * 10_000, b"b" * 10_000)
    assert list(tmp_path.iterdir()) == [path]
