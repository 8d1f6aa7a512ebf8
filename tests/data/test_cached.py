"""Text, chats and ids that are prepared once, and found again."""

import os
import pathlib
import shutil
import time

import numpy as np
import pytest
from conftest import BASE, TINY, make_config
from test_formats import TEXTS, open_file, write_file

from maxramp.config.load import load
from maxramp.data.files import prepared
from maxramp.data.files.megatron import MegatronFile, MegatronWriter
from maxramp.data.opening import open_rows
from maxramp.data.packing import Documents
from maxramp.data.rows import LEFT_OUT, MARKED, Document
from maxramp.data.shards import plan_cached
from maxramp.errors import ConfigError
from maxramp.files.place import place
from maxramp.planning.run_length import with_length

CACHE = ".cache/maxramp/prepared"  # below a home
COLUMN, ALL = "train_data_columns=[body]", "eval_interval=-1"


def keys(source, cache, *arguments):
    own = ("dataset_type=grain", COLUMN, "vocab_size=320", f"data_cache_dir={cache}")
    return (*own, f"grain_train_files={source}", *arguments)


def rows_of(source, cache, *arguments):
    corpus = open_rows(make_config(*keys(source, cache, *arguments)).data, True)
    (part,) = corpus.train
    return [part.items[i].tokens.tolist() for i in range(len(part.items))]


def sets_in(cache) -> set[str]:
    """The sets of a cache; nothing but whole ones is there."""
    folders = [*pathlib.Path(cache).iterdir()]
    assert all(prepared.is_prepared(str(folder)) for folder in folders)
    assert not list(pathlib.Path(cache).glob("*/.*"))
    return {folder.name for folder in folders}


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "zstd", "arrayrecord"])
def test_a_set_is_found_again_until_a_file_changes(kind, tmp_path):
    source, cache = write_file(tmp_path, kind, TEXTS), tmp_path / "cache"
    first, known = rows_of(source, cache), sets_in(cache)
    times = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert rows_of(source, cache) == first and sets_in(cache) == known
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == times
    changed = write_file(tmp_path / "other", kind, [TEXTS[0].upper(), *TEXTS[1:]])
    with open(source, "r+b") as file:  # in place
        file.write(changed.read_bytes())
        file.truncate()
    assert rows_of(source, cache) != first and len(sets_in(cache)) == 2


def write_alike(path, words):
    """Writes a line for each word. In place and with the same time, as an archive restores it."""
    path.parent.mkdir(exist_ok=True)
    path.touch()
    with open(path, "r+") as file:
        file.writelines(f'{{"body": "{word}"}}\n' for word in words)
    os.utime(path, (1_700_000_000, 1_700_000_000))
    return path


def test_another_file_of_the_same_name_size_and_time_has_another_set(tmp_path):
    cache = tmp_path / "cache"
    first, second = (write_alike(tmp_path / x / "p.jsonl", x * 40) for x in "xy")
    evaluated = f"grain_eval_files={second}", "eval_samples=-1"
    (held_out,) = open_rows(make_config(*keys(first, cache, *evaluated)).data, True).held_out
    tokens = np.concatenate([held_out.items[i].tokens for i in range(len(held_out.items))])
    assert ord("y") in tokens and ord("x") not in tokens
    assert rows_of(first, cache, ALL) != rows_of(second, cache, ALL) and len(sets_in(cache)) == 2


@pytest.mark.parametrize("size", [3, 20_000])
def test_an_edit_in_place_that_restores_size_and_time_makes_another_set(size, tmp_path):
    """Of a large file also between the parts that are looked at."""
    cache, words = tmp_path / "cache", ["abcd"] * size
    source = write_alike(tmp_path / "p.jsonl", words)
    first = rows_of(source, cache, ALL)
    assert rows_of(source, cache, ALL) == first and len(sets_in(cache)) == 1
    time.sleep(0.02)  # more than the step of a file system's clock
    words[size // 2] = "wxyz"
    write_alike(source, words)
    assert rows_of(source, cache, ALL) != first and len(sets_in(cache)) == 2


def test_an_untouched_file_is_known_without_reading_it_whole(tmp_path):
    """Also where its folder has moved. A copy is another file."""
    source = write_alike(tmp_path / "here" / "p.jsonl", ["abcd"])
    os.truncate(source, 10**10)  # takes no room on the disk

    def set_of(path):
        return plan_cached("", str(tmp_path), [open_file(path)], None).folder

    start, name = time.process_time(), set_of(source)
    assert time.process_time() - start < 1  # to read it takes three
    moved = source.parent.rename(tmp_path / "moved") / source.name
    assert set_of(moved) == name
    os.truncate(moved, 10**5)
    assert set_of(moved) != set_of(shutil.copy2(moved, tmp_path))


def test_keys_that_shape_a_set_make_another(tmp_path):
    """Those that lay out its documents do not."""
    (tmp_path / "here").mkdir()
    source, cache = write_file(tmp_path / "here", "jsonl", TEXTS), tmp_path / "cache"
    for options in ((), ("max_target_length=24",), ("packing=False",), ("eval_fraction=0.5",)):
        rows_of(source, cache, *options)
    assert len(sets_in(cache)) == 1
    for options in (
        ("add_bos=False",),
        ("train_data_columns=[id]",),
        ("grain_file_type=text", ALL),
    ):
        before = len(sets_in(cache))
        rows_of(source, cache, *options)
        assert len(sets_in(cache)) == before + 1
    rows_of(source.parent.rename(tmp_path / "elsewhere") / source.name, cache)
    assert len(sets_in(cache)) == 4


def test_what_cannot_be_prepared_leaves_no_set(tmp_path):
    source, cache = write_file(tmp_path, "jsonl", TEXTS), tmp_path / "cache"
    with open(source, "a") as file:
        file.write('\n{"body": 3}')
    with pytest.raises(ConfigError, match="jsonl.jsonl: line .*int '3', not text"):
        rows_of(source, cache)
    assert not list(cache.glob("*/manifest.json"))
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"={tmp_path}/file: cannot write there.*; give another"):
        rows_of(source, tmp_path / "file")


