"""use_sft and use_dpo: records to messages, text, targets and rows of chats and of pairs."""

import json
import pickle

import numpy as np
import pytest
from conftest import make_config, open_sources, refused
from preference_pairs import keys_of, pairs, write_pairs, write_tokenizer
from test_prepared_chats import chats

from maxramp import prepare
from maxramp.data import tokenizers
from maxramp.data.batch import count_targets, stack
from maxramp.data.chats import messages
from maxramp.data.chats.chats import open_template
from maxramp.data.opening import open_rows
from maxramp.errors import ConfigError

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

CHATML = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
# As Mistral's: nothing asks for an answer, whose end mark begins nothing.
INST = """{% for m in messages %}{% if m.role == "user" %}<s>[INST] {{ m.content }} [/INST]
{%- else %} {{ m.content }}</s>{% endif %}{% endfor %}"""
# As Qwen3's: answers before the last have lost their thoughts.
THINKS = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if loop.last and m.role == "assistant" %}<think>
{{ m.thinking }}
</think>
{% endif %}{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined %}<think>
{% endif %}{% endif %}"""
BLOCKS = """{% for m in messages %}{{ m.role }}: {% if m.role == "assistant" %}
{% generation %}{{ m.content | trim }}.{% endgeneration %}{% else %}{{ m.content }}{% endif %}
{% endfor %}"""
# As gpt-oss's: the last turn ends with another mark, and has its thought in a turn before it.
SEVERAL = """{% for m in messages %}{% set answers = m.role == "assistant" %}
{%- set ends = loop.last and answers and not add_generation_prompt %}
{% if ends and m.thinking %}<|im_start|>assistant *{{ m.thinking }}</s>{% endif %}
<|im_start|>{{ m.role }} {{ m.content }}{{ "<|im_end|>" if ends else "</s>" }}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant {% endif %}"""
# As Qwen's: it looks at the first message, and this one refuses chats without tools.
LOOKS = "{% if messages[0].role == 'system' or not tools %}{{ raise_exception('no') }}{% endif %}"
# As Phi's: a mark behind the last turn, unless an answer is asked for.
ENDS = CHATML.replace("{% endif %}", "{% else %}</s>{% endif %}")
# All that a template is given.
SHOWS = "{{ messages | tojson(sort_keys=true) }}{{ tools | tojson(sort_keys=true) }}"
# Shows the last two messages only; no header tells its answers from questions.
DROPS = "{% set messages = messages[-2:] %}"
# No mark ends its turns; one ends the chat.
OPEN = """{% for m in messages %}<|im_start|>{{ m.role if m.role == "user" }} {{ m.content }}
{%- endfor %}{{ "<|im_start|>" if add_generation_prompt else "</s>" }}"""
TURNS = [
    {"role": "user", "content": "Who?"},
    {"role": "assistant", "content": "assistant\nI", "thinking": "a"},
    {"role": "user", "content": "assistant"},
    {"role": "assistant", "content": "Yes.", "thinking": "b"},
]


@pytest.fixture
def folder(tmp_path):
    """A tokenizer with marks for turns."""
    write_tokenizer(tmp_path)
    settings = {"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    return tmp_path


def data_keys(folder, *arguments):
    return make_config(
        *("use_sft=True", "dataset_type=grain", f"tokenizer_path={folder}", "vocab_size=320"),
        *("grain_packing_type=best_fit", "eval_interval=-1", "max_target_length=64"),
        *("enable_rampup_batch_size=False", f"grain_train_files={folder}/chats.jsonl"),
        *("eval_fraction=0", *arguments),
    )


def chats_of(folder, records, *arguments, template=""):
    """The chats of a file of these records."""
    write_pairs(folder / "chats.jsonl", records)
    if template:
        (folder / "template.jinja").write_text(template)
        arguments += (f"chat_template={folder}/template.jinja",)
    (part,) = open_sources(data_keys(folder, *arguments).data).train
    return part.items


def decoder(folder):
    return tokenizers.load("huggingface", str(folder), False, False).decode


def trained(folder, record, *arguments, template=""):
    """The parts of a chat's text that are trained on."""
    items = chats_of(folder, [record], "max_target_length=999", *arguments, template=template)
    tokens, is_target, left_out, _ = items[0]
    ends = [] if left_out else np.flatnonzero(np.diff(is_target, prepend=0, append=0))
    return [decoder(folder)(tokens[a:b]) for a, b in ends.reshape(-1, 2)] if len(ends) else []


