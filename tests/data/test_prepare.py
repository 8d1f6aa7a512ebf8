"""maxramp.prepare as people run it: real processes, files and kills."""

import hashlib
import json
import os
import pathlib
import random
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time

import fsspec
import numpy as np
import pytest
from conftest import command, environment, make_config, open_sources
from forked import run_forked
from in_process import run_here
from test_formats import KINDS, TEXTS, write_file, write_megatron

from maxramp import prepare as prepare_lib
from maxramp.data.files import prepared

pytest.importorskip("tokenizers")

COLUMN = "train_data_columns=[body]"


def prepare(*arguments, status: int = 0) -> str:
    """Runs the command; returns what it printed, or its error."""
    done = run_here(*map(str, arguments), module="prepare")
    assert done.returncode == status, done.stderr
    return done.stdout if status == 0 else done.stderr


def start(*arguments, **options) -> subprocess.Popen:
    """Starts the command as a process of its own."""
    line = command(*map(str, arguments), module="prepare")
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(line, env=environment(), **(pipes | options))


def documents(folder) -> list[list[int]]:
    """Every document of a set, in order."""
    files = prepared.open_set(str(folder)).shards
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
    names = {f"{s['name']}.{x}" for s in manifest["shards"] for x in ("bin", "idx")}
    # Nothing half made.
    assert content(tmp_path / "set").keys() == names | {"manifest.json"}


def test_a_tokenizer_for_several_sets(tmp_path, capsys):
    """The one that a preparation trains on these inputs; a second one takes no other's place."""
    path = str(write_file(tmp_path, "jsonl", TEXTS))
    options = [path, COLUMN, "--train_bpe", "300"]
    assert prepare_lib.main([*options, "--output", str(tmp_path / "set")]) == 0
    only = [*options, "--tokenizer_only", "--output", str(tmp_path / "tok")]
    assert prepare_lib.main(only) == 0
    file = tmp_path / "tok" / "tokenizer.json"
    named = prepared.read_manifest(str(tmp_path / "set"))["tokenizer"]["file"]
    assert file.read_bytes() == (tmp_path / "set" / named).read_bytes()
    assert [*file.parent.iterdir()] == [file]
    assert prepare_lib.main(only) == 2 and prepare_lib.main([*only[:2], *only[4:]]) == 2
    error = capsys.readouterr().err
    assert "has a tokenizer already" in error and "give --train_bpe SIZE too" in error


