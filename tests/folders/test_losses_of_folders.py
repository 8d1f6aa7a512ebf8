"""What must not happen to the objects of a storage, whoever fails: without a server."""

import concurrent.futures
import json
import shutil
import threading
import time

import pytest
import tensorstore
from conftest import BASE, make_config

from maxramp.checkpoints import folder as folder_lib
from maxramp.checkpoints.background import Patience, agreed_reason, in_thread
from maxramp.checkpoints.folder import Checkpoint, steps_in
from maxramp.checkpoints.store import Checkpoints
from maxramp.checkpoints.timer import Timer
from maxramp.config.load import load
from maxramp.errors import ConfigError, TrainingError
from maxramp.folders.mirror import Mirror
from maxramp.folders.place import make_folder, place, remove_tree, sizes, write_whole

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
        found = super().find(path, **kwargs)
        return {name.lstrip("/"): found[name] for name in found}

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

    check = release = abandon = renew


@pytest.fixture
def client(monkeypatch):
    client = Client()
    monkeypatch.setattr("maxramp.folders.place.storage.store_of", lambda scheme: client)
    return client


def mirror_of(run, warn=print):
    """Of a run's folder that there is."""
    make_folder(place(run))
    return Mirror(place(run), warn, Held())


def test_cleaning_the_temporary_folder_removes_nothing_there(client):
    run, warnings = place("gs://bucket/runs/run"), []
    names = {"metrics.jsonl", "decisions.json", "config.yml", "next_stage.json"}
    for name in names:
        write_whole(run / name, b"{}")
    mirror = Mirror(run, warnings.append, Held())
    (mirror.here / "next_stage.json").unlink()  # as every start does
    mirror.publish()
    names -= {"next_stage.json"}
    assert set(sizes(run)) == names
    (mirror.here / "config.yml").unlink()
    mirror.publish()
    (mirror.here / "metrics.jsonl").unlink()
    with pytest.raises(FileNotFoundError, match="removed under the run"):
        mirror.publish()  # no checkpoint may count without its records
    shutil.rmtree(mirror.here)
    with pytest.raises(FileNotFoundError, match="removed under the run"):
        mirror.publish()
    mirror.close()
    assert set(sizes(run)) == names
    assert len(warnings) == 2 and warnings[1].endswith(f"not sent to {run} is lost")


def test_a_folder_with_the_name_of_a_glob(client):
    """Its removal takes no other run's objects along."""
    runs = [place(f"gs://bucket/runs/{name}") for name in ("exp1", "exp[12]", "exp*")]
    for run in runs:
        write_whole(run / "checkpoints" / "100" / "model" / "d", b"1")
    remove_tree(runs[1])
    remove_tree(runs[2])
    assert [sizes(run) != {} for run in runs] == [True, False, False]


@pytest.mark.parametrize("name", ["run_name=exp[12]", "base_output_directory=s3://bucket/a?/b"])
def test_names_that_clients_take_for_a_glob_are_refused(name):
    keys = {"base_output_directory": "gs://bucket/runs"} | dict([name.split("=")])
    with pytest.raises(ConfigError, match="which no address in an object storage may have"):
        load([BASE, *(f"{key}={value}" for key, value in keys.items())])
    load([BASE, "run_name=exp[12]"])  # a disk takes it


@pytest.mark.parametrize("key", ["base_output_directory", "load_full_state_path"])
@pytest.mark.parametrize("address", ["gs://bucket/runs/./x", "s3://bucket/..", "gs://../x"])
def test_dots_in_an_address_are_refused(key, address):
    """Its clients would not agree where that is."""
    with pytest.raises(ConfigError, match=f"{key}={address} must be .* with no part . or .."):
        load([BASE, f"{key}={address}"])
    load([BASE, "base_output_directory=gs://bucket/.runs/a..b"])
    load([BASE, "base_output_directory=.././runs"])


