"""use_dpo: records to pairs, pairs to rows."""

import json

import numpy as np
import pytest
from conftest import make_config
from preference_pairs import keys_of, pairs, write_pairs, write_tokenizer

from maxramp.data import tokenizers
from maxramp.data.batch import stack
from maxramp.data.chats import messages
from maxramp.data.opening import open_rows
from maxramp.errors import ConfigError

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

ASKED = [{"role": "system", "content": "Be."}, {"role": "user", "content": "2+2?"}]
TALK = zip(("system", "human", "gpt"), ("Be.", "2+2?", "4"), strict=True)
TALK = [{"from": name, "value": value} for name, value in TALK]
GOOD, BAD = ({"role": "assistant", "content": content} for content in ("4", "five"))


def opened(folder, records, *arguments):
    """The corpus of a file of these records, and the keys it was opened with."""
    write_tokenizer(folder)
    keys = keys_of(folder, write_pairs(folder / "pairs.jsonl", records))
    keys = [key for key in keys if not key.startswith("load_parameters_path")]
    config = make_config(*keys, "vocab_size=320", *arguments)
    return open_rows(config.data, True), config


@pytest.mark.parametrize(
    "record",
    [
        {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]},
        {"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]},
        {"prompt": ASKED, "chosen": "4", "rejected": "five"},
        {"prompt": "2+2?", "chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD], "score": 3},
        {"chosen": TALK, "rejected": [*ASKED, BAD]},
    ],
)
def test_forms(record):
    chosen, rejected = messages.read_pair(json.loads(json.dumps(record)))
    assert chosen.messages == [*ASKED, GOOD] and rejected.messages == [*ASKED, BAD]


@pytest.mark.parametrize(
    "record, line",
    [
        ({"messages": [*ASKED, GOOD]}, "is not a pair: it has messages"),
        ({"chosen": "4", "rejected": "five"}, "chosen answers nothing; give the prompt"),
        ({"chosen": [*ASKED, GOOD], "rejected": ASKED}, "rejected ends with a message of the role"),
        ({"chosen": [*ASKED, GOOD], "rejected": [ASKED[1], BAD]}, "differ before their last"),
    ],
)
def test_what_is_no_pair(tmp_path, record, line):
    with pytest.raises(ConfigError, match=r"pairs.jsonl.*line 7.*" + line):
        opened(tmp_path, [*pairs(6), record])


def test_the_hash_is_of_every_pair_in_its_place(tmp_path):
    """What a run says of a row, by its number, belongs to it alone."""
    records = pairs(200)
    swapped = [*records[:33], records[34], records[33], *records[35:]]
    turned = [*records]
    turned[33] = {"chosen": records[33]["rejected"], "rejected": records[33]["chosen"]}
    hashes = [opened(tmp_path, x)[0].hash for x in (records, records, swapped, turned)]
    assert hashes[0] == hashes[1] and len({*hashes}) == 3
    both = [opened(tmp_path, records, "eval_fraction=0.1", f"eval_interval={n}") for n in (-1, 8)]
    assert both[0][0].hash == both[1][0].hash


def test_a_row_is_a_pair(tmp_path):
    """Both chats whole, apart, the last answers alone their targets; a longer pair is counted."""
    turns = [ASKED[1], BAD, {"role": "user", "content": "No."}]
    long = [{"role": "user", "content": "x" * 99}, GOOD]
    records = [*pairs(3), {"chosen": [*turns, GOOD], "rejected": [*turns, BAD]}]
    records += [{"chosen": long, "rejected": [long[0], BAD]}]
    corpus, config = opened(tmp_path, records, "max_target_length=127")
    assert "left out: 1 longer than a row" in corpus.description and corpus.packed
    (part,) = corpus.train
    batch = stack([part.items[i] for i in range(4)], config.data.fields(127))
    assert len(part.items) == 4 and batch.reference_log_probs.shape == (4, 2)
    decode = tokenizers.load("huggingface", str(tmp_path), False, False).decode
    for row, record in enumerate(records[:4]):
        for segment, name in enumerate(("chosen", "rejected")):
            is_counted = (batch.segments[row] == segment) & (batch.targets[row] >= 0)
            answer = record[name][-1]["content"]
            assert decode(batch.targets[row][is_counted]) == f"{answer}<|im_end|>"
            whole = batch.tokens[row][(batch.segments[row] == segment) & (batch.tokens[row] >= 0)]
            text = decode(whole)
            assert text.startswith("<|im_start|>user\n") and answer in text
            assert text.count("<|im_start|>") == len(record[name])


def test_hashes_are_of_the_tokens(tmp_path):
    """Not of the reference, which a restart may know only later."""
    corpus, config = opened(tmp_path, pairs(4))
    rows = [corpus.train[0].items[i] for i in range(4)]
    fields = config.data.fields(config.model.max_target_length)
    known = [row._replace(reference_log_probs=np.full(2, 1.5, np.float32)) for row in rows]
    before, after = stack(rows, fields), stack(known, fields)
    np.testing.assert_array_equal(before.hashes, after.hashes)
    assert (after.reference_log_probs == 1.5).all() and not before.reference_log_probs.any()