@pytest.mark.parametrize(
    "template, expected",
    [
        (CHATML, ["assistant\nI<|im_end|>", "Yes.<|im_end|>"]),
        (INST, [" assistant\nI</s>", " Yes.</s>"]),
        (THINKS, ["assistant\nI<|im_end|>", "<think>\nb\n</think>\nYes.<|im_end|>"]),
        (BLOCKS, ["assistant\nI.", "Yes.."]),
        (SEVERAL, ["assistant\nI</s>", "*b</s><|im_start|>assistant Yes.<|im_end|>"]),
    ],
)
def test_answers_are_the_targets(folder, template, expected):
    assert trained(folder, {"messages": TURNS}, template=template) == expected


def test_what_else_is_trained_on(folder):
    """The last answer, what a message's own key says, everything, what follows a header."""
    record = {"messages": TURNS}
    assert trained(folder, record, "sft_train_on_last_answer_only=True") == ["Yes.<|im_end|>"]
    (whole,) = trained(folder, record, "sft_train_on_completion_only=False")
    assert whole.startswith("<|im_start|>user\nWho?<|im_end|>\n") and whole.endswith("<|im_end|>\n")
    for key, value in (("train", False), ("weight", 0)):
        one = [TURNS[0], TURNS[1] | {key: value}, *TURNS[2:]]
        assert trained(folder, {"messages": one}) == ["Yes.<|im_end|>"]
    switches = ("chat_template_switches=[enable_thinking=true]",)
    targets = trained(folder, record, *switches, template=THINKS)
    assert targets == ["assistant\nI<|im_end|>", "b\n</think>\nYes.<|im_end|>"]


def test_a_template_sees_only_what_a_chat_has(folder):
    """Other messages or tools are not asked for; chats may begin with an answer, and have none."""
    chats = [{"messages": turns, "tools": [1]} for turns in (TURNS[1:], TURNS[1:2], TURNS[:1])]
    both = ["assistant\nI<|im_end|>", "Yes.<|im_end|>"]
    for chat, expected in zip(chats, (both, both[:1], []), strict=True):
        assert trained(folder, chat, template=f"{LOOKS}{ENDS}") == expected
    assert trained(folder, {"messages": TURNS}, template=ENDS) == both


