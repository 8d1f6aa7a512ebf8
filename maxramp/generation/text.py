"""The text of answers that come token by token, up to a text that ends them."""

from collections.abc import Callable, Sequence

import numpy as np

from maxramp.generation.generator import Answer


class AnswerText:
    """The text of an answer as far as it has come, which ends before any of some texts.

    A token may hold a part of a character, and what it looks like may depend on the one before it.
    So the last tokens are decoded together with those before them, and what ends within a character
    waits for the rest; if none comes, it shows as U+FFFD.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], prompt: np.ndarray, stops: Sequence[str]
    ):
        # Tokens that belong to it, those of the text that ended it included; whether nothing more
        # will come; whether one of the texts ended it.
        self.tokens, self.done, self.stopped = 0, False, False
        self._decode, self._prompt, self._stops = decode, prompt, stops
        self._begin, self._end = 0, len(prompt)  # of the last tokens that were decoded to the end
        self._text, self._shown = "", 0

    def read(self, answer: Answer) -> None:
        """Takes in what is new of an answer, a token at a time: so the cut is after the first that
        completes a text, however many come at once."""
        # The token that ends an answer does not belong to its text.
        last = len(answer.tokens) - (answer.done and not answer.truncated)
        while self.tokens < last and not self.done:
            self.tokens += 1
            whole = answer.done and self.tokens == last
            self._text += self._more(answer.tokens[: self.tokens], whole)
            if found := [at for stop in self._stops if (at := self._text.find(stop)) >= 0]:
                self._text, self.done, self.stopped = self._text[: min(found)], True, True
        if answer.done and not self.done:
            self.tokens, self.done = len(answer.tokens), True

    def new(self) -> str:
        """What was not returned yet and cannot become part of a text that ends the answer."""
        held = 0 if self.done else max(map(self._count_begun, self._stops), default=0)
        text = self._text[self._shown : len(self._text) - held]
        self._shown += len(text)
        return text

    def _more(self, tokens: np.ndarray, whole: bool) -> str:
        """What the last of these tokens add to the text; `whole` if no other comes."""
        tokens = np.concatenate([self._prompt, tokens])
        before = self._decode(tokens[self._begin : self._end])
        now = self._decode(tokens[self._begin :])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and not whole:
            return ""
        self._begin, self._end = self._end, len(tokens)
        return now[len(before) :]

    def _count_begun(self, stop: str) -> int:
        """Characters at the end that may be the beginning of a text."""
        sizes = range(min(len(stop) - 1, len(self._text)), 0, -1)
        return next((n for n in sizes if self._text.endswith(stop[:n])), 0)