def test_tokens_are_prepared_as_they_are(tmp_path):
    ids = [[1, 2, 3], [70000], [5] * 40]
    source, tokens = write_file(tmp_path, "parquet", ids), "tokenize_train_data=False"
    prepare(source, "--output", tmp_path / "a", COLUMN, tokens)
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
        opened = open_sources(make_config(*keys, "eval_fraction=0.1").data)
        rows, held_out = opened.train[0].items, opened.held_out[0].items
        assert len(rows) + len(held_out) == (len(stream) - 1) // 16
        for i in (0, 1, len(rows) // 2, len(rows) - 1):
            assert rows[i].tokens.tolist() == stream[i * 16 : i * 16 + 17]
        last = len(held_out) - 1
        assert held_out[last].tokens[0] == stream[(len(rows) + last) * 16]
        hashes.add(opened.train[0].hash)
        for path in folder.iterdir():
            with fsspec.open(f"memory://{folder.name}/{path.name}", "wb") as copy:
                copy.write(path.read_bytes())
        remote = f"grain_train_files=memory://{folder.name}"
        far = open_sources(make_config(keys[0], remote, keys[2]).data)
        np.testing.assert_array_equal(far.train[0].items[7].tokens, rows[7].tokens)
    assert len(hashes) == 1


def test_the_hash_is_of_tokens_and_document_lengths(tmp_path):
    """By the sum in the docstring, term by term; where shards end does not matter."""

    def hashed(documents, megabytes):
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        source = write_file(tmp_path / f"{folder}.in", "jsonl", documents)
        options = (COLUMN, "tokenize_train_data=False")
        sizes = ("--output", str(folder), "--shard_megabytes", str(megabytes))
        assert prepare_lib.main([str(source), *sizes, *options]) == 0
        manifest = prepared.read_manifest(str(folder))
        return manifest["hash"], len(manifest["shards"])

    documents = [[i, 70000 + i, *range(i % 7)] for i in range(60)] + [[], [5], []]
    prime, point, total = 2**127 - 1, 0x1E3779B97F4A7C15F39CC0605CEDC834, 0
    for i, document in enumerate(documents):
        digest = hashlib.blake2b(struct.pack(f"<{len(document)}i", *document), digest_size=16)
        power = point ** (len(documents) - 1 - i)
        total += int.from_bytes(digest.digest(), "big") * power
    hashed_text = f"{total % prime:032x} {len(documents)}".encode()
    expected = hashlib.blake2b(hashed_text, digest_size=8).hexdigest()
    assert hashed(documents, 1) == (expected, 1)
    finer, shards = hashed(documents, 0.0003)
    assert finer == expected and shards > 5
    moved = [documents[0] + documents[1][:1], documents[1][1:], *documents[2:]]
    assert len({expected, hashed(moved, 1)[0], hashed(documents[:-1], 1)[0]}) == 3


def test_no_file_of_somebody_else_is_touched(tmp_path, capfd):
    crawl = tmp_path / "crawl"
    (crawl / "more").mkdir(parents=True)
    for name in ("shard-00000.jsonl", "more/shard-00000.json", "a.tmp"):
        (crawl / name).write_text('{"text": "a document"}\n')
    (tmp_path / "link").symlink_to(crawl)
    (tmp_path / "elsewhere.jsonl").write_text('{"text": "another one"}\n')
    contents = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for name in ("crawl/*.jsonl", "crawl/more/*.json", "elsewhere.jsonl"):
        for output in (crawl, tmp_path / "link"):
            assert prepare_lib.main([str(tmp_path / name), "--output", str(output)]) == 2
            line = capfd.readouterr().err
            assert line.startswith(f"error: --output {output} holds a.tmp, which"), line
            assert line.count("\n") == 1
    assert prepare_lib.main([str(tmp_path / "elsewhere.jsonl"), "--output", "~nosuch/set"]) == 2
    assert contents == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_start_that_wrote_nothing_claims_nothing(tmp_path, capfd):
    """It fails before the first shard; what somebody else puts there then is theirs."""
    source, output = tmp_path / "in.jsonl", tmp_path / "set"
    many(source, 3)
    output.mkdir()
    options = [str(source), "--output", str(output)]
    source.write_text("[1]\n")
    assert prepare_lib.main([*options, "--train_bpe", "300"]) == 2
    assert [path.name for path in output.iterdir()] == [".lock"]
    (output / "shard-00000.bin").write_text("of another tool")
    assert prepare_lib.main(options) == 2
    assert "holds shard-00000.bin, which maxramp.prepare did not" in capfd.readouterr().err
    assert (output / "shard-00000.bin").read_text() == "of another tool"


def test_what_other_starts_left_is_removed(tmp_path):
    """Half-written files when it ends; other shards and tokenizers when the set is finished."""
    source, output = tmp_path / "in.jsonl", tmp_path / "set"
    many(source, 3000)
    whole = source.read_bytes()
    options = [str(source), "--output", str(output)]
    assert run_limited(*options, "--train_bpe", "300", kilobytes=30).returncode == 1
    source.write_bytes(whole + b"\n[")
    assert prepare_lib.main([*options, "--shard_megabytes", "0.02"]) == 2
    work = output / ".preparing"
    left = {path.name for path in (*work.iterdir(), *output.iterdir())}
    assert len(left & {f"shard-{i:05d}.bin" for i in range(5)}) == 5
    assert any(name.startswith("bpe-") for name in left)
    assert not any(name.endswith(".tmp") for name in left)
    source.write_bytes(whole)
    somebodys = {"notes.tmp", ".notes.tmp", "shard-notes.txt"}
    for name in somebodys:
        (output / name).write_text("kept")
    assert prepare_lib.main([*options, "--shard_megabytes", "1"]) == 0
    written = {"manifest.json", "shard-00000.bin", "shard-00000.idx"}
    assert set(content(output)) - somebodys == written
    assert all((output / name).read_text() == "kept" for name in somebodys)


def test_another_size_of_the_tokenizer_is_another_tokenizer(tmp_path, capfd):
    """Whatever an earlier start trained, also where the text gives fewer ids than asked for."""
    source = write_file(tmp_path, "jsonl", TEXTS)
    files = [str(source), "--output", str(tmp_path / "set"), COLUMN]

    def sized(size):
        status = prepare_lib.main([*files, "--train_bpe", str(size)])
        return status, capfd.readouterr()

    status, output = sized(300)
    assert status == 0 and "trained in" in output.out
    status, output = sized(300)
    assert status == 0 and "prepared already" in output.out
    before = content(tmp_path / "set")
    status, output = sized(400)
    assert status == 2 and "holds a set of other inputs, or" in output.err
    assert content(tmp_path / "set") == before
    shutil.rmtree(tmp_path / "set")
    assert sized(9000)[0] == 0  # the text gives fewer
    assert sized(9000)[0] == 0 and sized(8000)[0] == 2


def test_a_tokenizer_is_kept_between_starts(tmp_path, capfd):
    """Of the same size, also where a document was mended meanwhile; of another, it is trained."""
    source, output = tmp_path / "in.jsonl", tmp_path / "set"
    many(source, 3000)
    files = [str(source), "--output", str(output)]
    full = run_limited(*files, "--train_bpe", "300", kilobytes=2)
    assert full.returncode == 1 and full.stderr.count("\n") == 1
    assert full.stderr.startswith(f"error: --output {output}: cannot write {output}/.preparing/bpe")
    assert full.stderr.endswith(".json: File too large; make room, and start again to continue\n")
    # An output that takes no more than the tokenizer: the preparation ends after the training.
    shards = run_limited(*files, "--train_bpe", "300", kilobytes=30)
    assert shards.returncode == 1 and "trained in" in shards.stdout
    line = shards.stderr
    assert line.startswith(f"error: --output {output}: cannot write ") and "too large" in line
    assert line.count("\n") == 1
    assert [path.name[:4] for path in output.glob(".preparing/*.json")] == ["bpe-"]
    source.write_bytes(source.read_bytes() + b"\n")  # mended
    assert prepare_lib.main([*files, "--train_bpe", "300"]) == 0
    assert "is there from an earlier start" in capfd.readouterr().out
    shutil.rmtree(output)
    assert run_limited(*files, "--train_bpe", "300", kilobytes=30).returncode == 1
    assert prepare_lib.main([*files, "--train_bpe", "310"]) == 0
    printed = capfd.readouterr().out
    assert "trained in" in printed and "310 ids" in printed
    assert not (output / ".preparing").exists()


def run_limited(*arguments, kilobytes: int) -> subprocess.CompletedProcess:
    """The command where no file may grow beyond so much, as on a disk that is full."""
    line, limits = command(*arguments, module="prepare"), {resource.RLIMIT_FSIZE: kilobytes * 1024}
    return run_forked(line, environment(), limits=limits)


def test_a_reader_that_leaves_ends_nothing(tmp_path):
    """`| head -n 1` of a preparation, which goes on; an inspection ends with its reader."""
    source = write_file(tmp_path, "jsonl", TEXTS)
    for arguments, reads, status in (
        ((str(source), "--output", str(tmp_path / "set"), COLUMN), True, 0),
        (("--inspect", str(tmp_path / "set")), False, 128 + signal.SIGPIPE),
    ):
        process = start(*arguments)
        assert not reads or process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait(60) == status
        process.stderr.close()
    assert len(documents(tmp_path / "set")) == len(TEXTS)


def test_a_tokenizer_trained_on_the_input(tmp_path):
    path = write_file(tmp_path, "jsonl", TEXTS)
    output = prepare(path, "--output", tmp_path / "set", "--train_bpe", 400, COLUMN)
    assert "trained in" in output and "vocab_size=448" in output
    output = prepare("--inspect", tmp_path / "set")
    assert "205 documents" in output and "tokenizer.json: 400 ids" in output
    assert "<s>first</s>" in output and "<s>document 199 word word" in output
    # The set is whole in itself: its tokenizer is the one that prepares more.
    more = f"tokenizer_path={tmp_path}/set/tokenizer.json"
    prepare(path, "--output", tmp_path / "more", COLUMN, "tokenizer_type=huggingface", more)
    assert documents(tmp_path / "more") == documents(tmp_path / "set")


def test_a_second_start(tmp_path):
    """Of a finished set does nothing, and never writes over another one."""
    first, second = (write_file(tmp_path / x, "jsonl", TEXTS + [x]) for x in "ab")
    error = prepare(first, "--output", tmp_path / "set", COLUMN)
    # Under a name of its own: the default run may have been trained on other text.
    assert f"run_name=set dataset_type=grain grain_train_files={tmp_path}/set vocab_size=" in error
    before = content(tmp_path / "set")
    assert "prepared already" in prepare(first, "--output", tmp_path / "set", COLUMN)
    for other in ((second,), (first, second), (first, "add_eos=False")):
        error = prepare(*other, "--output", tmp_path / "set", COLUMN, status=2)
        assert "another folder" in error
    assert content(tmp_path / "set") == before


def test_a_bad_document_is_mended(tmp_path):
    """What was made before it stays, and nothing that is half a set can be trained on."""
    good, bad = (write_file(tmp_path / x, "jsonl", TEXTS) for x in "ab")
    whole = bad.read_bytes()
    bad.write_bytes(whole + b'\n{"body": "cut o')
    options = (good, bad, "--output", tmp_path / "set", "--shard_megabytes", 0.01, COLUMN)
    output = prepare(*options, status=2)
    lines = whole.count(b"\n") + 2
    assert output.startswith(f"error: {bad}: line {lines}: is not JSON") and output.count("\n") == 1
    kept_times = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "set").glob("*.bin")}
    assert kept_times and not (tmp_path / "set" / "manifest.json").exists()
    assert "not finished" in prepare("--inspect", tmp_path / "set", status=2)
    bad.write_bytes(whole)
    output = prepare(*options)
    assert "made by an earlier start" in output
    assert documents(tmp_path / "set") == [[256, *text.encode(), 257] for text in TEXTS] * 2
    kept = [(tmp_path / "set" / name).stat().st_mtime_ns == at for name, at in kept_times.items()]
    assert any(kept)