def test_no_answer_is_no_empty_folder(client, monkeypatch):
    """Or a run would start anew because its storage is away."""
    folder = place("gs://bucket/run/checkpoints")
    assert steps_in(folder) == []
    write_whole(folder / "4" / "files.json", b"{}")
    assert steps_in(folder) == [4]

    def away(path, **kwargs):
        raise OSError("away")

    monkeypatch.setattr(client, "info", away)
    for ask in (steps_in, lambda path: path.is_dir(), lambda path: path.is_file()):
        with pytest.raises(OSError, match="away"):
            ask(folder)


def test_files_removed_under_a_save_do_not_count(client):
    """As by the former owner of the folder."""
    path = place("gs://bucket/run/checkpoints/4")
    folder_lib.begin(path)
    write_whole(path / "_CHECKPOINT_METADATA", b"{}")
    folder_lib.discard(path)
    write_whole(path / "model" / "d", b"22")
    with pytest.raises(OSError, match="files are missing"):
        folder_lib.commit(path)
    assert set(sizes(path)) == {"model/d"}


def test_a_failed_save_is_removed_when_the_next_one_counts(client):
    """Not before, when the folder may be another run's; and its thread commits nothing."""
    folder = place("gs://bucket/run/checkpoints")
    config = make_config("max_failed_saves=9")
    checkpoints = Checkpoints(config.checkpoints, folder, "", {}, [].append)
    checkpoints._timer = Timer(-1)

    def save(step, hold=None, fails=False):
        def write():
            write_whole(folder / str(step) / "_CHECKPOINT_METADATA", b"{}")
            assert hold is None or hold.wait(60)
            if fails:
                raise OSError("away")

        writing = in_thread(lambda: checkpoints._write(folder / str(step), write, lambda: None))
        checkpoints._saving = step, writing
        return writing

    save(4, fails=True)
    checkpoints._finish_save()
    assert (folder / "4").exists()
    go_on = threading.Event()
    late = save(8, go_on)
    checkpoints._given_up.add(8)  # as when another process failed
    save(12)
    checkpoints._finish_save()
    assert {p.name for p in folder.iterdir()} == {"12"}
    go_on.set()
    late.result()
    assert not (folder / "8" / "files.json").exists()


def test_a_kill_in_the_first_save_stops_no_restart(client):
    """Also before its mark is there: nothing ever counted, and what there is stays."""
    folder = place("gs://bucket/run/checkpoints")
    write_whole(folder / "4" / "model" / "d", b"1")
    config, warnings = make_config(), []

    def start():
        checkpoints = Checkpoints(config.checkpoints, folder, "", {}, warnings.append)
        assert checkpoints.latest() is None
        checkpoints.start_saving()

    start()
    assert set(sizes(folder)) == {"4.torn/model/d"} and not warnings
    write_whole(folder / "4" / "files.json", b"{}")  # this one did count
    with pytest.raises(ConfigError, match="4 is torn .* no checkpoint before it is whole"):
        start()


def test_a_checkpoint_that_was_copied_without_its_files_json(client):
    """By a person: it is no save that was killed, and nothing is passed over without a word."""
    folder = place("gs://bucket/run/checkpoints")
    config, warnings = make_config(), []
    write_whole(folder / "8" / "_CHECKPOINT_METADATA", b'{"custom_metadata": {}}')
    checkpoints = Checkpoints(config.checkpoints, folder, "", {}, warnings.append)
    with pytest.raises(ConfigError, match="8 is torn .files.json: missing.*put the file back"):
        checkpoints.latest()
    saved = Checkpoint(folder / "4", 4, 64, [], "", {}, {})
    metadata = json.dumps({"custom_metadata": saved.metadata()}).encode()
    write_whole(folder / "4" / "_CHECKPOINT_METADATA", metadata)
    folder_lib.commit(folder / "4")
    assert checkpoints.latest().step == 4
    (line,) = warnings
    assert "8 is torn (files.json: missing); going on from the checkpoint before it, 4" in line


