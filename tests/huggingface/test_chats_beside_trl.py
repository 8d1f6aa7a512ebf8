"""Chats beside TRL's training templates and those of transformers."""

import datetime
import importlib.util
import itertools
import json
import pathlib
import re

import pytest
from conftest import ROOT
from later import Later
from preference_pairs import write_tokenizer

from maxramp.data import tokenizers as tokenizers_of_ours
from maxramp.data.chats import messages
from maxramp.data.chats.template import ChatTemplate

transformers = Later("transformers")
trl = Later("trl")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.slow

TEMPLATES = pathlib.Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"
_CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def turns(*texts):
    """Messages of a user and the assistant in turn."""
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for text, role in zip(texts, roles, strict=False)]


_SYSTEM, _RESULT = {"role": "system", "content": "Be."}, {"role": "tool", "content": "2"}
_TOOL_CALL = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
CHATS = {
    "turns": turns("Hi", "Hello", "assistant", "ok\nassistant\nno"),
    "system": [_SYSTEM, *turns("Hi", "Hello")],
    "tools": [*turns("Hi"), _TOOL_CALL, _RESULT, turns("", "It is 2")[1]],
}
_CHATML = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]
_LLAMA = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
_LLAMA += ["<|eom_id|>", "<|python_tag|>"]
_GEMMA = ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"]
_DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
MARKS = {
    "llama3": (_LLAMA, {"bos_token": "<|begin_of_text|>"}),
    "qwen2_5": (_CHATML, {}),
    "qwen3": (_CHATML, {}),
    "qwen3_instruct_2507": (_CHATML, {}),
    "gemma3": (_GEMMA, {"bos_token": "<bos>"}),
    "deepseekv3": (_DEEPSEEK, {"bos_token": _DEEPSEEK[0]}),
}


@pytest.mark.parametrize("name", MARKS)
@pytest.mark.parametrize("kind", CHATS)
def test_answers_are_those_of_the_training_template(name, kind):
    """In a model's own template; but for line ends and headers that TRL's hold for answers."""
    today, results = datetime.date(2026, 1, 1), []
    for file in (f"{name}.jinja", f"{name}_training.jinja"):
        source = (TEMPLATES / file).read_text()
        template = ChatTemplate(source, *MARKS[name], today, {})
        chat = messages.read({"messages": json.loads(json.dumps(CHATS[kind]))})
        try:
            text, spans = template.answers(chat)
        except messages.BadRecord:
            # An answer to a tool has another header there, and Gemma 3 knows none.
            assert kind == "tools" and name in ("deepseekv3", "gemma3")
            return
        results.append((text, [text[a:b] for a, b in spans]))
    (text, ours), (other, theirs) = results
    assert len(ours) == len(theirs) == sum(m["role"] == "assistant" for m in CHATS[kind])
    if text != other:  # Qwen3's for training keep what its own leaves out
        assert name == "qwen3"
        ours = [part.rpartition("</think>\n\n")[2] for part in ours]
        theirs = [part.rpartition("</think>\n\n")[2] for part in theirs]
    for own, other in zip(ours, theirs, strict=True):
        assert other.rstrip("\n").endswith(own) and own
        assert len(other) - len(own) <= len("<｜Assistant｜>")


THOUGHTS = [
    *(_SYSTEM, *turns("Hi", "<think>\nWho?\n</think>\n\nHello", "Add")),
    {"role": "assistant", "content": "So", "reasoning_content": "two", "tool_calls": [_CALL] * 2},
    *(_RESULT, _RESULT | {"content": "3"}),
    {"role": "assistant", "content": "It is 2", "reasoning_content": "Done"},
]


