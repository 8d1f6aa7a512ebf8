"""Which row comes when: exact shares, whole epochs, and batches read ahead in order."""

import contextlib
import multiprocessing
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

import grain
import numpy as np
import pytest
from conftest import ROOT, environment, make_config

from maxramp.data.corpus import Corpus, Part
from maxramp.data.loader import check_enough
from maxramp.data.order import Interleaving, RunRows
from maxramp.data.prefetch import ReadAhead
from maxramp.errors import ConfigError, TrainingError
from maxramp.rampup.schedule import RampupBatchManager

WEIGHTS = (
    *((0.7, 0.3), (0.5, 0.3, 0.2), (1, 2, 3, 1), (0.1, 0.25, 0.33, 0.32)),
    *((447, 98, 6, 8, 100, 877), (1,), (0.001, 1000), (123456789, 987654321)),
)


@pytest.mark.parametrize("weights", WEIGHTS)
def test_shares_are_exact_to_within_one_row(weights):
    """Over the first n rows, for every n; exactly over any 1,000 rows that the shares divide."""
    mixture = Interleaving(weights)
    parts, items = np.array([mixture.locate(n) for n in range(5000)]).T
    for part, weight in enumerate(weights):
        share = weight / sum(weights)
        counts = np.concatenate([[0], np.cumsum(parts == part)])
        assert np.abs(counts - share * np.arange(5001)).max() < 1
        off = np.abs(counts[1000:] - counts[:-1000] - 1000 * share).max()
        assert off < (1e-9 if weights in WEIGHTS[:2] else 2)
        np.testing.assert_array_equal(items[parts == part], np.arange(counts[-1]))


@pytest.mark.parametrize("weights", WEIGHTS)
def test_a_mixture_ends_where_a_part_does(weights):
    available = [7 * (i + 1) for i in range(len(weights))]
    mixture = Interleaving(weights)
    length, ended = mixture.length(available)
    for part, item in map(mixture.locate, range(min(length, 2000))):
        assert item < available[part]
    assert mixture.locate(length) == (ended, available[ended])


PARTS = [Part(name, 1, list(range(1000 * i, 1000 * i + 997))) for i, name in enumerate("abc")]


def orders(seed, num_epoch=3):
    """The order of every epoch of every part, as numbers of its items."""
    rows = RunRows(PARTS, num_epoch, seed)
    read = np.array([rows[i] for i in range(len(rows))])
    return [
        tuple(read[read // 1000 == part][epoch * 997 : (epoch + 1) * 997] % 1000)
        for part in range(3)
        for epoch in range(num_epoch)
    ]


def test_no_shuffle_is_another_one():
    """Of no epoch, part or seed near it; of seed 0 the first is Grain's of seed 0, as ever."""
    seeds = (0, 1, 2, 3, 2**32 - 1)
    assert len({order for seed in seeds for order in orders(seed)}) == 9 * len(seeds)
    grains = grain.MapDataset.source(range(997)).shuffle(seed=0)
    assert orders(0)[0] == tuple(grains[i] for i in range(997))


class Elements:
    """Numbers; `broken` cannot be read, at `deadly` the process that reads dies."""

    def __init__(self, broken=-1, error=None, deadly=-1):
        self._broken, self._deadly = broken, deadly
        self._error = error or OSError("no such device\nline 2")

    def __getitem__(self, index):
        if index == self._broken:
            raise self._error
        if index == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(3, index)


def read(elements, first, last, *arguments, size=24):
    keys = make_config(*arguments).reading
    reading = ReadAhead("element", elements.__getitem__, range(first, last), keys, size)
    with contextlib.closing(reading):
        return [int(element[0]) for element in reading]


SETTINGS = {"a thread": (), "threads": ("grain_num_threads=3",)}
SETTINGS["processes"] = ("grain_worker_count=2",)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(arguments, id=name, marks=[pytest.mark.slow] * (name == "processes"))
        for name, arguments in SETTINGS.items()
    ],
)
def test_elements_come_in_order_and_errors_in_one_line(arguments):
    assert read(Elements(), 5, 40, *arguments) == list(range(5, 40))
    with pytest.raises(TrainingError) as caught:
        read(Elements(broken=17), 5, 40, *arguments)
    assert str(caught.value) == "element 17 could not be read: no such device line 2"
    with pytest.raises(ConfigError, match="^a file: record 3 is torn$"):
        read(Elements(17, ConfigError("a file: record 3 is torn")), 5, 40, *arguments)