def many(path: pathlib.Path, count: int) -> None:
    with path.open("w") as file:
        file.writelines(
            f'{{"id": {i}, "text": "document {i} {"x" * (i % 50)}"}}\n' for i in range(count)
        )


@pytest.mark.slow
def test_killed_at_any_moment(tmp_path):
    """kill -9 of all, of the parent or of a worker, again and again: the same set in the end."""
    many(tmp_path / "in.jsonl", 60_000)
    options = ("--shard_megabytes", "0.25", "--workers", "2")
    prepare(tmp_path / "in.jsonl", "--output", tmp_path / "whole", *options)
    line = [tmp_path / "in.jsonl", "--output", tmp_path / "killed", *options]
    chance, kills = random.Random(0), 0
    for attempt in range(40):
        process = start(*line, stdout=subprocess.DEVNULL, start_new_session=True)
        # With a few more of the 16 shards each time.
        wanted, work = 4 * attempt + chance.randrange(1, 5), tmp_path / "killed" / ".preparing"
        while process.poll() is None and len(list(work.glob("shard-*.json"))) < wanted:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.2))
        if process.poll() is None:
            workers = pathlib.Path(f"/proc/{process.pid}/task/{process.pid}/children")
            worker = [int(pid) for pid in workers.read_text().split()][-1:]
            if attempt % 3 == 0:
                os.killpg(process.pid, signal.SIGKILL)
            else:
                os.kill(worker[0] if attempt % 3 == 1 and worker else process.pid, signal.SIGKILL)
            kills += 1
        error = process.communicate(timeout=300)[1]  # until no worker is left
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL or "a worker was killed" in error
    assert kills > 1
    assert content(tmp_path / "killed") == content(tmp_path / "whole")
    expected = [f"document {i} {'x' * (i % 50)}" for i in range(60_000)]
    got = documents(tmp_path / "killed")
    assert [bytes(ids[1:-1]).decode() for ids in got] == expected


