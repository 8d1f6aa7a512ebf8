"""Decodes answers token by token, up to a stop text."""

from collections.abc import Callable, Sequence

import numpy as np

from maxramp.generation.generator import Answer


class AnswerText:
    """The text of an answer so far, which ends before any of the stop texts.

    A token may hold a part of a character, and its text may depend on the token before it. So the
    last tokens are decoded together with those before them, and a partial character waits for the
    rest; if none comes, it shows as U+FFFD.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: np.ndarray, stops: Sequence[str]
    ):
        self.tokens = 0  # of the answer, with those of the stop text
        self.done = False  # whether nothing more will come
        self.stopped = False  # whether a stop text ended it
        self._decode, self._prompt, self._stops = decode, prompt, stops
        self._begin, self._end = 0, len(prompt)  # the last tokens that were decoded completely
        self._text, self._shown = "", 0

    def read(self, answer: Answer) -> None:
        """Reads the new tokens of an answer, one at a time, so that it ends after the token that
        completes a stop text, however many come at once."""
        # The token that ends an answer does not belong to its text.
        last = len(answer.tokens) - (answer.done and not answer.truncated)
        while self.tokens < last and not self.done:
            self.tokens += 1
            whole = answer.done and self.tokens == last
            self._text += self._more(answer.tokens[: self.tokens], whole)
            starts = [self._text.find(stop) for stop in self._stops if stop in self._text]
            if starts:
                self._text, self.done, self.stopped = self._text[: min(starts)], True, True
        if answer.done and not self.done:
            self.tokens, self.done = len(answer.tokens), True

    def new(self) -> str:
        """Returns the new text that cannot become part of a stop text."""
        held = 0 if self.done else max(map(self._count_begun, self._stops), default=0)
        text = self._text[self._shown : len(self._text) - held]
        self._shown += len(text)
        return text

    def _more(self, tokens: np.ndarray, whole: bool) -> str:
        """Returns the text that the last of these tokens add; `whole` if no more tokens come."""
        tokens = np.concatenate([self._prompt, tokens])
        before = self._decode(tokens[self._begin : self._end])
        now = self._decode(tokens[self._begin :])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and not whole:
            return ""
        self._begin, self._end = self._end, len(tokens)
        return now[len(before) :]

    def _count_begun(self, stop: str) -> int:
        """Counts the characters at the end that may begin a stop text."""
        sizes = range(min(len(stop) - 1, len(self._text)), 0, -1)
        return next((n for n in sizes if self._text.endswith(stop[:n])), 0)
