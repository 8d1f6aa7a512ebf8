"""Mixtures that change in phases: each part goes on where it was."""

import itertools
import json
import signal
import sys

import numpy as np
import pytest
from conftest import BASE, TINY, complete, make_config, refused, run, table
from jobs import finish, run_signalled, start

from maxramp.checkpoints.changes import changes_since
from maxramp.checkpoints.folder import Checkpoint
from maxramp.data.corpus import Part
from maxramp.data.opening import open_rows
from maxramp.data.order import Interleaving, RunRows
from maxramp.errors import ConfigError
from maxramp.rampup.phases import MIXTURE
from maxramp.run.metrics import read_records

WEIGHTS = (0.5, 0.3, 0.2)
LATER = [(137, (0.1, 0.9, 0.0)), (300, (0.0, 1.0, 2.0)), (301, (0.3, 0.3, 0.4))]
SIZES = (97, 210, 151)


def rows_of(seed, later=LATER, num_epoch=3):
    parts = [
        Part(name, weight, range(1000 * n, 1000 * n + size))
        for n, (name, weight, size) in enumerate(zip("abc", WEIGHTS, SIZES, strict=True))
    ]
    return RunRows(parts, num_epoch, seed, later)


def test_a_mixture_counts_what_it_gave():
    mixture = Interleaving(WEIGHTS)
    picks = [mixture.locate(n)[0] for n in range(60)]
    for n in range(60):
        assert mixture.count(n) == [picks[:n].count(part) for part in range(3)]


