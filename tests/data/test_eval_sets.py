"""Held-out sets with names: what each holds, what is measured on each."""

import json

import numpy as np
import pytest
from conftest import BASE, TINY, complete, make_config, open_sources
from preference_pairs import keys_of, pairs, write_pairs, write_tokenizer
from test_formats import write_megatron

from maxramp import train
from maxramp.data.corpus import Corpus
from maxramp.data.opening import open_rows
from maxramp.errors import ConfigError
from maxramp.run.metrics import evaluation_from_sums, numbers_of, read_records, tag_of
from maxramp.run.picture import make_run_figure

LETTERS = {"train": "abc", "wiki": "de", "code": "fgh"}


@pytest.fixture
def files(tmp_path):
    """JSON lines of a folder: documents of letters, other ones in each file."""
    for name, letters in LETTERS.items():
        lines = (json.dumps({"text": letter * 20}) + "\n" for letter in letters * 4)
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path


def keys(files, *arguments):
    return (f"grain_train_files={files}/train.jsonl", "dataset_type=grain", *arguments)


def sets_of(files, *names):
    sets = ", ".join(f"{name}: {files}/{name}.jsonl" for name in names)
    return f"eval_sets={{{sets}}}"


def test_each_set_has_its_rows_and_training_keeps_all(files):
    config = make_config(*keys(files, sets_of(files, "wiki", "code")))
    corpus = open_rows(config.data, True)
    counts = {
        part.name: {chr(c) for row in part.items for c in row.tokens if 0 <= c < 256}
        for part in (*corpus.train, *corpus.held_out)
    }
    train = counts.pop(f"{files}/train.jsonl")
    assert train == set("abc") and counts == {"code": set("fgh"), "wiki": set("de")}
    assert "12 documents to train on and 20 held out in code, wiki" in corpus.description
    told = json.loads(json.dumps(open_sources(config.data).summary))
    unread = {part.name: len(part.items) for part in Corpus.from_summary(told).held_out}
    assert unread == {"code": 12, "wiki": 8}
    other = make_config(*keys(files, sets_of(files, "code", "wiki")))  # in another order
    assert open_rows(other.data, True).hash == corpus.hash
    renamed = f"eval_sets={{code: {files}/wiki.jsonl, wiki: {files}/code.jsonl}}"
    renamed = make_config(*keys(files, renamed))
    assert open_rows(renamed.data, True).hash != corpus.hash


GRAIN = ("dataset_type=grain", "grain_train_files={}/train.jsonl")
DOCUMENTS = (*GRAIN, "eval_fraction=0.5", "max_target_length=32")
OWN = (*GRAIN, "grain_eval_files={}/wiki.jsonl", "max_target_length=32")
TEXT = ("dataset_type=text", "text_files={}/train.jsonl", "eval_fraction=0.5")
TEXT += ("max_target_length=16",)
SYNTHETIC = ("dataset_type=synthetic",)
STREAM = (*GRAIN, "grain_train_files={}/set", "max_target_length=8", "eval_fraction=0.5")

OWN_STREAM = (*STREAM, "grain_eval_files={}/set")
CHANGES = [
    (TEXT, ["eval_fraction=0.3", "max_target_length=17"], []),
    (SYNTHETIC, ["data_shuffle_seed=7"], []),
    (
        DOCUMENTS,
        ["eval_fraction=0.3", "max_target_length=33", "grain_packing_type=best_fit"]
        + ["separate_documents=False", "packing=False"],
        ["data_shuffle_seed=7"],
    ),
    (
        OWN,
        ["packing=False", "grain_eval_files={}/code.jsonl"],
        ["grain_train_files={}/code.jsonl", "eval_fraction=0.3"]
        + ["grain_train_files={0}/code.jsonl,1;{0}/train.jsonl,2"],
    ),
    (
        STREAM,
        ["eval_fraction=0.3", "max_target_length=9", "separate_documents=False"]
        + ["grain_train_files={}/train.jsonl"],
        ["packing=False"],
    ),
    (OWN_STREAM, ["separate_documents=False"], ["grain_train_files={}/other"]),
]


@pytest.mark.parametrize("options, others, same", CHANGES)
def test_evaluations_of_the_same_rows_compare(files, options, others, same):
    """Their hash is that of the held-out rows alone, as they are laid out."""
    for name, token in (("set", 1), ("other", 2)):
        write_megatron(files / name, [[[token] * 5]] * 30)

    def find(*more):
        filled = (x.format(files) for x in more)
        config = make_config("enable_data_shuffling=True", *filled)
        corpus = open_rows(config.data, True)
        return train._evaluations(config, corpus)["eval"]

    rows = find(*options)
    assert [find(*options, key) for key in same] == [rows] * len(same)
    assert all(find(*options, key) != rows for key in others)


def test_a_set_in_which_nothing_is_predicted_is_named(files):
    (files / "code.jsonl").write_text('{"text": "y"}\n')
    config = make_config(
        *keys(files, sets_of(files, "wiki", "code"), "add_bos=False", "add_eos=False")
    )
    with pytest.raises(ConfigError, match=r"eval_sets.code=.*code.jsonl holds out 1 document, "):
        open_rows(config.data, True)


