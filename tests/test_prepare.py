"""maxramp.prepare as people run it: real processes, files and kills."""

import contextlib
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import fsspec
import numpy as np
import pytest
from conftest import BASE, TINY, command, environment, make_config, run
from test_formats import KINDS, TEXTS, write_file, write_megatron

from maxramp.data import prepared
from maxramp.data.sources import open_corpus

pytest.importorskip("tokenizers")

COLUMN = "train_data_columns=[body]"


def prepare(*arguments, status: int = 0) -> str:
    """Runs the command; returns what it said."""
    done = run(*map(str, arguments), module="prepare")
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def documents(folder) -> list[list[int]]:
    """Every document of a set, in order."""
    manifest = prepared.read_manifest(str(folder))
    files = prepared.open_shards(str(folder), manifest)
    return [file[i].tolist() for file in files for i in range(len(file))]


def content(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_every_format_holds_the_same_documents(tmp_path):
    expected = [[256, *text.encode(), 257] for text in TEXTS]
    files = [write_file(tmp_path / kind, kind, TEXTS) for kind in KINDS]
    prepare(*files, "--output", tmp_path / "set", "--shard_megabytes", 0.004, COLUMN)
    assert documents(tmp_path / "set") == expected * len(files)
    manifest = json.loads((tmp_path / "set" / "manifest.json").read_text())
    assert manifest["documents"] == len(TEXTS) * len(files) and len(manifest["shards"]) > 10
    assert manifest["tokens"] == sum(map(len, expected)) * len(files)
    assert (manifest["dtype"], manifest["max_token"]) == ("uint16", 257)
    names = {
        "manifest.json",
        *(f"{s['name']}.{x}" for s in manifest["shards"] for x in ("bin", "idx")),
    }
    assert content(tmp_path / "set").keys() == names  # and nothing half made


def test_workers_do_not_change_the_set(tmp_path):
    path = write_file(tmp_path, "jsonl", TEXTS)
    for workers in (1, 3):
        to = ("--output", tmp_path / f"{workers}", "--workers", workers, "--shard_megabytes", 0.005)
        prepare(path, *to, COLUMN, "add_bos=False")
    assert content(tmp_path / "1") == content(tmp_path / "3")


def test_tokens_are_prepared_as_they_are(tmp_path):
    ids = [[1, 2, 3], [70000], [5] * 40]
    prepare(
        write_file(tmp_path, "parquet", ids),
        *("--output", tmp_path / "a", COLUMN, "tokenize_train_data=False"),
    )
    write_megatron(tmp_path / "m", [[[1, 2], [3]], [[70000]], [[5] * 40]])
    prepare(tmp_path / "m.bin", "--output", tmp_path / "b")
    assert documents(tmp_path / "a") == documents(tmp_path / "b") == ids
    assert "none: the inputs held tokens" in prepare("--inspect", tmp_path / "b")


def test_rows_of_a_set_are_its_stream(tmp_path):
    """Whatever its shards are; and training reads them."""
    source = write_file(tmp_path, "jsonl", TEXTS)
    stream = [token for text in TEXTS for token in [256, *text.encode(), 257]]
    hashes = set()
    for megabytes in (1, 0.003):
        folder = tmp_path / f"set{megabytes}"
        prepare(source, "--output", folder, "--shard_megabytes", megabytes, COLUMN)
        keys = ("dataset_type=grain", f"grain_train_files={folder}", "vocab_size=264")
        opened = open_corpus(make_config(*keys, "eval_fraction=0.1"))
        rows = opened.train[0].items
        assert not opened.documents and len(rows) + len(opened.held_out) == (len(stream) - 1) // 16
        for i in (0, 1, len(rows) // 2, len(rows) - 1):
            assert rows[i].tolist() == stream[i * 16 : i * 16 + 17]
        last = len(opened.held_out) - 1
        assert opened.held_out[last].tolist()[0] == stream[(len(rows) + last) * 16]
        hashes.add(opened.hash)
        for path in folder.iterdir():
            with fsspec.open(f"memory://{folder.name}/{path.name}", "wb") as copy:
                copy.write(path.read_bytes())
        far = open_corpus(
            make_config(keys[0], f"grain_train_files=memory://{folder.name}", keys[2])
        )
        assert far.train[0].items[7].tolist() == stream[7 * 16 : 8 * 16 + 1]
    assert len(hashes) == 2  # of the set, which its shards are part of
    output = (f"base_output_directory={tmp_path}", "run_name=run", "log_period=1")
    short = ("steps=4", "enable_rampup_batch_size=False", "per_device_batch_size=8")
    kept = [key for key in TINY if not key.startswith("vocab_size")]
    trained = run(BASE, *kept, *keys, *output, *short, "eval_interval=-1", "jax_cache_dir=")
    assert trained.returncode == 0, trained.stderr
    assert f"{folder}: " in trained.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert sum('"loss"' in line for line in lines) == 4


def test_a_tokenizer_trained_on_the_input(tmp_path):
    path = write_file(tmp_path, "jsonl", TEXTS)
    said = prepare(path, "--output", tmp_path / "set", "--train_bpe", 400, COLUMN)
    assert "trained in" in said and "vocab_size=448" in said
    said = prepare("--inspect", tmp_path / "set")
    assert "205 documents" in said and "tokenizer.json: 400 ids" in said
    assert "<s>first</s>" in said and "<s>document 199 word word" in said
    # The set is whole in itself: its tokenizer is the one that prepares more.
    more = f"tokenizer_path={tmp_path}/set/tokenizer.json"
    prepare(path, "--output", tmp_path / "more", COLUMN, "tokenizer_type=huggingface", more)
    assert documents(tmp_path / "more") == documents(tmp_path / "set")


def test_a_second_start(tmp_path):
    """Of a finished set does nothing, and never writes over another one."""
    first, second = (write_file(tmp_path / x, "jsonl", TEXTS + [x]) for x in "ab")
    prepare(first, "--output", tmp_path / "set", COLUMN)
    before = content(tmp_path / "set")
    assert "prepared already" in prepare(first, "--output", tmp_path / "set", COLUMN)
    for other in ((second,), (first, second), (first, "add_eos=False")):
        said = prepare(*other, "--output", tmp_path / "set", COLUMN, status=2)
        assert "another folder" in said
    assert content(tmp_path / "set") == before


def test_a_bad_document_is_mended(tmp_path):
    """What was made before it stays, and nothing that is half a set can be trained on."""
    good, bad = (write_file(tmp_path / x, "jsonl", TEXTS) for x in "ab")
    whole = bad.read_bytes()
    bad.write_bytes(whole + b'\n{"body": "cut o')
    given = (good, bad, "--output", tmp_path / "set", "--shard_megabytes", 0.01, COLUMN)
    said = prepare(*given, "--workers", 1, status=2)
    lines = whole.count(b"\n") + 2
    assert said.startswith(f"error: {bad}: line {lines}: is not JSON") and said.count("\n") == 1
    made = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "set").glob("*.bin")}
    assert made and not (tmp_path / "set" / "manifest.json").exists()
    assert "not finished" in prepare("--inspect", tmp_path / "set", status=2)
    bad.write_bytes(whole)
    said = prepare(*given)
    assert "made by an earlier start" in said
    assert documents(tmp_path / "set") == [[256, *text.encode(), 257] for text in TEXTS] * 2
    kept = [(tmp_path / "set" / name).stat().st_mtime_ns == at for name, at in made.items()]
    assert any(kept)


