"""Tokenizers by the name of a model on Hugging Face, from a local cache and without a network."""

import json
import pathlib
import pickle
import time

import numpy as np
import pytest
from conftest import make_config, open_sources, refused
from small_models import write_folder
from test_formats import TEXTS, write_file
from test_prepare import content, documents

from maxramp import prepare as prepare_lib
from maxramp.data import hub, tokenizers
from maxramp.data.hub import HubSet
from maxramp.errors import ConfigError
from maxramp.handover.opening import open_model

constants = pytest.importorskip("huggingface_hub.constants")
pytest.importorskip("tokenizers")
pytestmark = pytest.mark.slow  # as all that needs more than the extra `test`

NAME, COMMIT = "an-org/Model-1.5", "0" * 40
COLUMN = "train_data_columns=[body]"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    """A cache with one model, as the hub's client lays it out; returns the model's folder in it."""
    model = tmp_path / "cache" / "models--an-org--Model-1.5"
    snapshot = model / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(COMMIT)
    (snapshot / "tokenizer.json").write_bytes(tokenizers.train_bpe(iter(TEXTS), 300))
    (snapshot / "tokenizer_config.json").write_text(json.dumps({"bos_token": "</s>"}))
    for name, value in (("HF_HUB_CACHE", str(tmp_path / "cache")), ("HF_HUB_OFFLINE", "1")):
        monkeypatch.setenv(name, value)  # of the processes of a preparation
        monkeypatch.setattr(constants, name, value)
    monkeypatch.chdir(tmp_path)
    hub.fetch.cache_clear()
    return snapshot


def test_a_name_is_its_files_in_the_cache(cache, tmp_path):
    """Encoded alike, with the marks named beside it, and copied into a set, which is whole."""
    source = write_file(tmp_path, "jsonl", TEXTS)
    by_path = tokenizers.load("huggingface", str(cache), True, True)
    by_name = tokenizers.load("huggingface", NAME, True, True)
    assert by_name.hash == by_path.hash
    np.testing.assert_array_equal(by_name.encode(TEXTS)[3], by_path.encode(TEXTS)[3])
    for name, path in (("name", NAME), ("path", str(cache))):
        options = [str(source), "--output", str(tmp_path / name), COLUMN, f"tokenizer_path={path}"]
        assert prepare_lib.main(options) == 0
    assert content(tmp_path / "name") == content(tmp_path / "path")
    keys = ["dataset_type=grain", f"tokenizer_path={NAME}", "vocab_size=320", COLUMN]
    items = open_sources(make_config(*keys, f"grain_train_files={source}").data).train[0].items
    assert items[3].tokens.tolist() == documents(tmp_path / "name")[3]
    set_keys = make_config(*keys, f"grain_train_files={tmp_path}/name").data
    assert "not used" not in open_sources(set_keys).description


def test_a_chat_template_beside_the_tokenizer_comes_with_its_name(cache, monkeypatch):
    """Also where nothing but the tokenizer was fetched so far; without a network, what is there."""
    named = tokenizers.load("huggingface", NAME, True, True)
    assert named.chat_template == ""

    def download(name, file, revision):  # of the commit that the tokenizer is of
        assert (name, file, revision) == (NAME, "chat_template.jinja", COMMIT)
        (cache / file).write_text("{{ messages }}")
        return str(cache / file)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    assert named.chat_template == "{{ messages }}"


@pytest.mark.parametrize(
    ("name", "file"),
    ((NAME, "tokenizer.model"), ("an-org/another", "tokenizer.json"), ("a/b", "tokenizer.json")),
)
def test_what_no_cache_holds_is_one_line(name, file, cache):
    kind = "sentencepiece" if file.endswith("model") else "huggingface"
    parts = ("no such file or folder here", "out of reach", f"hf download {name} {file}")
    with refused(f"tokenizer_path={name}: ", *parts, f"{file} of "):
        tokenizers.load(kind, name, True, True)
    for wrong in ("my/tok--v2", "my/tok..v2", f"my/{'x' * 100}"):
        with refused(f"tokenizer_path={wrong}: ", "no name of a model"):
            tokenizers.load("huggingface", wrong, True, True)


