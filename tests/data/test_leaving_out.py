"""What a preparation leaves out, and --inspect: rows of a set as the model sees them."""

import json
import pathlib
import random
import shlex

import pytest
from conftest import make_config, open_sources
from rich.console import Console
from test_formats import open_file, write_file, write_parquet
from test_prepare import COLUMN, content, documents

from maxramp import prepare as prepare_lib
from maxramp.data import inspection
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


LINES = '{"text": "one"}\n{"text": "second text"}\n{"text": "3"}\n'


def prepared(tmp_path) -> str:
    (tmp_path / "in.jsonl").write_text(LINES)
    options = [str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "set"), "add_bos=False"]
    assert prepare_lib.main(options) == 0
    return str(tmp_path / "set")


def test_rows_are_shown_as_the_model_sees_them(tmp_path, capsys):
    """Of 18 tokens: "one" and its mark, "second text" and its, "3" and its; rows of 8."""
    folder = prepared(tmp_path)
    capsys.readouterr()
    assert prepare_lib.main(["--inspect", folder, "max_target_length=8"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    rows = lines[lines.index("rows 2 of max_target_length=8, documents apart") + 1 :]
    assert rows == [
        "row 0, 2 documents",
        "tokens 0 to 3, positions 0 to 3, 3 targets: 'one</s>' |",
        "tokens 4 to 7, positions 0 to 3, 4 targets: 'seco'",
        "row 1, 1 document",
        "tokens 0 to 7, positions 0 to 7, 7 targets: 'nd text</s>' |",
    ]
    options = ["--inspect", folder, "max_target_length=8", "separate_documents=False"]
    assert prepare_lib.main(options) == 0
    out = capsys.readouterr().out
    assert "each one text" in out and " | " not in out and "8 targets: 'one</s>seco'" in out
    assert "\x1b" not in out
    assert prepare_lib.main(["--inspect", folder, "add_bos=True"]) == 2
    assert "inspecting takes only max_target_length" in capsys.readouterr().err
    assert prepare_lib.main(["--inspect", folder]) == 0
    assert "\nrows " not in capsys.readouterr().out  # it is shorter than one


def test_colours_where_a_terminal_has_them(tmp_path, monkeypatch, capsys):
    folder, errors = prepared(tmp_path), []
    for colours in (None, "standard"):
        console = Console(highlight=False, force_terminal=True, color_system=colours)
        monkeypatch.setattr(inspection, "Console", lambda console=console, **_: console)
        capsys.readouterr()
        assert prepare_lib.main(["--inspect", folder, "max_target_length=8"]) == 0
        errors.append(capsys.readouterr().out)
    assert "\x1b[36m'one</s>'" in errors[1] and "\x1b" not in errors[0]


def test_a_name_may_have_any_character(tmp_path, capsys):
    """But the one that ends an entry of grain_train_files."""
    folder = pathlib.Path(prepared(tmp_path))
    for name in ("a,b", "set[1]", "c*,[?"):
        folder = folder.rename(tmp_path / name)
        assert prepare_lib.main(["--inspect", str(folder), "max_target_length=8"]) == 0
        assert "rows       2 of" in capsys.readouterr().out
        options = [str(tmp_path / "in.jsonl"), "--output", str(folder), "add_bos=False"]
        assert prepare_lib.main(options) == 0
        *_, line = capsys.readouterr().out.splitlines()
        (key,) = (word for word in shlex.split(line) if word.startswith("grain_train_files="))
        keys = ("dataset_type=grain", key, "max_target_length=8", "eval_interval=-1")
        assert len(open_sources(make_config(*keys).data).train[0].items) == 2
    assert prepare_lib.main(["in.jsonl", "--output", "a;b"]) == 2
    assert "--output a;b: a ; ends an entry of grain_train_files" in capsys.readouterr().err