def many(path: pathlib.Path, count: int) -> None:
    with path.open("w") as file:
        file.writelines(
            f'{{"id": {i}, "text": "document {i} {"x" * (i % 50)}"}}\n' for i in range(count)
        )


def test_killed_at_any_moment(tmp_path):
    """kill -9 of all, of the parent or of a worker, again and again: the same set in the end."""
    many(tmp_path / "in.jsonl", 60_000)
    options = ("--shard_megabytes", "0.25")
    start = time.monotonic()
    prepare(tmp_path / "in.jsonl", "--output", tmp_path / "whole", *options)
    seconds = time.monotonic() - start
    given = [tmp_path / "in.jsonl", "--output", tmp_path / "killed", *options]
    chance, kills = random.Random(0), 0
    for attempt in range(40):
        process = subprocess.Popen(
            command(*map(str, given), module="prepare"),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        # Longer each time, so that an end is reached on a slow machine as well.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(chance.uniform(0.2, 0.5) * seconds * 1.1**attempt)
        if process.poll() is None:
            workers = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
            worker = [int(pid) for pid in workers.read_text().split()][-1:]
            if attempt % 3 == 0:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                os.kill(worker[0] if attempt % 3 == 1 and worker else process.pid, signal.SIGKILL)
            kills += 1
        said = process.communicate(timeout=60)[1].decode()  # until no worker is left
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL or "a worker was killed" in said
    assert kills > 1
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    expected = [f"document {i} {'x' * (i % 50)}" for i in range(60_000)]
    got = documents(tmp_path / "killed")
    assert [bytes(ids[1:-1]).decode() for ids in got] == expected


# A worker that is killed at the worst moment: while it tells its counts, and nobody else can.
KILLED_AT_COUNTING = """
import os, signal, sys
from maxramp import prepare
from maxramp.data import preparation
def count(*more):
    preparation._counts.get_lock().acquire()
    os.kill(os.getpid(), signal.SIGKILL)
preparation._count = count
if __name__ == "__main__":
    sys.exit(prepare.main(sys.argv[1:]))
"""


def test_killed_while_counting(tmp_path):
    many(tmp_path / "in.jsonl", 10_000)
    (tmp_path / "main.py").write_text(KILLED_AT_COUNTING)
    done = subprocess.run(
        [sys.executable, "main.py", "in.jsonl", "--output", "set", "--workers", "2"],
        env=environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "a worker was killed" in done.stderr


def test_two_at_once(tmp_path):
    """The second is refused while the first is at work."""
    many(tmp_path / "in.jsonl", 30_000)
    given = (str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "set"))
    first = subprocess.Popen(
        command(*given, module="prepare"), env=environment(), stdout=subprocess.PIPE, text=True
    )
    assert first.stdout.readline().startswith("tokenizer")  # the folder is taken by now
    first.send_signal(signal.SIGSTOP)
    try:
        assert "another process is preparing it" in prepare(*given, status=2)
    finally:
        first.send_signal(signal.SIGCONT)
        assert first.wait(60) == 0
        first.stdout.close()
    assert len(documents(tmp_path / "set")) == 30_000


PEAK = """
import pathlib, re, resource, sys
from maxramp import prepare
if __name__ == "__main__":
    status = prepare.main(sys.argv[1:])
    print(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1])
    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
    sys.exit(status)
"""


@pytest.mark.slow
def test_a_million_documents_in_constant_memory(tmp_path):
    """Ten times the documents take no more memory, in the parent or in a worker."""
    (tmp_path / "peak.py").write_text(PEAK)
    peaks = []
    for count in (100_000, 1_000_000):
        many(tmp_path / "in.jsonl", count)
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, str(tmp_path / "peak.py"), str(tmp_path / "in.jsonl")]
            + ["--output", str(tmp_path / f"set{count}"), "--shard_megabytes", "4"],
            env=environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        peaks.append([int(line) / 1024 for line in done.stdout.splitlines()[-2:]])
        print(
            f"{count:,} in {time.perf_counter() - start:.1f}s, MiB of parent, worker: {peaks[-1]}"
        )
        manifest = prepared.read_manifest(str(tmp_path / f"set{count}"))
        assert manifest["documents"] == count
    assert (np.subtract(peaks[1], peaks[0]) < 16).all(), peaks