def test_parts_go_on_where_they_were():
    """Nothing repeats or is skipped, in order and shuffled; shares are exact to a row a phase."""
    rows, shuffled = rows_of(None), rows_of(7)
    assert len(rows) == len(shuffled)
    read, mixed = np.array([[order[r] for r in range(len(order))] for order in (rows, shuffled)])
    np.testing.assert_array_equal(read // 1000, mixed // 1000)
    for part, size in enumerate(SIZES):
        part_rows = read[read // 1000 == part] % 1000
        np.testing.assert_array_equal(part_rows, np.arange(len(part_rows)) % size)
        shuffled_rows = mixed[mixed // 1000 == part] % 1000
        for epoch in range(len(part_rows) // size):
            whole = shuffled_rows[epoch * size : (epoch + 1) * size]
            assert sorted(whole) == list(range(size))
    bounds = [0, *(first for first, _ in LATER), len(rows)]
    for weights, (begin, end) in zip(
        (WEIGHTS, *(weights for _, weights in LATER)), itertools.pairwise(bounds), strict=True
    ):
        for part, weight in enumerate(weights):
            count = np.cumsum(read[begin:end] // 1000 == part)
            wanted = weight / sum(weights) * np.arange(1, end - begin + 1)
            assert np.abs(count - wanted).max() < 1


def test_the_part_that_is_used_up_is_named():
    """What is left of each part is counted from what the phases before took of it."""
    rows = rows_of(None, [(50, (1.0, 0.0, 0.0))], num_epoch=1)
    assert rows.length(1) == (50 + 97 - 25, "a")
    assert rows.length(2) == (50 + 2 * 97 - 25, "a")
    assert rows_of(None, [(5000, (1.0, 0.0, 0.0))], num_epoch=1).length(1)[1] == "a"


def test_phases_to_come_change_no_row_before_them():
    rows, other = rows_of(3), rows_of(3, [LATER[0], (222, (1.0, 0.0, 0.0))])
    assert [rows[r] for r in range(222)] == [other[r] for r in range(222)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """JSON lines of three folders, of other letters each."""
    folder = tmp_path_factory.mktemp("files")
    for name, letters in {"web": "abcdef", "code": "ghijkl", "math": "mnopqr"}.items():
        lines = (json.dumps({"text": f"{letter}{n}" * 9}) + "\n" for letter in letters
                 for n in range(40))  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(lines))
    return folder


def mixture(files, **weights):
    return ";".join(f"{files}/{name}.jsonl,{weight}" for name, weight in weights.items())


def keys_of(files, *more):
    first = mixture(files, web=0.7, code=0.3)
    phases = {"40": {"grain_train_files": mixture(files, code=1, math=2)}}
    phases["80"] = {"grain_train_files": mixture(files, web=1, math=1), "global_batch_size": 4}
    keys = [*TINY, "dataset_type=grain", f"grain_train_files={first}", "global_batch_size=8"]
    keys += ["per_device_batch_size=4", "phases_unit=samples", f"phases={json.dumps(phases)}"]
    return [*keys, "total_samples=120", "eval_interval=5", "eval_samples=4", *more]


def opened(files, *more):
    config = make_config(*keys_of(files, *more))
    phases = config.batch.changing(MIXTURE)
    later = [(phase.first_sample, phase.changes[MIXTURE]) for phase in phases]
    return open_rows(config.data, True, later=later), config


def test_a_part_is_known_by_its_name(files):
    corpus, config = opened(files)
    assert [part.name.rsplit("/")[-1] for part in corpus.train] == [
        *["web.jsonl", "code.jsonl", "math.jsonl"]
    ]
    assert corpus.later == [(40, [0.0, 1.0, 2.0]), (80, [1.0, 0.0, 1.0])]
    assert "; from row 40 on " in corpus.description and "math.jsonl 0.667" in corpus.description
    alone = opened(files, "phases={}")[0]
    assert alone.hash == corpus.hash and not alone.identity({}).mixtures
    held_out = [[len(part.items) for part in one.held_out] for one in (corpus, alone)]
    assert held_out[0] == held_out[1]  # nothing of a part that comes later

    def saved(consumed):
        seen = [list(entry) for entry in corpus.identity({}).mixtures if entry[0] < consumed]
        fields = {"corpus_hash": corpus.hash, "config": {}, "versions": {}, "mixtures": seen}
        return Checkpoint("checkpoints/5", 5, consumed, [], **fields)

    def check(consumed, *more, allowed=()):
        now, _ = opened(files, *more)
        return changes_since(saved(consumed), {}, allowed, now.identity({}), {})

    assert check(40, "phases={}") == check(120) == ""
    free = {"grain_train_files": mixture(files, code=1, math=2)}
    assert check(80, f"phases={json.dumps({'40': free, '90': free})}") == ""
    with pytest.raises(
        ConfigError, match="(?s)math.jsonl weight 2 .* from sample 40 on.*mixture before"
    ):
        check(41, "phases={}")
    other = json.dumps({"40": {"grain_train_files": mixture(files, code=1, math=3)}})
    with pytest.raises(
        ConfigError, match="math.jsonl weight 2 .*math.jsonl weight 3 .*allow_changed=.corpus"
    ):
        check(41, f"phases={other}")
    assert check(41, f"phases={other}", allowed=["corpus"]).startswith("corpus=")


REFUSED = table("""
phases.40.grain_train_files=a,0 | the entry "a,0" has the weight "0"
phases.40.grain_train_files=nowhere* | grain_train_files: nowhere*: no such file
phases.40.grain_train_files={web},1;{web},2 | web.jsonl is named twice
dataset_type=text grain_train_files= phases.40.grain_train_files=a eval_interval=-1 phases.80={} | \
    phases.40: grain_train_files=a is read only with dataset_type=grain, and
program=grpo phases.80={} | is not read with program=grpo
""")


@pytest.mark.parametrize(("keys", "part"), REFUSED)
def test_refused_in_one_line(files, keys, part):
    with refused(part):
        opened(files, *keys.replace("{web}", f"{files}/web.jsonl").split())


def losses(folder):
    records = read_records(folder / "r" / "metrics.jsonl")
    return [(r["step"], r.get("loss", r.get("eval_loss")), r.get("batch_fingerprint"))
            for r in records]  # fmt: skip


@pytest.mark.slow
def test_restarts_around_the_changes(files, tmp_path, cache_dir):
    """Killed at a change, in two processes, with other phases; used up or changed, refused."""

    def make_line(name, *more):
        base = (f"base_output_directory={tmp_path / name}", f"jax_cache_dir={cache_dir}")
        return [BASE, *keys_of(files, "run_name=r", *base, *more)]

    complete(*make_line("whole"))
    wanted = losses(tmp_path / "whole")
    killed = run_signalled(5, signal.SIGKILL, *make_line("killed", "checkpoint_period=1"))
    assert killed.returncode == -signal.SIGKILL
    complete(*make_line("killed"))
    assert losses(tmp_path / "killed") == wanted

    command = [sys.executable, "-m", "maxramp.train", *make_line("both", "per_device_batch_size=2")]
    job = finish(start(command, 2, 1, [tmp_path] * 2))
    assert [outcome[2] for outcome in job] == [0, 0], job
    losses_of_both = losses(tmp_path / "both")
    assert [(step, rows) for step, _, rows in losses_of_both] == [
        (step, rows) for step, _, rows in wanted
    ]

    refused = run(*make_line("killed", "total_samples=160", "phases={}"))
    assert refused.returncode == 2 and "which would change what the run has seen" in refused.stderr
    short = run(*make_line("short", "total_samples=2400"))
    assert short.returncode == 2 and short.stderr.count("\n") == 1
    assert "is used up; use num_epoch=" in short.stderr