def test_forms_of_records():
    turns = [("system", "Be."), ("user", "Who?"), ("assistant", "I")]
    expected = [{"role": role, "content": content} for role, content in turns]
    talk = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "I"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "Who?"}]}]
    for record in (
        {"messages": expected},
        {"messages": [message | {"name": None} for message in expected], "tools": None},
        {"conversations": talk, "system": "Be."},
        {"prompt": expected[:2], "completion": expected[2:]},
        {"system": "Be.", "prompt": "Who?", "completion": "I"},
        {"prompt": [expected[0], *parts], "completion": "I"},
        {"system": "Be.", "instruction": "Who?", "input": "", "output": "I"},
    ):
        assert messages.read(record).messages == expected
    pair = {"system": "Be.", "prompt": "Who?", "chosen": "I", "rejected": "You"}
    assert messages.read_pair(pair)[0].messages == expected
    assert messages.read({"prompt": "a", "completion": "b"}).trained == [True]
    call = {"function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    chat = messages.read({"messages": [asked], "tools": '[{"name": "add"}]'})
    assert chat.tools == [{"name": "add"}]
    assert chat.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert "content" not in chat.messages[0]


GOOD = {"prompt": "Who?", "completion": "I"}


def bad(record, *parts, good=(), template="", keys=()):
    """A record, behind good ones, with the keys of its run and what its line must name."""
    return [*good, record], keys, template, parts


def turn(**changes):
    """A chat of one answer."""
    return {"messages": [TURNS[1] | changes]}


def told(*roles, content="x"):
    """A chat of these roles."""
    return {"messages": [{"role": role, "content": content} for role in roles]}


PARTS = [{"type": "text", "text": None}]
ONE_SYSTEM = "{{ raise_exception('only one system message') }}"
BYTES = ("tokenizer_type=bytes", "tokenizer_path=")


@pytest.mark.parametrize(
    "records, keys, template, parts",
    [
        bad({"text": "x"}, "line 2", "is not a chat: it has text", "use_sft=false", good=[GOOD]),
        bad({"messages": "x"}, "line 1", "is not a list of messages"),
        bad({"messages": [{"role": "user"}]}, "role user has no content"),
        bad({"conversations": [{"from": "bot", "value": "x"}]}, 'from "bot"'),
        bad(GOOD | {"prompt": "\ud83d"}, "line 1: ", "'\\ud83d', which is not a char"),
        bad(GOOD | {"prompt": "\ufdd1"}, "'\\ufdd1', which is not a char", template=BLOCKS),
        bad({"instruction": "x", "input": float("nan"), "output": "y"}, "input is not text"),
        bad(turn(train="false"), "train is str 'false'"),
        bad(turn(weight=0.5), "weight is float '0.5'"),
        bad(told("human", "gpt"), "line 1", "of the role assistant", "some of human, gpt"),
        bad(turn(tool_calls=5), "not a list of calls but int"),
        bad(turn(tool_calls=[{"function": "f"}]), "str 'f'"),
        bad(told("user", content=PARTS), "content is not text but list"),
        bad([GOOD], "line 1: is not a JSON object but list", "JSON lines have an object"),
        bad({"messages": TURNS}, "shows 0 of its 2 ", "{% generation %}", template=DROPS + CHATML),
        bad({"messages": TURNS}, "shows 0 of its 2 ", template=OPEN),
        bad(GOOD, "line 1", "only one system message", template=ONE_SYSTEM),
        bad(GOOD, "chat template is not valid", template="{% if %}"),
        bad(GOOD | {"completion": "a</s>b"}, "line 1", "holds </s>", "=leave_out"),
        bad(GOOD, "use_sft=True", "no tokens for turns", keys=BYTES),
        bad(GOOD, "packs chats whole", keys=("grain_packing_type=concat_then_split",)),
        bad(GOOD, "must be a day", keys=("chat_template_date=2026-02-30",)),
        bad(GOOD, "must be names with values", keys=("chat_template_switches=[thinking]",)),
        bad(GOOD, "a={]: a value is not valid", keys=('chat_template_switches=["a={"]',)),
        bad(GOOD, "nowhere", "No such file", keys=("chat_template=nowhere",)),
    ],
)
def test_what_is_wrong_is_one_line(folder, records, keys, template, parts):
    with refused(*parts):
        chats_of(folder, records, *keys, template=template)


def test_in_another_process(folder):
    items = chats_of(folder, [{"messages": TURNS}], template=THINKS)
    copies = pickle.loads(pickle.dumps(items))
    assert copies[0].tokens.tolist() == items[0].tokens.tolist()


def test_inspection(folder, capsys):
    """What is learnt stands in brackets; of control characters their escapes."""
    turns = [{"role": "user", "content": "Who?\r\n\x1b[2J"}, *TURNS[1:]]
    (folder / "chats.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    own = ("use_sft=true", f"tokenizer_path={folder}/tokenizer.json", f"data_cache_dir={folder}/x")
    assert prepare.main(["--inspect", str(folder / "chats.jsonl"), *own]) == 0
    shown = capsys.readouterr().out
    assert "<|im_start|>assistant\n⟦assistant\nI<|im_end|>⟧\n<|im_start|>user" in shown
    assert "holds      1 chats" in shown and "targets" in shown
    assert "Who?\\r\n\\x1b[2J<|im_end|>" in shown


def test_without_a_template(folder):
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="has no chat template; give chat_template=FILE"):
        chats_of(folder, [GOOD])
    with pytest.raises(ConfigError, match="tokenizer_type=bytes has no tokens for turns"):
        open_template(tokenizers.load("bytes", "", True, True), None)


def test_rows_hold_whole_chats(folder):
    """Each in one row, apart; what is left out is counted, and targets are those of the chats."""
    records = chats()
    items = chats_of(folder, records, "chats_with_marks=leave_out")
    keys = data_keys(folder, "chats_with_marks=leave_out")
    corpus = open_rows(keys.data, True)
    reasons = ("1 longer than a row", "1 with special tokens", "1 without an answer")
    assert all(words in corpus.description for words in (*reasons, "are targets"))
    (part,) = corpus.train
    decoded = []
    for i in range(len(part.items)):
        tokens, begins, is_target, *_ = part.items[i]
        ends = [*begins[1:], np.flatnonzero(tokens >= 0)[-1] + 1]
        for a, b in zip(begins, ends, strict=True):
            decoded.append((tokens[a:b].tolist(), is_target[a:b].tolist()))
    kept = [items[i] for i in range(len(records)) if not items[i].left_out]
    expected = [(chat.tokens.tolist(), chat.is_target.tolist()) for chat in kept]
    assert sorted(decoded) == sorted(expected) and len(kept) == 57
    targets = sum(sum(is_target[1:]) for _, is_target in decoded)
    assert count_targets(part.items, targets) == targets > 2 * count_targets(part.items, 1)
    cut = chats_of(folder, records, "chats_with_marks=leave_out", "long_chats=cut")
    assert len(cut[7].tokens) == 65 and cut[7].is_target.any()
    with pytest.raises(ConfigError, match="nothing to predict: 1 without an answer"):
        chats_of(folder, records[9:10])
        open_rows(keys.data, True)
    # Of what is held out, the end of the files, too.
    with pytest.raises(ConfigError, match="=0.4 holds out 2 chats, .* 2 without an answer to"):
        chats_of(folder, [*records[:3], *records[9:10] * 2])
        open_rows(data_keys(folder, "eval_interval=1", "eval_fraction=0.4").data, True)


def test_what_changes_the_text_changes_the_hash(folder):
    hashes = set()
    for line in (
        *(("", ()), (CHATML + " ", ()), ("", ("chat_template_date=2026-02-01",))),
        *(("", ("chat_template_switches=[a=1]",)), ("", ("sft_train_on_completion_only=False",))),
    ):
        chats_of(folder, [GOOD], *line[1], template=line[0])
        extra = (f"chat_template={folder}/template.jinja",) if line[0] else ()
        hashes.add(open_sources(data_keys(folder, *line[1], *extra).data).train[0].hash)
    assert len(hashes) == 5


def test_json_that_is_no_lines(folder):
    """A file that is one array, or one object over several lines."""
    for value in ([GOOD, GOOD], GOOD):
        (folder / "chats.jsonl").write_text(json.dumps(value, indent=1))
        with pytest.raises(ConfigError, match="line 1: is not JSON .*; JSON lines have an object"):
            open_sources(data_keys(folder).data)


def test_parquet(folder):
    """Columns of structs, which lack what other messages have; maps are objects."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    calls = [[{"function": {"name": name, "arguments": {name: {"x": "y"}}}}] for name in ("a", "b")]
    called = [
        {"messages": [*TURNS[:3], {"role": "assistant", "content": None, "tool_calls": call}]}
        | {"tools": [{"name": call[0]["function"]["name"], "parameters": {name: {"type": "int"}}}]}
        for call, name in zip(calls, "ab", strict=True)
    ]
    records = [*called, {"messages": TURNS}, {"messages": TURNS[2:]}, {"messages": TURNS[:2]}]
    everything = SHOWS + CHATML
    lines = chats_of(folder, records, "max_target_length=999", template=everything)
    table = arrow.Table.from_pylist(records)
    text, objects = arrow.string(), arrow.map_(arrow.string(), arrow.string())
    arguments = arrow.struct([("a", objects), ("b", objects)])
    call = arrow.struct([("function", arrow.struct([("name", text), ("arguments", arguments)]))])
    columns = [(name, text) for name in ("role", "content", "thinking")]
    message = arrow.struct([*columns, ("tool_calls", arrow.list_(call))])
    maps = arrow.array([record["messages"] for record in records], arrow.list_(message))
    for variant in (table, table.set_column(0, "messages", maps)):
        parquet.write_table(variant, folder / "chats.parquet")
        keys = data_keys(
            *(folder, f"grain_train_files={folder}/chats.parquet", "max_target_length=999"),
            f"chat_template={folder}/template.jinja",
        )
        (part,) = open_sources(keys.data).train
        for i in range(len(records)):
            np.testing.assert_array_equal(part.items[i].tokens, lines[i].tokens)
            np.testing.assert_array_equal(part.items[i].is_target, lines[i].is_target)


def test_a_mark_in_a_map_of_parquet(folder):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    objects = arrow.map_(arrow.string(), arrow.string())
    columns = [(name, arrow.string()) for name in ("role", "content")]
    messages_of = arrow.list_(arrow.struct([*columns, ("tool_calls", arrow.list_(objects))]))
    turns = [TURNS[0], {"role": "assistant", "content": "x", "tool_calls": [{"a": "</s>"}]}]
    column = arrow.array([turns], messages_of)
    parquet.write_table(arrow.table({"messages": column}), folder / "chats.parquet")
    with pytest.raises(ConfigError, match="record 0: a message holds </s>"):
        open_sources(data_keys(folder, f"grain_train_files={folder}/chats.parquet").data)


pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")

ASKED = [{"role": "system", "content": "Be."}, {"role": "user", "content": "2+2?"}]
TALK = zip(("system", "human", "gpt"), ("Be.", "2+2?", "4"), strict=True)
TALK = [{"from": name, "value": value} for name, value in TALK]
RIGHT, BAD = ({"role": "assistant", "content": content} for content in ("4", "five"))


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
        {"chosen": [*ASKED, RIGHT], "rejected": [*ASKED, BAD]},
        {"prompt": ASKED, "chosen": [RIGHT], "rejected": [BAD]},
        {"prompt": ASKED, "chosen": "4", "rejected": "five"},
        {"prompt": "2+2?", "chosen": [*ASKED, RIGHT], "rejected": [*ASKED, BAD], "score": 3},
        {"chosen": TALK, "rejected": [*ASKED, BAD]},
    ],
)
def test_forms(record):
    chosen, rejected = messages.read_pair(json.loads(json.dumps(record)))
    assert chosen.messages == [*ASKED, RIGHT] and rejected.messages == [*ASKED, BAD]


@pytest.mark.parametrize(
    "record, line",
    [
        ({"messages": [*ASKED, RIGHT]}, "is not a pair: it has messages"),
        ({"chosen": "4", "rejected": "five"}, "chosen answers nothing; give the prompt"),
        (
            {"chosen": [*ASKED, RIGHT], "rejected": ASKED},
            "rejected ends with a message of the role",
        ),
        ({"chosen": [*ASKED, RIGHT], "rejected": [ASKED[1], BAD]}, "differ before their last"),
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
    long = [{"role": "user", "content": "x" * 99}, RIGHT]
    records = [*pairs(3), {"chosen": [*turns, RIGHT], "rejected": [*turns, BAD]}]
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