@pytest.mark.slow
def test_workers_start_where_somebody_has_cleaned_the_temporary_folder(tmp_path, monkeypatch):
    """As a system does after some days; a ramp that is replaced starts new ones."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for _ in range(2):
        assert read(Elements(), 0, 9, "grain_worker_count=1") == list(range(9))
        for path in tmp_path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_worker_that_dies_is_said():
    with pytest.raises(TrainingError, match=r"element \d+ could not be read: .*exit code -9"):
        read(Elements(deadly=11), 5, 40, "grain_worker_count=2")
    assert not multiprocessing.active_children()


@pytest.mark.slow
@pytest.mark.parametrize("ending", (signal.SIGKILL, signal.SIGTERM))
def test_workers_stay_with_their_parent(ending):
    """A signal to all of a job leaves them to their parent; a killed one leaves none behind."""
    program = (
        "import os, time, test_order, conftest\n"
        "from maxramp.data.prefetch import ReadAhead\n"
        "if __name__ == '__main__':\n"
        "    keys = conftest.make_config('grain_worker_count=2').reading\n"
        "    read = test_order.Elements().__getitem__\n"
        "    ahead = ReadAhead('element', read, range(100), keys, 24)\n"
        "    next(ahead), next(ahead)  # one of each worker: both are up\n"
        "    import multiprocessing\n"
        "    print(*[p.pid for p in multiprocessing.active_children()], flush=True)\n"
        "    time.sleep(60)\n"
    )
    path = str(pathlib.Path(__file__).parent)
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        env=environment() | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{path}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    workers = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    if ending == signal.SIGTERM:
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
        time.sleep(0.5)
        assert all(alive(worker) for worker in workers)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 120
    while any(alive(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid):
    try:
        status = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"  # not a zombie


class Counted(Elements):
    """Remembers the furthest element that was asked for."""

    furthest = -1

    def __getitem__(self, index):
        self.furthest = max(self.furthest, index)
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("arguments", "size", "ahead"),
    (
        (("grain_prefetch_buffer_size=6",), 24, 6),
        (("grain_prefetch_buffer_size=50", "grain_prefetch_buffer_gib=1"), 2**28, 4),
        (("grain_prefetch_buffer_size=50", "grain_prefetch_buffer_gib=0"), 2**28, 1),
    ),
)
def test_what_is_read_ahead_is_bounded(arguments, size, ahead):
    elements = Counted()
    keys = make_config(*arguments).reading
    reading = ReadAhead("element", elements.__getitem__, range(100), keys, size)
    for count in range(20):
        next(reading)
        deadline = time.monotonic() + 5
        while elements.furthest < count + ahead and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(0.005)
        assert elements.furthest <= count + ahead
    reading.close()


@pytest.mark.parametrize(
    "length, shown",
    [
        ("steps=100000000", "steps=100000000 takes 800000000 rows, but the data has 80 with"),
        ("total_samples=800000000", "total_samples=800000000 takes 800000000 rows, but"),
        ("total_tokens=12800000000", "total_tokens=12800000000 takes 800000000 rows, but"),
    ],
)
def test_what_is_refused_names_what_was_given_at_once(length, shown):
    """The fewest epochs that suffice, found by halves: of a phase's mixture too."""
    batch = make_config("global_batch_size=8", length).batch
    parts = (Part("a", 1.0, range(60)), Part("b", 0.0, range(20)))
    corpus = Corpus(parts, (), "", "", later=((40, [1.0, 1.0]),))
    rows = RunRows(corpus.train, 1, None, corpus.later)
    with pytest.raises(ConfigError) as caught:
        check_enough(corpus, rows, 1, RampupBatchManager(batch, 1))
    name = length.partition("=")[0]
    most = {"steps": 10, "total_samples": 80, "total_tokens": 80 * 16}[name]
    line = str(caught.value)
    assert line.startswith(shown) and line.endswith(f", or at most {name}={most}")
    epochs = int(re.search(r"num_epoch=(\d+), or", line)[1])
    assert rows.length(epochs - 1)[0] < 800_000_000 <= rows.length(epochs)[0]