def test_a_model_by_its_name(cache):
    """Its keys and weights are those of the folder in the cache; another name is one line."""
    write_folder(cache, "qwen3", files=2)
    by_name, by_path = (open_model(path, []) for path in (NAME, str(cache)))
    assert by_name.config.model == by_path.config.model
    assert by_name.origin.tensors.keys() == by_path.origin.tensors.keys()
    assert by_name.tokenizer().tokenizer.hash == by_path.tokenizer().tokenizer.hash
    with pytest.raises(ConfigError, match="an-org/other: no such file or folder here") as caught:
        open_model("an-org/other", [])
    assert "\n" not in str(caught.value)


def test_marks_that_may_be_missing_are_not_guessed(cache):
    """The cache says of a file that the model has none, or does not know."""
    (cache / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="tokenizer_config.json of the model"):
        tokenizers.load("huggingface", NAME, True, True)
    known = cache.parent.parent / ".no_exist" / COMMIT
    known.mkdir(parents=True)
    (known / "tokenizer_config.json").touch()
    assert tokenizers.load("huggingface", NAME, True, True).encode([""])[0].tolist() == [0, 1]


def test_what_lies_here_is_no_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hub.is_name("an-org/model") and not hub.is_name("one/two/three")
    assert not any(map(hub.is_name, ("gs://bucket/a", "/etc/x", "~/model", "./a", "model", "a/")))
    assert not any(map(hub.is_name, ("assets/tokenizer.json", "assets/a.model")))
    (tmp_path / "an-org" / "model").mkdir(parents=True)
    assert not hub.is_name("an-org/model")


def test_a_hub_that_does_not_answer_is_asked_once(cache, monkeypatch):
    """The client alone tries for 24 s."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    hub._connect.cache_clear()
    start = time.monotonic()
    with pytest.raises(ConfigError, match="the hub is out of reach; fetch it where"):
        hub.fetch("tokenizer_path", "an-org/another", "tokenizer.json")
    assert time.monotonic() < start + 10 and constants.HF_HUB_OFFLINE


@pytest.fixture
def data_set(tmp_path, monkeypatch) -> list[str]:
    """A data set of two splits in a folder of its own, as the package datasets takes it."""
    library = pytest.importorskip("datasets")
    folder = tmp_path / "an-org" / "texts"
    folder.mkdir(parents=True)
    for split, texts in (("train", TEXTS), ("test", TEXTS[:9])):
        lines = (json.dumps({"body": text, "id": i}) + "\n" for i, text in enumerate(texts))
        (folder / f"{split}.jsonl").write_text("".join(lines))
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "tables")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "tables"))
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return ["hf_path=" + str(folder), COLUMN]


def test_a_data_set_by_name(data_set, tmp_path):
    """Trained on as it is, or prepared: the documents of the split, in order."""
    keys = ["dataset_type=hf", "vocab_size=264", *data_set]
    opened = open_sources(make_config(*keys, "hf_eval_split=test").data)
    items = opened.train[0].items
    assert (len(items), len(opened.held_out[0].items)) == (len(TEXTS), 9)
    expected = [[256, *text.encode(), 257] for text in TEXTS]
    assert [items[i].tokens.tolist() for i in range(len(items))] == expected
    options = [*data_set, "--output", str(tmp_path / "set")]
    assert prepare_lib.main(options) == 0
    assert documents(tmp_path / "set") == expected
    tenth = open_sources(make_config(*keys, "eval_fraction=0.1").data)
    assert len(tenth.held_out[0].items) == round(0.1 * len(TEXTS))


def test_a_split_may_be_a_part(monkeypatch):
    """Also in the processes of a preparation."""
    asked = []

    class Library:
        def load_dataset(self, *arguments, **more):
            asked.append((*arguments, more["split"]))
            raise OSError

    monkeypatch.setattr(hub, "_connect", lambda client: None)
    monkeypatch.setattr(hub, "optional", lambda *arguments: Library())
    part = HubSet("an-org/texts", "en:1", "train[:10%]+test", "body", False)
    for one in (part, pickle.loads(pickle.dumps(part))):
        with pytest.raises(ConfigError, match=r"hf_name=en:1 \(split train\[:10%\]\+test\)"):
            len(one)
    assert asked == [("an-org/texts", "en:1", "train[:10%]+test")] * 2


def test_no_such_data_set_is_one_line(data_set):
    for keys, message in (
        (["hf_path=an-org/nothing"], "neither the cache of datasets nor the hub gives it"),
        (["train_split=nothing"], "(split nothing)"),
        (["train_data_columns=[text]"], "has no text, but body, id"),
    ):
        with refused("hf_path=", message):
            open_sources(make_config("dataset_type=hf", "vocab_size=264", *data_set, *keys).data)
