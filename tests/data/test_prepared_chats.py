"""Prepared sets of chats and of pairs: the rows of a run are those of the JSON lines."""

import functools
import json
import signal

import jax
import numpy as np
import pytest
from conftest import BASE, TINY, complete, make_config, open_sources, refused, run, steps_of
from in_process import run_here
from jobs import start_until
from preference_pairs import MARKS, TEMPLATE, pairs, write_pairs, write_tokenizer

from maxramp.data.files import prepared
from maxramp.data.opening import open_rows
from maxramp.errors import ConfigError

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

LEAVE = "chats_with_marks=leave_out"


def chats(count: int = 60) -> list[dict]:
    """Chats of several lengths, with one that is long, one marked and one without an answer."""
    random = np.random.default_rng(0)
    records = [
        {"prompt": "q" * int(n), "completion": f"{i} " + "a" * int(m)}
        for i, (n, m) in enumerate(random.integers(1, 12, (count, 2)))
    ]
    records[7]["completion"] = "x" * 99
    records[9] = {"messages": [{"role": "user", "content": "alone"}]}
    records[11]["prompt"] = MARKS[0]
    turns = zip(("user", "assistant") * 2, "abcd", strict=True)
    records[13]["messages"] = [{"role": role, "content": content} for role, content in turns]
    return records


@pytest.fixture
def folder(tmp_path):
    write_tokenizer(tmp_path)
    write_pairs(tmp_path / "chats.jsonl", chats())
    write_pairs(tmp_path / "pairs.jsonl", pairs(20))
    return tmp_path


def prepare(folder, *arguments, reads="use_sft", source="chats.jsonl", to="set", status=0):
    line = (str(folder / source), "--output", str(folder / to), f"{reads}=true")
    done = run_here(*line, f"tokenizer_path={folder}", *arguments, module="prepare")
    assert done.returncode == status, done.stderr
    assert status == 0 or (done.stderr.count("\n") == 1 and done.stderr.startswith("error: "))
    return done.stdout + done.stderr


def keys(folder, source, *arguments, reads="use_sft"):
    return (
        *("dataset_type=grain", f"{reads}=True", f"tokenizer_path={folder}", "vocab_size=320"),
        *("grain_packing_type=best_fit", f"packing={reads == 'use_sft'}", "max_target_length=64"),
        *("enable_rampup_batch_size=False", f"grain_train_files={folder / source}", *arguments),
    )


def opened(folder, source, *arguments, reads="use_sft"):
    config = make_config(*keys(folder, source, *arguments, reads=reads))
    return open_rows(config.data, True)


assert_equal = functools.partial(np.testing.assert_array_equal, strict=True)


def assert_same_rows(one, other):
    for a, b in zip((*one.train, *one.held_out), (*other.train, *other.held_out), strict=True):
        assert len(a.items) == len(b.items) > 0
        for i in range(len(a.items)):
            jax.tree.map(assert_equal, a.items[i], b.items[i])
    ours, theirs = (corpus.description.partition(": ")[2] for corpus in (one, other))
    assert ours == theirs  # every count


def test_rows_are_those_of_the_lines(folder):
    """Whatever its shards are, and what does not fit into a row; held out are the same chats."""
    output = prepare(folder, LEAVE, "--shard_megabytes", "0.001")
    manifest = json.loads((folder / "set" / "manifest.json").read_text())
    assert len(manifest["shards"]) > 2 and manifest["documents"] == 60
    assert f"60 chats, {manifest['tokens']:,} tokens, " in output
    for why in ("1 with special tokens in their messages", "1 without an answer to train on"):
        assert f"left out   {why}\n" in output
    for more in ((), ("long_chats=cut", "packing=False")):
        options = (LEAVE, "eval_fraction=0.2", *more)
        assert_same_rows(opened(folder, "chats.jsonl", *options), opened(folder, "set", *options))
    shards = prepared.open_set(str(folder / "set")).shards
    documents = [shard[i] for shard in shards for i in range(len(shard))]
    targets = sum(int(d.is_target.sum()) for d in documents if not d.left_out)
    assert manifest["chats"]["targets"] == targets
    mixed = opened(folder, "set", LEAVE, f"grain_train_files={folder}/set,1;{folder}/chats.jsonl,1")
    assert len(mixed.train) == 2
    cut = {opened(folder, "set", LEAVE, f"long_chats={how}").hash for how in ("leave_out", "cut")}
    assert len(cut) == 2  # other rows, another hash


@pytest.mark.slow
def test_pairs(folder):
    prepare(folder, reads="use_dpo", source="pairs.jsonl")
    lines, set_rows = (
        opened(folder, source, "eval_fraction=0.2", reads="use_dpo")
        for source in ("pairs.jsonl", "set")
    )
    assert_same_rows(lines, set_rows)
    assert "20 pairs" in prepare(folder, reads="use_dpo", source="pairs.jsonl")