@pytest.mark.slow
def test_stopped_while_workers_start(tmp_path):
    """Ctrl-C goes to all of them; one line says so, and the next start makes the set."""
    many(tmp_path / "in.jsonl", 200)
    options = (tmp_path / "in.jsonl", "--output", tmp_path / "set", "--workers", 2)
    process = start(*options, "--shard_megabytes", "0.004", start_new_session=True)
    while not process.stdout.readline().startswith("input "):
        assert process.poll() is None
    time.sleep(0.3)  # workers import by now
    os.killpg(process.pid, signal.SIGINT)
    error = process.communicate(timeout=60)[1]
    assert error == "stopped; run the same command again to continue\n"
    assert process.returncode == 1
    prepare(*options)
    assert len(documents(tmp_path / "set")) == 200


def run_program(folder, program, *arguments) -> subprocess.CompletedProcess:
    """A program that prepares in.jsonl of a folder, in it; a file, as workers import it."""
    (folder / "main.py").write_text(program)
    line = [sys.executable, "main.py", "in.jsonl", *arguments]
    more = {"cwd": folder, "capture_output": True, "text": True, "check": False}
    return subprocess.run(line, env=environment(), **more)


# A worker that is killed at the worst moment: while it tells its counts, and nobody else can.
KILLED_AT_COUNTING = """
import os, signal, sys
from maxramp import prepare
from maxramp.data import preparation
def count(self, *more):
    self._lock.acquire()
    os.kill(os.getpid(), signal.SIGKILL)
preparation._Maker._count = count
if __name__ == "__main__":
    sys.exit(prepare.main(sys.argv[1:]))
"""


