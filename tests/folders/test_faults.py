"""What must not happen to the objects of a storage, whoever fails: without a server."""

import shutil

import pytest

from maxramp.folders.mirror import Mirror
from maxramp.folders.place import place, sizes, write_whole

memory = pytest.importorskip("fsspec.implementations.memory")


class Client(memory.MemoryFileSystem):
    """A storage in memory that takes addresses of any scheme, and keeps to itself."""

    cachable = False

    def __init__(self):
        super().__init__()
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

    check = release = renew


@pytest.fixture
def client(monkeypatch):
    client = Client()
    monkeypatch.setattr("maxramp.folders.place.storage.store_of", lambda scheme: client)
    return client


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
    shutil.rmtree(mirror.here)
    with pytest.raises(FileNotFoundError, match="removed under the run"):
        mirror.publish()
    mirror.close()
    assert set(sizes(run)) == names
    assert len(warnings) == 2 and warnings[1].endswith(f"not sent to {run} is lost")