@pytest.mark.slow
def test_what_is_wrong_is_one_line(folder):
    prepare(folder, LEAVE)
    prepare(folder, reads="use_dpo", source="pairs.jsonl", to="pairs")
    text = run_here(str(folder / "chats.jsonl"), "--output", str(folder / "text"), module="prepare")
    assert text.returncode == 2  # it has no text
    (folder / "text.jsonl").write_text('{"text": "a document of some length"}\n' * 20)
    text = run_here(str(folder / "text.jsonl"), "--output", str(folder / "text"), module="prepare")
    assert text.returncode == 0, text.stderr
    (folder / "other.jinja").write_text(TEMPLATE + " ")
    for source, options, reads, parts in (
        ("set", ["sft_train_on_last_answer_only=True", LEAVE], "use_sft", ["answer_only=False"]),
        ("set", [], "use_sft", ["chats_with_marks=refuse", "with chats_with_marks=leave_out"]),
        ("set", [LEAVE, f"chat_template={folder}/other.jinja"], "use_sft", ["another chat_templ"]),
        ("set", [LEAVE, "chat_template_date=2026-02-01"], "use_sft", ["another chat_template"]),
        ("set", ["use_sft=False", "tokenizer_path="], "use_sft", ["prepared set of chats", "use_"]),
        ("set", [LEAVE], "use_dpo", ["was prepared with use_sft=True"]),
        ("pairs", [], "use_sft", ["use_sft=True: ", "was prepared with use_sft=False"]),
        ("text", [], "use_sft", ["use_sft=True reads chats", "holds rows or tokens"]),
    ):
        with refused(*parts):
            open_sources(make_config(*keys(folder, source, *options, reads=reads)).data)
    (folder / "set" / "shard-00000.targets.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"shard-00000.targets.bin and .idx hold .* torn"):
        opened(folder, "set", LEAVE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, part",
    [
        ([], "line 12: a message holds <|im_start|>"),
        ([LEAVE, "long_chats=cut"], "long_chats=cut: preparing takes only"),
        ([LEAVE, "--deduplicate"], "--deduplicate compares documents, not chats"),
        ([LEAVE, "--train_bpe", "300"], "--train_bpe 300 trains a tokenizer, and the keys name"),
    ],
)
def test_what_cannot_be_prepared(folder, options, part):
    assert part in prepare(folder, *options, status=2)


@pytest.mark.slow
def test_chats_that_are_bad_are_listed_by_their_place(folder):
    """As many as are allowed; the others are those of the lines."""
    records = chats()
    lines = [json.dumps(record) for record in records]
    lines[3:3] = ["{", json.dumps({"text": "no chat"})]
    (folder / "some.jsonl").write_text("\n".join(lines))
    prepare(folder, LEAVE, source="some.jsonl", status=2)
    prepare(folder, LEAVE, "--max_bad_records", "2", source="some.jsonl")
    bad = [json.loads(x) for x in (folder / "set/bad_records.jsonl").read_text().splitlines()]
    assert [one["byte"] for one in bad] == [sum(len(x) + 1 for x in lines[:n]) for n in (3, 4)]
    assert "is not a chat: it has text" in bad[1]["reason"]
    assert_same_rows(opened(folder, "chats.jsonl", LEAVE), opened(folder, "set", LEAVE))


@pytest.mark.slow
def test_inspection(folder):
    """Targets stand in brackets; what is left out says why."""
    prepare(folder, LEAVE)
    shown = run_here("--inspect", str(folder / "set"), module="prepare").stdout
    assert "<|im_start|>assistant\n⟦0 a" in shown and "<|im_end|>⟧" in shown and "60 chats" in shown
    lines = run_here(
        *("--inspect", str(folder / "pairs.jsonl"), "use_dpo=true", f"tokenizer_path={folder}"),
        f"data_cache_dir={folder}/cache",
        module="prepare",
    )
    assert "⟦yes 0<|im_end|>⟧" in lines.stdout and "⟦no<|im_end|>⟧" in lines.stdout, lines.stderr
    config = (BASE, *keys(folder, "pairs.jsonl", reads="use_dpo"), "load_parameters_path=x")
    config += (f"data_cache_dir={folder}/cache",)
    config_output = run_here("--inspect", *config, module="prepare")
    assert config_output.stdout == lines.stdout, config_output.stderr
    assert len([*(folder / "cache").iterdir()]) == 1  # the same set
    assert "\npair 0, " in lines.stdout and "\nrejected:\n<|im_start|>user" in lines.stdout


@pytest.mark.slow
def test_a_run_and_its_restart(folder, cache_dir):
    prepare(folder, LEAVE)
    tiny = [key for key in TINY if not key.startswith(("vocab_size", "max_target"))]
    line = (*tiny, LEAVE, f"base_output_directory={folder}", f"jax_cache_dir={cache_dir}")
    line += ("per_device_batch_size=4", "steps=-1", "num_epoch=15", "checkpoint_period=5")
    complete(BASE, *line, *keys(folder, "chats.jsonl"), "run_name=lines")
    few = ("run_name=few", "per_device_batch_size=4096")
    few = run(BASE, *line, *keys(folder, "chats.jsonl"), *few)
    assert few.returncode == 2 and "fewer than the 4096 of the first step" in few.stderr
    line = (BASE, *line, *keys(folder, "set"), "run_name=own")
    killed = start_until(12, folder / "own", signal.SIGKILL, *line)
    assert killed.returncode == -signal.SIGKILL
    complete(*line)
    names = ("step", "loss", "batch_fingerprint")
    runs = (steps_of(folder / name) for name in ("lines", "own"))
    one, other = ([[r[name] for name in names] for r in records] for records in runs)
    assert one == other and len(one) > 20
    assert "(num_epoch=15); for a new run" in run(*line).stdout
    suggested = run(*line, "--json", module="suggest")  # which reads the length, too
    assert suggested.returncode == 0, suggested.stderr
    assert json.loads(suggested.stdout)["rows"][0]["steps"] == len(one)
    line = ("--chat", "--prompt", "Who?", "--max_new_tokens", "2", "--json")
    answer = complete(str(folder / "own"), *line, module="generate")
    asked = "<|im_start|>user\nWho?<|im_end|><|im_start|>assistant\n"
    assert json.loads(answer.stdout)["prompt"] == asked