def test_killed_while_counting(tmp_path):
    many(tmp_path / "in.jsonl", 10_000)
    done = run_program(tmp_path, KILLED_AT_COUNTING, "--output", "set", "--workers", "2")
    assert done.returncode == 1 and "a worker was killed" in done.stderr


def test_two_at_once(tmp_path):
    many(tmp_path / "in.jsonl", 30_000)
    options = (str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "set"))
    first = start(*options)
    assert first.stdout.readline().startswith("tokenizer")  # the folder is taken by now
    first.send_signal(signal.SIGSTOP)
    try:
        assert "another process is preparing it" in prepare(*options, status=2)
    finally:
        first.send_signal(signal.SIGCONT)
        assert first.communicate(timeout=60) and first.returncode == 0
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
def test_ten_times_the_documents_take_no_more_memory(tmp_path):
    """In the parent or in a worker."""
    peaks = []
    for count in (60_000, 600_000):
        many(tmp_path / "in.jsonl", count)
        options = ["--output", f"set{count}", "--shard_megabytes", "4", "--workers", "2"]
        done = run_program(tmp_path, PEAK, *options)
        assert done.returncode == 0, done.stderr
        peaks.append([int(line) / 1024 for line in done.stdout.splitlines()[-2:]])
        manifest = prepared.read_manifest(str(tmp_path / f"set{count}"))
        assert manifest["documents"] == count
    assert (np.subtract(peaks[1], peaks[0]) < 16).all(), peaks
