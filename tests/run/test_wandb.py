"""Weights & Biases without a network: what a run hands over lies in its folder, to be uploaded."""

import gc
import struct
import sys
import types

import pytest
from test_output import start

from maxramp.errors import ConfigError

_BLOCK = 1 << 15


def record(step: int) -> dict:
    numbers = {"loss": step / 7, "consumed_samples": 8 * (step + 1), "global_batch_size": 8}
    return {"step": step, "stage": 0, **numbers, "batch_fingerprint": "00ff"}


def written(path) -> list[dict]:
    """The numbers in a file of wandb's: messages in the format of LevelDB's logs."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    data, place, message, records = path.read_bytes(), 7, b"", []
    while place + 7 <= len(data):
        size, kind = struct.unpack_from("<HB", data, place + 4)  # after the checksum
        if kind == 0:  # the rest of a block
            place += 7
            continue
        message += data[place + 7 : place + 7 + size]
        place += 7 + size
        if _BLOCK - place % _BLOCK < 7:
            place += _BLOCK - place % _BLOCK
        if kind in (1, 4):  # whole, or its last part
            entry, message = messages.Record.FromString(message), b""
            if entry.WhichOneof("record_type") == "history":
                items = entry.history.item
                records.append({i.key or "/".join(i.nested_key): i.value_json for i in items})
    return records


@pytest.mark.slow
def test_numbers_of_an_offline_run(tmp_path, monkeypatch):
    """Of two starts, under one id, with the groups of TensorBoard's tags."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    keys = ("wandb_project=a-project", "steps=10")
    start(tmp_path / "run", *keys, records=[record(0), record(1), record(2)])
    gc.collect()  # the run's lock goes with the first start
    loads = {"expert_load": [[0.25, 0.75]]}
    start(tmp_path / "run", *keys, first_step=2, records=[record(2), record(3) | loads])
    paths = sorted((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
    assert len({path.name for path in paths}) == 1 and len(paths) == 2
    first, second = map(written, paths)
    assert [int(row["_step"]) for row in first] == [0, 1, 2]
    assert [int(row["_step"]) for row in second] == [2, 3]
    assert float(second[1]["learning/loss"]) == 3 / 7
    assert second[1]["experts/layer_00/_type"] == '"histogram"'
    assert second[1]["batch/consumed_samples"] == "32" and "batch_fingerprint" not in second[1]


def test_without_the_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="wandb_project=a needs the package wandb: .*pip install"):
        start(tmp_path / "run", "wandb_project=a", "steps=10")


class Service:
    """In the place of the package: notes the ids that it is given, or is out of reach."""

    def __init__(self, monkeypatch):
        self.ids, self.available = [], True
        monkeypatch.setitem(sys.modules, "wandb", self)

    def init(self, *, id, **arguments):
        if not self.available:
            raise RuntimeError("no network")
        self.ids.append(id)
        return types.SimpleNamespace(finish=lambda: None)

    def Settings(self, **arguments):
        return arguments


def test_a_run_has_an_id_of_its_own(tmp_path, monkeypatch):
    """A restart, also elsewhere, keeps it; a new run at the same path has another."""
    service = Service(monkeypatch)
    keys = ("wandb_project=a-project", "steps=10")
    start(tmp_path / "run", *keys)
    (tmp_path / "run").rename(tmp_path / "moved")
    for name in ("moved", "run"):
        gc.collect()
        start(tmp_path / name, *keys)
    first, moved, new = service.ids
    assert first == moved != new


def test_a_run_goes_on_without_a_network(tmp_path, monkeypatch, capsys):
    """A new one is refused, so that its owner hears of it."""
    Service(monkeypatch).available = False
    keys = ("wandb_project=a-project", "steps=10")
    with pytest.raises(ConfigError, match=r"takes no run \(no network\)"):
        start(tmp_path / "run", *keys)
    gc.collect()
    start(tmp_path / "run", *keys, first_step=2, records=[record(2)])
    printed = capsys.readouterr()
    assert "the run continues without it" in printed.out + printed.err