@pytest.mark.parametrize("tools", [None, [_CALL]])
@pytest.mark.parametrize("kind", [*CHATS, "thoughts", "no system"])
def test_the_training_template_of_qwen3_is_that_of_trl(kind, tools):
    """The text and the answers of TRL's; without earlier thoughts the text of Qwen3's own."""
    chats = CHATS | {"thoughts": THOUGHTS, "no system": THOUGHTS[1:]}
    files = (TEMPLATES / "qwen3.jinja", TEMPLATES / "qwen3_training.jinja")
    sources = [*files, ROOT / "configs/chat_templates/qwen3.jinja"]
    own, theirs, ours = (
        ChatTemplate(path.read_text(), *MARKS["qwen3"], datetime.date(2026, 1, 1), {})
        for path in sources
    )

    def chat():
        return messages.read({"messages": json.loads(json.dumps(chats[kind])), "tools": tools})

    text, spans = ours.answers(chat())
    expected, their_spans = theirs.answers(chat())
    assert text == expected
    assert [text[a:b] + "\n" for a, b in spans] == [expected[a:b] for a, b in their_spans]
    assert ours.render(chat(), ask=True) == theirs.render(chat(), ask=True)
    # Its own keeps what was thought since the last question.
    asked = max(i for i, m in enumerate(chats[kind]) if m["role"] == "user")
    count = sum(m["role"] == "assistant" for m in chats[kind][:asked])
    kept = own.render(chat())
    if kind != "tools":  # where one of several answers without a thought has no empty one
        for _ in range(count):
            text = re.sub(r"<think>\n.*?\n</think>\n\n", "", text, count=1, flags=re.S)
        assert text == kept


def test_text_is_that_of_transformers(tmp_path):
    """With tools, switches and a date, by the same template."""
    source = (TEMPLATES / "qwen3.jinja").read_text() + "{{ strftime_now('%Y') }}"
    template = ChatTemplate(source, _CHATML, {}, datetime.date.today(), {"enable_thinking": False})
    tools = [{"type": "function", "function": {"name": "añadir", "parameters": {}}}]
    for chat in CHATS.values():
        (expected,), _ = transformers.utils.chat_template_utils.render_jinja_template(
            [chat], tools=tools, chat_template=source, enable_thinking=False
        )
        read = messages.read({"messages": json.loads(json.dumps(chat)), "tools": tools})
        assert template.render(read) == expected


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\n  "])
def test_chats_with_tools_have_a_template_of_their_own(tmp_path, end):
    """Where a tokenizer has one, with the white space of each."""
    write_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    plain = "\n {% for m in messages %}{{ m.content }}{% endfor %}\n" + end
    tools_template = "\n\t{{ tools | tojson }}\n" + plain + end
    named = {"default": plain, "tool_use": tools_template, "rag": "x"}
    config["chat_template"] = [{"name": n, "template": text} for n, text in named.items()]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    source = tokenizers_of_ours.load("huggingface", str(tmp_path), False, False).chat_template
    template = ChatTemplate(source, _CHATML, {}, datetime.date.today(), {})
    for tools in (None, [_CALL]):
        chat = messages.read({"messages": CHATS["turns"], "tools": tools})
        expected = theirs.apply_chat_template(CHATS["turns"], tools=tools, tokenize=False)
        assert template.render(chat) == expected


_NULLS = _CALL | {"id": None, "function": {"name": "add", "arguments": {"a": None, "b": [None]}}}


def test_nulls_and_thoughts_are_those_of_transformers():
    """In every template that TRL brings: a message's null is nothing, one in a call a value, and a
    thought is there by all its names. A template that fails there fails here."""
    none = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokens = transformers.PreTrainedTokenizerFast(tokenizer_object=none)
    named = ("thinking", "reasoning", "reasoning_content")
    thoughts = [{"role": "assistant", "content": "ok", name: "So", "name": None} for name in named]
    calls = {"role": "assistant", "content": None, "tool_calls": [_NULLS]}
    results = []
    for path in sorted(TEMPLATES.glob("*.jinja")):
        source = path.read_text()
        template = ChatTemplate(source, _CHATML, {}, datetime.date.today(), {})
        for answer in (*thoughts, calls):
            chat = [CHATS["turns"][0], answer, CHATS["tools"][2], answer, CHATS["turns"][1]]
            chat = chat if answer is calls else chat[:2]
            try:
                expected = tokens.apply_chat_template(chat, chat_template=source, tokenize=False)
            except Exception:
                expected = None
            try:
                text = template.render(messages.read({"messages": chat}))
            except messages.BadRecord:
                text = None
            assert text == expected, path.name
            results.append(text or "")
    assert all(sum(word in text for text in results) > 20 for word in ("So", "null"))