def test_the_end_says_that_it_still_sends(client, monkeypatch):
    monkeypatch.setattr("maxramp.folders.mirror.QUIET", 0.1)
    warnings, go_on = [], threading.Event()
    mirror = mirror_of("gs://bucket/run", warnings.append)
    (mirror.here / "late").write_bytes(b"1")
    write = client.pipe_file
    slow = lambda path, data, **more: go_on.wait(10) and write(path, data)  # noqa: E731
    monkeypatch.setattr(client, "pipe_file", slow)
    threading.Timer(1.5, go_on.set).start()
    mirror.close()
    (line,) = warnings
    assert "gs://bucket/run: the last files are still being sent, until" in line
    assert (place("gs://bucket/run") / "late").is_file()


def test_a_glob_of_a_storage(client, tmp_path):
    """Finds what the disk finds."""
    files = ["branches/20-48/branch.json", "branches/20-96/8/branch.json", "branch.json", "b/x.yml"]
    for folder in (place("gs://bucket/run"), tmp_path):
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_whole(folder / name, b"{}")
    for pattern in ("*.json", "branches/*/branch.json", "branches/20-*", "*/*/[0-9]*", "none/*"):
        found, expected = (
            sorted(str(path).removeprefix(f"{folder}/") for path in folder.glob(pattern))
            for folder in (place("gs://bucket/run"), tmp_path)
        )
        assert found == expected


def test_after_an_outage_it_sends_at_once(client, monkeypatch):
    """However long the round took that failed."""
    monkeypatch.setattr("maxramp.folders.mirror._PERIOD", 0.02)
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
    (mirror.here / "late").write_bytes(b"1")
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
        (mirror.here / name).write_bytes(b"1")
    mirror.publish()
    assert len(sent) == 4 and sent[-1] == "gs://bucket/run/metrics.jsonl"
    mirror.close()


def test_the_end_does_not_wait_for_a_storage_that_takes_nothing(client, tmp_path, monkeypatch):
    """However long it waits for one that is slow; and it says what it waits for."""
    never, ended = concurrent.futures.Future(), threading.Event()
    store = tensorstore.KvStore.open(f"file://{tmp_path}/").result()

    def write_slowly():
        for number in range(25):
            store.write(str(number), b"1").result()
            time.sleep(0.1)
        ended.set()

    threading.Thread(target=write_slowly).start()
    monkeypatch.setattr("maxramp.checkpoints.background.QUIET", 0.3)
    said = []
    reason = agreed_reason(never, patience := Patience(2.0, said.append))
    assert reason == "the storage has taken nothing for 2 seconds"
    assert ended.is_set() and len(said) == 1
    since = patience._since
    assert agreed_reason(never, patience) == reason and patience._since == since  # the same end
    config, folder = make_config(), place("gs://bucket/run/checkpoints")
    checkpoints = Checkpoints(config.checkpoints, folder, "", {}, print)
    checkpoints._saving = 8, never
    with pytest.raises(TrainingError, match="8 was not saved: the storage has taken nothing"):
        checkpoints._finish_save(last=True, patience=Patience(0.1, said.append))


def test_a_save_that_failed_elsewhere_is_no_late_one(client, monkeypatch):
    """Orbax lets the other processes wait for it for 20 minutes."""
    config, folder = make_config(), place("gs://bucket/run/checkpoints")
    checkpoints = Checkpoints(config.checkpoints, folder, "", {}, print)
    checkpoints._saving = 8, concurrent.futures.Future()
    for other, decided in (([True, False], False), ([True, True], True)):
        gather = lambda own, other=other: [own, other]  # noqa: E731
        monkeypatch.setattr("maxramp.checkpoints.store.agreement.all_gather_json", gather)
        assert checkpoints._is_save_decided() is decided


def test_links_are_followed_but_not_back_up(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "array").write_bytes(b"12345")
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for name in ("d", "e"):  # two ways to one folder, both in a checkpoint's list of files
        (folder / name).symlink_to(tmp_path / "elsewhere")
    (folder / "up").symlink_to("..")
    (folder / "gone").symlink_to("nowhere")
    found = sizes(folder)
    assert found["d/array"] == found["e/array"] == 5
    assert not [name for name in found if name.count("/") > 2]
