"""The chats of several files, as tokens with what each is a target for."""

import bisect
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxramp.data.chats import messages
from maxramp.data.chats.keys import ChatKeys
from maxramp.data.chats.messages import Chat
from maxramp.data.chats.template import ChatTemplate, Span
from maxramp.data.files.records import BadRecord, RecordFile
from maxramp.data.rows import LONG, MARKED, UNANSWERED, Chain, Document
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError
from maxramp.files import storage
from maxramp.keys.yamlfile import parse

_NONE = np.empty(0, np.int32)


class Chats(Chain):
    """Chats, made into text and tokens when they are asked for."""

    def __init__(
        self,
        files: Sequence[RecordFile],
        tokenizer: Tokenizer,
        template: ChatTemplate,
        keys: ChatKeys,
        length: int,
    ):
        """
        Args:
          files: whose records are whole.
          tokenizer: of type huggingface.
          template: the text of chats.
          keys: what is trained on, and what is left out.
          length: tokens that a row predicts.
        """
        super().__init__(files)
        self._tokenizer, self._template, self._keys = tokenizer, template, keys
        self._length = length

    def _item(self, number: int) -> Document:
        file, record = self._find(number)
        try:
            return self._document(file[record])
        except BadRecord as bad:
            raise ConfigError(f"{file.where(record)}: {bad}") from None

    def text(self, number: int) -> tuple[str, list[Span]]:
        """The text of a chat, and what of it is trained on.

        Raises:
          ConfigError: its record is no chat.
        """
        file, record = self._find(number)
        try:
            return self._trained(messages.read(file[record]))
        except BadRecord as bad:
            raise ConfigError(f"{file.where(record)}: {bad}") from None

    def _document(self, record: Mapping[str, Any]) -> Document:
        chat = messages.read(record)
        if self._is_marked(chat):
            return Document(_NONE, left_out=MARKED)
        ids, is_target = self._encoded(*self._trained(chat))
        if len(ids) > self._length + 1:
            if self._keys.long_chats == "leave_out":
                return Document(_NONE, left_out=LONG)
            ids, is_target = ids[: self._length + 1], is_target[: self._length + 1]
        if not is_target[1:].any():
            return Document(_NONE, left_out=UNANSWERED)
        return Document(ids, is_target)

    def _is_marked(self, chat: Chat) -> bool:
        """Whether a chat is left out because a mark is in its messages."""
        for text in chat.texts():
            if mark := self._template.mark_in(text):
                if self._keys.chats_with_marks == "leave_out":
                    return True
                raise BadRecord(
                    f"a message holds {mark}, which is a mark of the tokenizer and would end or "
                    "begin a turn; mend it, or use chats_with_marks=leave_out"
                )
        return False

    def _encoded(self, text: str, spans: list[Span]) -> tuple[np.ndarray, np.ndarray]:
        """The ids of a text, and which of them have a character in a span."""
        ids, offsets = self._tokenizer.encode_with_offsets(text)
        return ids, _overlap(offsets, spans)

    def _trained(self, chat: Chat) -> tuple[str, list[Span]]:
        """The text of a chat, and the parts of it that are trained on."""
        if not self._keys.sft_train_on_completion_only:
            text = self._template.render(chat)
            return text, [(0, len(text))]
        text, spans = self._template.answers(chat)
        spans = [span for span, is_trained in zip(spans, chat.trained, strict=True) if is_trained]
        return text, spans[-1:] if self._keys.sft_train_on_last_answer_only else spans


class Pairs(Chats):
    """Pairs of chats that differ in their last answer, its tokens the targets.

    A pair is one document: the chat with the chosen answer, and behind it that with the other one.
    """

    def _document(self, record: Mapping[str, Any]) -> Document:
        parts = []
        for chat in messages.read_pair(record):
            if self._is_marked(chat):
                return Document(_NONE, left_out=MARKED)
            text, spans = self._template.answers(chat)
            parts.append(self._encoded(text, spans[-1:]))
        ids, is_target = map(np.concatenate, zip(*parts, strict=True))
        if len(ids) > self._length + 1:
            return Document(_NONE, left_out=LONG)
        if not all(of_answer[1:].any() for _, of_answer in parts):
            return Document(_NONE, left_out=UNANSWERED)
        return Document(ids, is_target, begins=(0, len(parts[0][0])))


def open_template(tokenizer: Tokenizer, keys: ChatKeys) -> ChatTemplate:
    """The template of a tokenizer, or the one that the keys name.

    Raises:
      ConfigError: there is none, or it is none.
    """
    source, path = tokenizer.chat_template, keys.chat_template
    if path:
        source = storage.read_bytes(path).decode(errors="replace")
    if not source:
        raise ConfigError(
            f"tokenizer_path={tokenizer.path} has no chat template; give chat_template=FILE"
        )
    switches = {
        name: parse(value)
        for name, _, value in (text.partition("=") for text in keys.chat_template_switches)
    }
    date = datetime.date.fromisoformat(keys.chat_template_date)
    return ChatTemplate(source, tokenizer.special, tokenizer.named_marks, date, switches)


def _overlap(offsets: np.ndarray, spans: list[Span]) -> np.ndarray:
    """Which tokens have a character in a span: bool [n].

    Args:
      offsets: [n, 2], where tokens begin and end in the text.
      spans: in their order, apart.
    """
    starts = [start for start, _ in spans]
    found = np.zeros(len(offsets), bool)
    for i, (begin, end) in enumerate(offsets):
        which = bisect.bisect_left(starts, end) - 1  # the last that begins before the token's end
        found[i] = end > begin and which >= 0 and begin < spans[which][1]
    return found
