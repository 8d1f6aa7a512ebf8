"""A tokenizer's chat template: the text of a chat, and where its answers lie in it.

Templates are other people's Jinja: they run in a sandbox, with what transformers gives them. An
answer begins behind the text that asks for one (`add_generation_prompt`) and ends with the mark
that ends a turn, which belongs to it; {% generation %} blocks decide where a template has them.
"""

import dataclasses
import datetime
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from maxramp.data.chats.messages import ANSWERS, THOUGHTS, Chat
from maxramp.data.corpus import hash_of
from maxramp.data.files.records import BadRecord
from maxramp.errors import ConfigError, one_line
from maxramp.files.storage import optional

# Around the text of a {% generation %} block while it is rendered, and in the place of an answer:
# no characters, by Unicode, so no message has them.
_BEGIN, _END, _ANSWER = "\ufdd0", "\ufdd1", "\ufdd2"
_BLOCKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Span = tuple[int, int]  # of a text: characters from the first up to the second


class ChatTemplate:
    """A template, with the switches and the date that it sees."""

    def __init__(
        self,
        source: str,
        marks: Sequence[str],
        named_marks: Mapping[str, str],
        date: datetime.date,
        switches: Mapping[str, Any],
    ):
        """Compiles a template; a ConfigError if it is not valid.

        Args:
          marks: the special tokens, for `mark_in`: callers refuse messages that hold one.
          named_marks: some of them by name, such as eos_token.
          date: the day that the template sees as today.
          switches: other variables, such as enable_thinking.
        """
        self._arguments = source, marks, named_marks, date, switches
        self._named, self._date, self._switches = dict(named_marks), date, dict(switches)
        escaped = map(re.escape, sorted(marks, key=len, reverse=True))
        self._marks = re.compile("|".join(escaped) or "(?!)")  # which matches nothing
        self._has_blocks = bool(_BLOCKS.search(source))
        jinja2 = optional("jinja2", "jinja2", "a chat template")
        try:
            self._template = self._environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid ({one_line(error)})") from None
        named = sorted(named_marks.items())
        self.hash = hash_of((source, named, str(date), sorted(switches.items())))

    def __reduce__(self) -> Any:
        return type(self), self._arguments  # what Jinja compiles cannot travel to another process

    def mark_in(self, text: str) -> str:
        """Returns the first mark in a text, or ""."""
        match = self._marks.search(text)
        return match[0] if match else ""

    def render(self, chat: Chat, count: int | None = None, ask: bool = False) -> str:
        """Returns the text of the first `count` messages, or of all; `ask` adds what asks for an
        answer. A BadRecord if the template refuses them."""
        return self._render(chat, count, ask).replace(_BEGIN, "").replace(_END, "")

    def answers(self, chat: Chat) -> tuple[str, list[Span]]:
        """Returns a chat's text and its answers' spans, with end marks; a BadRecord if unclear."""
        wanted = sum(message["role"] == ANSWERS for message in chat.messages)
        text, spans = self._render(chat, None, False), []
        if self._has_blocks:
            matches = enumerate(re.finditer(f"{_BEGIN}.*?{_END}", text, re.DOTALL))
            # As they will be without the two characters around each.
            spans = [(match.start() - 2 * i, match.end() - 2 * i - 2) for i, match in matches]
            text = text.replace(_BEGIN, "").replace(_END, "")
        elif wanted:
            mark = self._end_mark(chat)
            spans = self._find_by_headers(chat, text, wanted, mark)
            spans = spans or self._find_by_prefixes(chat, text, mark)
        if len(spans) != wanted:
            raise BadRecord(
                f"the chat template shows {len(spans)} of its {wanted} answers where they can be "
                "told from the rest; give a chat_template with {% generation %} blocks"
            )
        return text, spans

    def _find_by_headers(self, chat: Chat, text: str, wanted: int, mark: str) -> list[Span]:
        """Finds the `wanted` answers of a text (at least one), each from behind a header up to
        `mark` ("" = to the end). The header is the text that asks for an answer, or its longest
        beginning that comes once for each answer and not before the first: some templates ask with
        a thought that old answers have lost. No message can imitate it, as it begins with a mark.
        [] without such a header."""
        first = _first_answer(chat)
        count = first or 1  # many templates look at the first message
        before, asked = self._render(chat, count, False), self._render(chat, count, True)
        same = len(os.path.commonprefix([before, asked]))  # some end whole chats with a mark
        start = next((one for one in self._marks.finditer(asked) if one.end() > same), None)
        if not start or start.start() > same:
            return []
        header = asked[start.start() :]
        ends = {match.end() for match in self._marks.finditer(header)}
        ends |= {i + 1 for i, character in enumerate(header) if character == "\n"} | {len(header)}
        for end in sorted(ends, reverse=True):
            headers = [match.start() for match in re.finditer(re.escape(header[:end]), text)]
            if len(headers) == wanted and not (first and header[:end] in before):
                break
        else:
            return []
        spans = []
        for at in headers:
            begin = at + (len(header) if text.startswith(header, at) else end)
            spans.append((begin, _end(text, begin, mark)))
        # With another end mark than expected an answer would go on into the next turn.
        apart = all(start[0] not in text[begin:stop] for begin, stop in spans)
        return spans if apart else []

    def _find_by_prefixes(self, chat: Chat, text: str, mark: str) -> list[Span]:
        """Returns answers, each behind the text that asks for it; [] of a template whose text does
        not begin with that."""
        spans = []
        for i, message in enumerate(chat.messages):
            if message["role"] == ANSWERS:
                asked = self._render(chat, i, True)
                end = self._find_end(chat, i, text, asked, mark) if text.startswith(asked) else 0
                if not end:
                    return []
                spans.append((len(asked), end))
        return spans

    def _find_end(self, chat: Chat, i: int, text: str, asked: str, mark: str) -> int:
        """Returns where message `i` ends in a chat's text, behind `mark` or another one; 0 if that
        is unclear. It must be there as it is where it ends the chat, but for its thought, which
        some templates drop later on, and the mark at its end (gpt-oss), which then stands
        before another mark, as where the next answer is asked for at once."""
        answer = chat.messages[i]
        bare = {name: value for name, value in answer.items() if name not in THOUGHTS}
        for last in (answer, bare):
            messages = [*chat.messages[:i], last]
            whole = self._render(dataclasses.replace(chat, messages=messages), None, False)
            if whole.startswith(asked) and text.startswith(whole):
                return _end(whole, len(asked), mark)
            same = len(os.path.commonprefix([whole, text]))
            ends = self._marks.finditer(text, len(asked))
            other = next((match for match in ends if match.end() > same), None)
            if not other or other.start() > same or not self._marks.fullmatch(whole, other.start()):
                continue
            then_asked = self._render(chat, i + 1, True)
            next_header = then_asked[other.end() :].lstrip()
            if then_asked.startswith(text[: other.end()]) and self._marks.match(next_header):
                return other.end()
        return 0

    def _end_mark(self, chat: Chat) -> str:
        """Returns the last of the marks right behind a placeholder for the first answer of a chat,
        which has one; "" without marks there."""
        before = chat.messages[: _first_answer(chat)]
        messages = [*before, {"role": ANSWERS, "content": _ANSWER}]
        text = self._render(dataclasses.replace(chat, messages=messages), None, False)
        match = re.search(f"(?:{self._marks.pattern})+", text[text.rfind(_ANSWER) :])
        return self._marks.findall(match[0])[-1] if match else ""

    def _render(self, chat: Chat, count: int | None, ask: bool) -> str:
        """Renders the first `count` messages (None = all), and with `ask` the beginning of an
        answer; a BadRecord if the template fails, whatever it raises."""
        chat_values = {"messages": chat.messages[:count], "tools": chat.tools, "documents": None}
        try:
            return self._template.render(
                **{**self._named, **self._switches}, **chat_values, add_generation_prompt=ask
            )
        except Exception as error:  # a template is a program
            raise BadRecord(f"the chat template refuses it ({one_line(error)})") from None

    def _environment(self) -> Any:
        """Makes the sandbox of a template, as that of transformers; the texts of its generation
        blocks stand between _BEGIN and _END."""
        from jinja2 import ext, nodes, sandbox
        from jinja2.exceptions import TemplateError

        class Generation(ext.Extension):
            """{% generation %} ... {% endgeneration %}: an answer."""

            tags = {"generation"}

            def parse(self, parser: Any) -> Any:
                line = next(parser.stream).lineno
                body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
                call = self.call_method("_mark")
                return nodes.CallBlock(call, [], [], body).set_lineno(line)

            def _mark(self, caller: Any) -> str:
                return f"{_BEGIN}{caller()}{_END}"

        def refuse(message: str) -> None:
            raise TemplateError(message)

        def tojson(x: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
            layout = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
            return json.dumps(x, ensure_ascii=ensure_ascii, **layout)

        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols]
        )
        environment.filters["tojson"] = tojson
        environment.globals["raise_exception"] = refuse
        environment.globals["strftime_now"] = self._date.strftime
        return environment


def _first_answer(chat: Chat) -> int:
    return [message["role"] for message in chat.messages].index(ANSWERS)


def _end(text: str, at: int, mark: str) -> int:
    end = text.find(mark, at) if mark else -1
    return end + len(mark) if end >= 0 else len(text)
