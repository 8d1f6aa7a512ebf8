"""Chats as tokens, with which of them are targets."""

import datetime
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import yaml

from maxramp.data.chats import messages
from maxramp.data.chats.messages import Chat
from maxramp.data.chats.template import ChatTemplate, Span
from maxramp.data.files.records import BadRecord
from maxramp.data.keys import ChatKeys
from maxramp.data.rows import MARKED, NO_TOKENS, Document
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError
from maxramp.files import storage
from maxramp.keys.yamlfile import parse
from maxramp.objectives.chats import CHATS
from maxramp.objectives.pairs import PAIRS

# Keys that decide the tokens of a chat, and which are targets; besides them, its template does.
MADE_BY = (
    *(CHATS.key, PAIRS.key, "sft_train_on_completion_only", "sft_train_on_last_answer_only"),
    "chats_with_marks",
)


class ChatEncoder:
    """Makes tokens of records, and marks the targets among them. A pair of chats is one document,
    the chosen one first; the tokens of their last answers are its targets.
    """

    def __init__(self, tokenizer: Tokenizer, keys: ChatKeys):
        self.tokenizer, self._keys = tokenizer, keys
        self._is_pair = keys.objective.chats == 2
        self._template = open_template(tokenizer, keys)
        self.made_by = {name: getattr(keys, name) for name in MADE_BY}
        self.made_by["template"] = self._template.hash

    def encode(self, record: Mapping[str, Any]) -> Document:
        """Returns the tokens and targets of a record; none (`left_out`) under
        chats_with_marks=leave_out if a message spells a special token. A BadRecord says what is
        wrong with it."""
        chats = messages.read_pair(record) if self._is_pair else [messages.read(record)]
        is_marked = [self._is_marked(chat) for chat in chats]
        if any(is_marked):
            return Document(NO_TOKENS, left_out=MARKED)
        parts = [self._encode_text(*self._render_targets(chat)) for chat in chats]
        begins = itertools.accumulate((len(ids) for ids, _ in parts[:-1]), initial=0)
        ids, is_target = map(np.concatenate, zip(*parts, strict=True))
        return Document(ids, is_target, begins=tuple(begins))

    def _is_marked(self, chat: Chat) -> bool:
        """Tells whether a text of a chat holds a special token, so that chats_with_marks leaves the
        chat out; a BadRecord for such a chat under other values."""
        for text in chat.texts():
            mark = self._template.mark_in(text)
            if mark:
                if self._keys.chats_with_marks == "leave_out":
                    return True
                raise BadRecord(
                    f"a message holds {mark}, a special token that would end or "
                    "begin a turn; remove it, or use chats_with_marks=leave_out"
                )
        return False

    def _encode_text(self, text: str, spans: list[Span]) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of a chat's text and whether each is in a span; a BadRecord for an empty
        one."""
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        if not len(ids):
            raise BadRecord("the chat template makes no text of it; leave it out")
        return ids, _overlap(offsets, spans)

    def _render_targets(self, chat: Chat) -> tuple[str, list[Span]]:
        """Returns a chat's text and the spans of its targets, none if no answer may be trained on;
        a BadRecord if they are unclear."""
        keys = self._keys
        if not (self._is_pair or keys.sft_train_on_completion_only):
            text = self._template.render(chat)
            return text, [(0, len(text))]
        chat.check_answers()
        text, spans = self._template.answers(chat)
        if self._is_pair:
            return text, spans[-1:]
        spans = [span for span, is_trained in zip(spans, chat.trained, strict=True) if is_trained]
        return text, spans[-1:] if keys.sft_train_on_last_answer_only else spans


def open_template(tokenizer: Tokenizer, keys: ChatKeys) -> ChatTemplate:
    """Opens the template that the keys name, or else the tokenizer's own; a ConfigError without, or
    for a tokenizer that is not Hugging Face's."""
    if tokenizer.type != "huggingface":
        raise ConfigError(
            f"tokenizer_type={tokenizer.type} has no tokens for turns, so no chats; give "
            "tokenizer_path=FOLDER of a tokenizer.json with a chat template"
        )
    source, path = tokenizer.chat_template, keys.chat_template
    if path:
        source = storage.read_bytes(path).decode(errors="replace")
    if not source:
        raise ConfigError(
            f"tokenizer_path={tokenizer.path} has no chat template; give chat_template=FILE"
        )
    pairs = (text.partition("=") for text in keys.chat_template_switches)
    try:
        switches = {name: parse(value) for name, _, value in pairs}
    except yaml.YAMLError:
        listed = ",".join(keys.chat_template_switches)
        raise ConfigError(
            f"chat_template_switches=[{listed}]: a value is not valid YAML; quote it"
        ) from None
    date = datetime.date.fromisoformat(keys.chat_template_date)
    return ChatTemplate(source, tokenizer.model.special, tokenizer.named_marks, date, switches)


def _overlap(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Returns which tokens, by their `offsets` [n, 2], have a character in a span: bool [n]."""
    begins, ends = offsets.T
    starts, stops = np.array([*spans, (0, -1)]).T
    which = np.searchsorted(starts[:-1], ends) - 1  # the last that begins before the token's end
    return (begins < ends) & (begins < stops[which])  # of -1, where none does, it is False