def test_numbers_of_sets():
    """Each has its own; without a name they are of all tokens, and of no mean of means."""
    sums = {"code": [(6.0, 2.0), (2.0, 2.0)], "wiki": [(9.0, 12.0)]}
    dispatched = evaluation_from_sums(sums, by_batch=True)
    record = dispatched.to_record(dispatched.numbers, 0.0, 1.0)
    assert (record["eval_loss_code"], record["eval_tokens_code"]) == (2.0, 4)
    assert (record["eval_loss_wiki"], record["eval_tokens_wiki"]) == (0.75, 12)
    assert (record["eval_loss"], record["eval_tokens"]) == (17 / 16, 16)
    assert record["eval_batch_loss_code"] == [6.0, 2.0]
    assert record["eval_batch_tokens_wiki"] == [12.0]
    assert record["eval_batch_loss"] == [6.0, 2.0, 9.0]
    tags = {name: tag_of(name).partition("/")[0] for name in numbers_of(record)}
    token_keys = {"eval_tokens", "eval_tokens_code", "eval_tokens_wiki"}
    assert {name for name, group in tags.items() if group == "batch"} == token_keys
    assert tag_of("eval_loss_x_seconds") == "learning/eval_loss_x_seconds"
    step = {"step": 0, "loss": 1.0, "consumed_samples": 8, "global_batch_size": 8}
    figure = make_run_figure([step, {"step": 0, "consumed_samples": 8, **record}], "run")
    drawn = [text.get_text() for text in figure.legends[0].get_texts()]
    assert drawn == ["loss", "loss on held-out text", "code", "wiki"]


def evaluated(folder, name, *arguments):
    """The evaluation of a run of one step, and what the run said."""
    options = [f"base_output_directory={folder}", f"run_name={name}", "steps=1", "eval_samples=-1"]
    done = complete(BASE, *arguments, *options, "eval_interval=1", "enable_rampup_batch_size=False")
    (record,) = [r for r in read_records(folder / name / "metrics.jsonl") if "eval_loss" in r]
    return record, done.stdout


@pytest.mark.slow
def test_a_set_is_measured_as_where_it_is_the_only_one(files, cache_dir):
    line = (*TINY, *keys(files, "per_device_batch_size=8", f"jax_cache_dir={cache_dir}"))
    both, output = evaluated(files, "both", *line, sets_of(files, "wiki", "code"))
    alone, _ = evaluated(files, "alone", *line, f"grain_eval_files={files}/wiki.jsonl")
    assert alone["eval_loss"] == both["eval_loss_wiki"]
    assert alone["eval_tokens"] == both["eval_tokens_wiki"]
    weights = np.array([both["eval_tokens_wiki"], both["eval_tokens_code"]])
    mean = np.average([both["eval_loss_wiki"], both["eval_loss_code"]], weights=weights)
    assert both["eval_tokens"] == weights.sum()
    np.testing.assert_allclose(both["eval_loss"], mean, rtol=1e-6)
    assert f"(code {both['eval_loss_code']:.4f}, wiki {both['eval_loss_wiki']:.4f})" in output


@pytest.mark.slow
def test_of_pairs_and_of_chats(tmp_path, cache_dir):
    """A set of pairs has TRL's numbers, and one of chats those of tokens."""
    write_tokenizer(tmp_path)
    for name, part in (("train", pairs(8)), ("short", pairs(3)), ("long", pairs(9)[3:])):
        write_pairs(tmp_path / f"{name}.jsonl", part)
        chats = [{"messages": record["chosen"]} for record in part]
        write_pairs(tmp_path / f"{name}_chats.jsonl", chats)
    sets = sets_of(tmp_path, "short", "long")
    sizes = (*TINY, "vocab_size=320", "max_target_length=95", f"jax_cache_dir={cache_dir}")
    complete(
        *(BASE, *sizes, f"base_output_directory={tmp_path}", "run_name=base", "steps=1"),
        *("dataset_type=synthetic", "enable_rampup_batch_size=False", "eval_interval=-1"),
    )
    line = [*sizes, *keys_of(tmp_path, tmp_path / "train.jsonl"), "log_eval_batches=True"]
    line += [f"load_parameters_path={tmp_path}/base", "per_device_batch_size=4", "num_epoch=4"]
    mixed, output = evaluated(tmp_path, "pairs", *line, sets)
    assert (mixed["eval_pairs_short"], mixed["eval_pairs_long"], mixed["eval_pairs"]) == (3, 6, 9)
    margins = [mixed[f"eval_rewards/margins_{name}"] for name in ("short", "long")]
    mean = np.average(margins, weights=[3, 6])
    np.testing.assert_allclose(mixed["eval_rewards/margins"], mean, rtol=1e-6)
    assert sum(mixed["eval_batch_loss_short"]) == pytest.approx(3 * mixed["eval_loss_short"])
    assert "on held-out pairs" in output and "log-probabilities of 17 pairs" in output

    chats = [key for key in line if not key.startswith(("use_dpo", "packing", "grain_train"))]
    chats += [f"grain_train_files={tmp_path}/train_chats.jsonl", "grain_packing_type=best_fit"]
    mixed, _ = evaluated(
        tmp_path, "chats", *chats, "use_sft=True", sets.replace(".jsonl", "_chats.jsonl")
    )
    answers = [json.loads(x) for x in (tmp_path / "short_chats.jsonl").read_text().splitlines()]
    targets = sum(len(chat["messages"][1]["content"]) + 1 for chat in answers)  # bytes, end mark
    assert mixed["eval_tokens_short"] == targets
    assert mixed["eval_tokens"] == mixed["eval_tokens_short"] + mixed["eval_tokens_long"]
