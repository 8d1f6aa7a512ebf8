"""tokenizer_type and tokenizer_path: used, refused or announced, never ignored without a word."""

import json
import shutil

import numpy as np
import pytest
from conftest import make_config, open_sources, refused, table
from test_formats import TEXTS, write_file, write_megatron

from maxramp import prepare
from maxramp.data import tokenizers
from maxramp.data.files import prepared

pytest.importorskip("tokenizers")

COLUMN = "train_data_columns=[body]"
GRAIN = ("dataset_type=grain", "grain_train_files=a.jsonl")


@pytest.fixture(scope="module")
def f(tmp_path_factory):
    """Documents, two tokenizers, and sets that were prepared with each of them and with bytes."""
    folder = tmp_path_factory.mktemp("tokenizers")
    source = write_file(folder, "jsonl", TEXTS)
    for name, size in (("one", 400), ("two", 300)):
        (folder / name).mkdir()
        (folder / name / "tokenizer.json").write_bytes(tokenizers.train_bpe(iter(TEXTS), size))
        key = f"tokenizer_path={folder}/{name}"  # without a type
        options = [str(source), COLUMN]
        assert prepare.main([*options, "--output", f"{folder}/set_{name}", key]) == 0
    assert prepare.main([*options, "--output", f"{folder}/set_bytes"]) == 0
    write_megatron(folder / "megatron", [[[1, 2, 3] * 40]])
    return folder


@pytest.mark.parametrize(
    ("kind", "paths"),
    [
        ("huggingface", ["{f}/one/tokenizer.json", "{f}/one", "gs://bucket/tokenizer.json"]),
        ("tiktoken", ["assets/tokenizer_llama3.tiktoken"]),
        ("sentencepiece", ["assets/tokenizer.MODEL"]),
        ("bytes", [""]),
    ],
)
def test_the_type_follows_from_the_file(kind, paths, f):
    for path in paths:
        keys = make_config(*GRAIN, f"tokenizer_path={path.replace('{f}', str(f))}")
        assert keys.data.tokenizer_type == kind


@pytest.mark.parametrize("split", [True, False])
def test_a_set_keeps_how_its_marks_were_made(split, f, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one</s>two"}\n' * 30)
    keys = (f"tokenizer_path={f}/one", f"split_special_tokens={split}")
    options = [str(tmp_path / "a.jsonl"), COLUMN, *keys]
    assert prepare.main([*options, "--output", str(tmp_path / "set")]) == 0
    _, manifest, (shard,), _ = prepared.open_set(str(tmp_path / "set"))
    assert manifest["tokenizer"]["split_special_tokens"] is split
    assert np.sum(shard[0] == 1) == (1 if split else 2)


def test_settings_of_another_use_change_no_ids(f, tmp_path):
    """A tokenizer.json may keep a BPE's dropout, and what to cut and to fill up."""
    model = json.loads((f / "one" / "tokenizer.json").read_bytes())
    model["model"]["dropout"] = 0.5
    model["truncation"] = dict(max_length=3, strategy="LongestFirst", stride=0, direction="Right")
    model["padding"] = {"strategy": {"Fixed": 500}, "direction": "Right", "pad_id": 0}
    model["padding"] |= {"pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "<s>"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(model))
    paths = f / "one", tmp_path
    plain, other = (tokenizers.load("huggingface", str(x), True, True) for x in paths)
    for _ in range(5):
        for ids, expected in zip(plain.encode(TEXTS), other.encode(TEXTS), strict=True):
            assert ids.tolist() == expected.tolist()
    ids, _ = plain.encode_with_offsets(TEXTS[20])
    assert other.encode_with_offsets(TEXTS[20])[0].tolist() == ids.tolist()


SETS = table("""
{f}/set_one,1;{f}/set_two,1 | {f}/set_one was | 400 ids | {f}/set_two with | 300 ids
{f}/set_bytes grain_eval_files={f}/set_two | {f}/set_bytes was | bytes of 258 | {f}/set_two with
{f}/set_* | {f}/set_bytes was | {f}/set_one with
{f}/set_one tokenizer_path={f}/two | tokenizer_path={f}/two | {f}/set_one | 400 ids
{f}/set_bytes tokenizer_path={f}/two | tokenizer_path={f}/two | {f}/set_bytes | bytes
{f}/set_one split_special_tokens=False | split_special_tokens=False | {f}/set_one | tokens=True
{f}/set_one tokenizer_type=sentencepiece | tokenizer_type=sentencepiece | {f}/set_one | huggingface
{f}/set_one tokenizer_path={f}/none.json | {f}/none.json | cannot be read
""")


@pytest.mark.parametrize("case", SETS, ids=lambda case: case[0])
def test_sets_of_another_tokenizer(case, f):
    words, *names = (cell.replace("{f}", str(f)) for cell in case)
    options = f"dataset_type=grain vocab_size=448 grain_train_files={words}".split()
    with refused(*names):
        open_sources(make_config(*options).data)


def test_sets_of_the_same_tokenizer(f):
    shutil.copytree(f / "set_one", f / "copy", dirs_exist_ok=True)
    keys = ("dataset_type=grain", "vocab_size=448", f"tokenizer_path={f}/one/tokenizer.json")
    opened = open_sources(make_config(*keys, f"grain_train_files={f}/set_one,1;{f}/copy,1").data)
    assert "not used" not in opened.description
    keys = ("dataset_type=grain", "vocab_size=448", f"grain_train_files={f}/megatron,1;{f}/copy,1")
    assert len(open_sources(make_config(*keys).data).train) == 2  # nobody knows of Megatron's


def test_what_is_not_used_is_said(f):
    """Of tokens there is nothing to tokenize: the line at the start of the run names the path."""
    path = f"tokenizer_path={f}/one"
    megatron = ("dataset_type=grain", f"grain_train_files={f}/megatron", "vocab_size=448")
    megatron += ("eval_interval=-1",)
    for keys in (("dataset_type=synthetic",), megatron):
        assert f"{path} is not used" in open_sources(make_config(*keys, path).data).description
        assert "not used" not in open_sources(make_config(*keys).data).description
    maxtexts = "tokenizer_path=assets/tokenizer.llama2"
    assert make_config("dataset_type=synthetic", maxtexts).data.tokenizer_type == "bytes"