def test_sets_are_made_where_a_folder_can_be_made(tmp_path):
    (tmp_path / "file").touch()
    for output, folder in (
        (f"{tmp_path}/new/out", f"{tmp_path}/new/out/.prepared"),
        (f"{tmp_path}/file/out", "~/.cache/maxramp/prepared"),
        ("gs://bucket/runs", "gs://bucket/runs/.prepared"),
    ):
        data = make_config("data_cache_dir=", f"base_output_directory={output}").data
        assert data.data_cache_dir == folder


def test_a_plan_reads_data_without_the_storage_of_a_run(tmp_path, monkeypatch):
    """Which may be out of reach where the plan is made; nobody here can read the bucket."""
    monkeypatch.setenv("HOME", str(tmp_path))
    own = keys(write_file(tmp_path, "jsonl", TEXTS), "", "base_output_directory=gs://nobody/runs")
    merged = dict(key.split("=", 1) for key in (*TINY, *own, "per_device_batch_size=1"))
    config = load([BASE, *(f"{name}={value}" for name, value in merged.items())])
    assert with_length(config.replace(steps=-1), print).batch.total_samples > 50
    assert len(sets_in(tmp_path / CACHE)) == 1


def test_counts_are_those_of_every_chat(tmp_path):
    """Of many at once as of each that is read, cut or left out."""
    random, chats = np.random.default_rng(0), []
    for _ in range(400):
        length = int(random.integers(0, 30))
        if not length:
            chats.append(Document(np.empty(0, np.int32), left_out=MARKED))
            continue
        second = int(random.integers(1, length)) if length > 2 and random.random() < 0.4 else 0
        is_target = random.random(length) < random.choice([0.05, 0.5])
        begins = (0, second) if second else (0,)
        chats.append(Document(np.arange(length, dtype=np.int32), is_target, begins=begins))
    shards = []
    for name, part in (("a", chats[:300]), ("b", chats[300:])):
        files = []
        for suffix, documents in (
            ("", [chat.tokens for chat in part]),
            (prepared.TARGETS, [prepared.targets_of(chat) for chat in part]),
        ):
            with MegatronWriter(f"{tmp_path}/{name}{suffix}", np.dtype("uint8")) as writer:
                writer.add(documents)
                writer.finish()
            files.append(MegatronFile(f"{tmp_path}/{name}{suffix}"))
        shards.append(prepared.ChatShard(*files))
    for length, cut in ((12, False), (12, True), (99, False)):
        documents = Documents(shards, length, cut)[20:390]
        counts = documents.counts()
        for number, (tokens, targets, reason) in enumerate(counts.tolist()):
            chat = documents[number]
            assert (tokens, LEFT_OUT[reason]) == (len(chat.tokens), chat.left_out)
            assert targets == (0 if chat.left_out else int(chat.is_target[1:].sum()))
        assert len({*counts[:, 2].tolist()}) == 3 + (length == 12 and not cut)


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["gs", "s3"], indirect=True)
def test_hosts_without_a_common_disk_share_a_set_in_a_storage(
    storage, tmp_path, monkeypatch, capsys
):
    """One prepares it, the others fetch it; one that was not sent whole is sent again."""
    source, address = write_file(tmp_path, "jsonl", TEXTS), f"{storage.address}/{tmp_path.name}"
    expected, fetched = rows_of(source, tmp_path / "here"), []
    for host in ("first", "second", "second"):
        monkeypatch.setenv("HOME", str(tmp_path / host))
        assert rows_of(source, address) == expected
        fetched.append("fetching" in capsys.readouterr().out)
    assert fetched == [False, True, False]
    (name,) = sets_in(tmp_path / "first" / CACHE)
    first, second = (tmp_path / host / CACHE / name for host in ("first", "second"))
    files = {path.name: path.read_bytes() for path in first.iterdir()}
    assert files == {path.name: path.read_bytes() for path in second.iterdir()}
    (place(address) / name / prepared.NAME).unlink()
    assert rows_of(source, address) == expected
    kept = (place(address) / name).iterdir()
    assert files == {path.name: path.read_bytes() for path in kept}
