"""What a preparation leaves out: bad records, up to a limit, and documents that repeat others."""

import json
import pathlib
import random

import pytest
from test_formats import open_file, write_file, write_parquet
from test_prepare import COLUMN, content, documents

from maxramp import prepare as prepare_lib
from maxramp.data.files import formats
from maxramp.data.files.records import BadRecord
from maxramp.errors import ConfigError

BAD = {
    **{b'{"body": "caf\xe9"}': "UTF-8", b'{"body": null}': "is null, not text"},
    b'{"body": "hm \\ud83d!"}': "half of a surrogate pair",
    **{b'{"text": "another field"}': "has no body", b"[1, 2]": "is not a JSON object"},
    b'{"body": "cut o': "is not JSON",
}


def make_crawl(path: pathlib.Path) -> list[str]:
    """Good lines with bad ones among them; returns the good documents."""
    texts = [f"document {i} {'x' * (i % 50)}" for i in range(300)]
    lines = [json.dumps({"body": text}).encode() for text in texts]
    for number, bad in enumerate(BAD):
        lines.insert(31 + 50 * number, bad)
    path.write_bytes(b"\n".join(lines) + b"\n")
    return texts


def prepare(source, output, *arguments) -> int:
    options = (source, "--output", output, "--shard_megabytes", 0.004, COLUMN, *arguments)
    return prepare_lib.main([str(argument) for argument in options])


def test_bad_records_are_left_out_and_listed(tmp_path, capfd):
    """In order, with their bytes; the same files for any number of workers."""
    texts, source = make_crawl(tmp_path / "crawl.jsonl"), tmp_path / "crawl.jsonl"
    for workers in (1, 3):
        options = ("--max_bad_records", 6, "--workers", workers)
        assert prepare(source, tmp_path / f"{workers}", *options) == 0
    assert "left out   6 bad records, listed in " in capfd.readouterr().out
    assert content(tmp_path / "1") == content(tmp_path / "3")
    assert [bytes(ids[1:-1]).decode() for ids in documents(tmp_path / "1")] == texts
    listed = (tmp_path / "1" / "bad_records.jsonl").read_text().splitlines()
    data = source.read_bytes()
    for line, (bad, reason) in zip(listed, BAD.items(), strict=True):
        entry = json.loads(line)
        assert entry["file"] == str(source) and reason in entry["reason"]
        assert data[entry["byte"] :].startswith(bad + b"\n")
    # A set with something left out is not taken for one without.
    assert prepare(source, tmp_path / "1") == 2
    line = capfd.readouterr().err
    assert "is prepared already and leaves out 6 bad records, which --max_bad_records 6 al" in line


def test_too_many_bad_records_end_it(tmp_path, capfd):
    """With a line; a start with a higher limit counts none of them twice."""
    texts, source = make_crawl(tmp_path / "crawl.jsonl"), tmp_path / "crawl.jsonl"
    assert prepare(source, tmp_path / "set", "--max_bad_records", 4, "--workers", 1) == 2
    line = capfd.readouterr().err
    # The fifth of six, or the last one where that was read before anybody counted.
    assert line.startswith(
        (f"error: {source}: line 232: is no", f"error: {source}: line 282: is not")
    )
    assert line.endswith("; more are bad than --max_bad_records 4\n") and line.count("\n") == 1
    assert not (tmp_path / "set" / "manifest.json").exists()
    assert prepare(source, tmp_path / "set", "--max_bad_records", 2) == 2  # by what is there
    line = capfd.readouterr().err
    assert f"{source}: " in line and "more are bad than --max_bad_records 2" in line
    assert prepare(source, tmp_path / "set", "--max_bad_records", 6) == 0
    assert len((tmp_path / "set" / "bad_records.jsonl").read_text().splitlines()) == 6
    assert len(documents(tmp_path / "set")) == len(texts)


def test_bad_records_of_other_formats(tmp_path):
    """In the place of a bad record stands what is wrong with it, and reading goes on."""
    parquet = tmp_path / "null.parquet"
    parquet.write_bytes(write_parquet([{"body": value} for value in ("a", None, "b")]))
    array_record = write_file(tmp_path, "arrayrecord", ["a", "nu\0ll", "b"])
    for path, reason in ((parquet, "is null, not text"), (array_record, "zero byte at 2")):
        file = open_file(path)
        records = [r for start, stop, _ in file.split(9**9) for r in file.read(start, stop)]
        first, (position, bad), last = records
        assert (first, last) == ((0, "a"), (2, "b")) and isinstance(bad, BadRecord)
        assert (position, file.unit) == (1, "record") and reason in str(bad)


@pytest.mark.parametrize("kind", ("jsonl", "gzip"))
def test_an_overlong_line_ends_it(kind, tmp_path, monkeypatch):
    """Such as all of a file that is one JSON array, which no memory may hold."""
    monkeypatch.setattr(formats, "LONGEST_LINE", 100)
    file = open_file(write_file(tmp_path, kind, ["a" * 20, "b" * 80, "c" * 500, "d"]))
    for size in (50, 10**6):
        with pytest.raises(ConfigError, match="has a line of 100 bytes or more"):
            list(r for start, stop, _ in file.split(size) for r in file.read(start, stop))


def test_repeated_documents_are_left_out(tmp_path, capfd):
    rng = random.Random(0)
    texts = [f"document {rng.randrange(150)}" for _ in range(400)]
    parts = {"a": texts[:250], "b": texts[250:]}
    sources = [write_file(tmp_path / x, "jsonl", part) for x, part in parts.items()]
    expected = [[256, *text.encode(), 257] for text in dict.fromkeys(texts)]
    sets = []
    for workers, megabytes in ((1, 1), (2, 0.002)):
        output = tmp_path / f"set{workers}"
        sizes = ("--workers", str(workers), "--shard_megabytes", str(megabytes))
        options = [*map(str, sources), "--output", str(output), COLUMN, *sizes, "--deduplicate"]
        assert prepare_lib.main(options) == 0
        repeated = len(texts) - len(expected)
        assert f"left out   {repeated} documents that an earlier one" in capfd.readouterr().out
        assert documents(output) == expected
        assert not list(output.glob("*.hashes"))
        manifest = json.loads((output / "manifest.json").read_text())
        assert manifest["duplicates"] == repeated
        sets.append(manifest["hash"])
        assert prepare_lib.main(options) == 0 and "prepared already" in capfd.readouterr().out
        assert prepare_lib.main(options[:-1]) == 2  # the set of all of them is another
        capfd.readouterr()
    assert sets[0] == sets[1]
    (empty := tmp_path / "empty.jsonl").touch()
    assert prepare_lib.main([str(empty), "--output", str(tmp_path / "x"), "--deduplicate"]) == 2
    assert "no records with tokens" in capfd.readouterr().err


def test_threads_encode_one_shard(tmp_path):
    """As one does, byte for byte; also of a compressed file, which has one piece."""
    source = write_file(tmp_path, "zstd", [f"text {i} {'y' * (i % 70)}" for i in range(3000)])
    for workers in (1, 2):
        options = [str(source), "--output", str(tmp_path / f"{workers}"), "--workers", f"{workers}"]
        assert prepare_lib.main([*options, COLUMN]) == 0
    assert content(tmp_path / "1") == content(tmp_path / "2")
