"""Writes text with the weights of a run or of a released model.

python -m maxramp.generate RUN --prompt TEXT [options] [key=value ...]
python -m maxramp.generate RUN --chat [options] [key=value ...]

RUN is a run's folder, one of its checkpoints, or a Hugging Face model (its folder or its name).
Answers are printed as they are written, one after the other. key=value sets the mesh
(ici_fsdp_parallelism=4), hardware, dtype, attention, max_target_length or the tokenizer.
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from maxramp.commandline import Parser, command, count, print_progress, show_wait
from maxramp.data.files.records import BadRecord
from maxramp.errors import ConfigError
from maxramp.generation.generator import Answer, GenerationConfig, Generator
from maxramp.generation.sampling import Sampling
from maxramp.handover.opening import ChatText, ModelSource, PromptTokenizer, open_model
from maxramp.parallel.compiler import compiler_options
from maxramp.processes import backend
from maxramp.processes.ending import run
from maxramp.rl.prompts import FilePrompts

_STOP_INTERVAL = 16  # tokens between looks for stop texts, if nobody watches
_PATIENCE = 10.0  # seconds without a token, after which a line says why
_MOST_PROPOSED = 16  # tokens of a draft, for a pass
_CONVERSATION = 128  # tokens of the smallest shape of a conversation


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

    @property
    def text(self) -> str:
        """The text so far, with what may become part of a stop text."""
        return self._text

    def _more(self, tokens: np.ndarray, whole: bool) -> str:
        """Returns the text that the last of an answer's tokens so far adds, "" while a character is
        incomplete; `whole` if no more come. Call it for each new token, in their order."""
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


@command
def main(arguments: list[str]) -> int:
    options = _parse(arguments)
    trained = open_model(options.run, options.keys, options.num_speculative_tokens > 0)
    tokenizer = trained.tokenizer()
    texts = [*map(_replace_bad_bytes, options.prompt)]
    if options.chat:
        texts = [_chat_text([_message("user", text)], tokenizer) for text in texts]
    if options.prompt_file:
        texts += FilePrompts(options.prompt_file, None, tokenizer=tokenizer).texts
    texts = [prompt for prompt in texts for _ in range(options.samples)]
    backend.start(trained.config.backend)
    if not texts and jax.process_count() > 1:
        raise ConfigError(
            "--chat without --prompt is a conversation, of one process; give a --prompt"
        )
    writer = _Writer(trained, tokenizer, options)
    if texts:
        writer.write(texts)
        return 0
    messages = []
    if sys.stdin and sys.stdin.isatty():
        print_progress("end the conversation with Ctrl-D")
    while text := _read_message():
        messages.append(_message("user", text))
        [answer] = writer.write([_chat_text(messages, tokenizer)])
        messages.append(_message("assistant", answer))
    return 0


def _say(line: str) -> None:
    if jax.process_index() == 0:
        print_progress(line)


class _Writer:
    """Writes answers to prompts with a model, and prints them."""

    def __init__(
        self, trained: ModelSource, tokenizer: PromptTokenizer, options: argparse.Namespace
    ):
        self._tokenizer, self._options = tokenizer, options
        vocab_size = tokenizer.tokenizer.vocab_size
        sampling = Sampling(options.temperature, options.top_k, options.top_p, vocab_size)
        ends = tuple(tokenizer.ends)
        # A conversation, which grows, has few shapes.
        shape = {"shortest": _CONVERSATION} if not (options.prompt or options.prompt_file) else {}
        shape["num_speculative_tokens"] = options.num_speculative_tokens
        config = GenerationConfig(options.max_new_tokens, sampling, options.seed, ends, **shape)
        model = trained.load(print_progress)
        compiler = compiler_options(jax.default_backend())
        self._generator = Generator(trained.config.model, model, config, compiler)
        self._weights = self._generator.prepare(model)
        self._longest = trained.config.model.max_target_length

    def write(self, texts: Sequence[str]) -> list[str]:
        """Answers prompts, one or more, and prints the answers as they are written, each after its
        prompt unless that is a chat. Returns the answers. All processes call it; the first prints.
        Raises as `Generator.stream`."""
        options = self._options
        prompts = self._tokenizer.encode(texts)
        stops = [*map(_replace_bad_bytes, options.stop)]
        decode = self._tokenizer.tokenizer.decode
        written = [AnswerText(decode, prompt, stops) for prompt in prompts]
        heads = [f"--- {n} of {len(texts)}\n" * (len(texts) > 1) for n in range(1, len(texts) + 1)]
        shown = ["" if isinstance(text, ChatText) else text for text in texts]
        unprinted = [(a + b, answer) for a, b, answer in zip(heads, shown, written, strict=True)]
        every = 1
        if options.json:  # all at once, or often enough to notice stop texts
            every = _STOP_INTERVAL if stops else self._longest
        start, first = time.perf_counter(), None
        stream = self._generator.stream(self._weights, prompts, every=every)
        with show_wait(_say, "waiting for the first tokens, which takes a compile", _PATIENCE):
            begun = next(stream)
        for answers in itertools.chain([begun], stream):
            first = first or (time.perf_counter(), _count_tokens(answers))
            for text, answer in zip(written, answers, strict=True):
                text.read(answer)
            if jax.process_index() == 0 and not options.json:
                _print_new(unprinted)
            if all(text.done for text in written):
                break
        seconds = time.perf_counter() - start
        if jax.process_index() == 0:
            if options.json:
                _print_json(texts, written, answers)
            first_seconds, first_tokens = first[0] - start, first[1]
            later_tokens = _count_tokens(answers) - first_tokens
            speed = ", compiling included"
            if later_tokens:  # not if all came at once
                speed = f"; the first after {first_seconds:.1f} s, with the compile, then "
                speed += f"{later_tokens / (seconds - first_seconds):,.1f} tokens/s"
            tokens = sum(text.tokens for text in written)
            speed += _describe_proposals(answers, options.num_speculative_tokens)
            print(f"{count(tokens, 'token')} in {seconds:.1f} s{speed}", file=sys.stderr)
        return [text.text for text in written]


def _count_tokens(answers: Sequence[Answer]) -> int:
    return sum(len(answer.tokens) for answer in answers)


def _describe_proposals(answers: Sequence[Answer], proposed: int) -> str:
    """Describes how many of the draft's tokens were written; "" if it proposes none."""
    passes = sum(answer.passes for answer in answers)
    if not proposed or not passes:
        return ""
    written = _count_tokens(answers)
    accepted = (written - passes) / (passes * proposed)
    return f"; {written / passes:.2f} tokens a pass, {accepted:.0%} of the draft's accepted"


def _print_json(
    prompts: Sequence[str], written: Sequence[AnswerText], answers: Sequence[Answer]
) -> None:
    """Prints a JSON line for each answer; for process 0. `tokens` and `log_probs` include a stop
    text's.
    """
    for prompt, text, answer in zip(prompts, written, answers, strict=True):
        line = {
            "prompt": prompt,
            "answer": text.text,
            "truncated": answer.truncated and not text.stopped,
            "tokens": answer.tokens[: text.tokens].tolist(),
            "log_probs": [float(f"{x:.6g}") for x in answer.log_probs[: text.tokens]],
        }
        print(json.dumps(line))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="a model")
    texts = {"action": "append", "default": [], "metavar": "TEXT"}
    add("--prompt", **texts, help="text to continue; may be given several times")
    text = 'more prompts: JSON lines with "prompt", as for maxramp.grpo'
    add("--prompt_file", metavar="FILE", help=text)
    text = "apply the chat template: a prompt is a user's message, the answer alone is printed; "
    add("--chat", action="store_true", help=text + "without prompts, hold a conversation")
    for name, kind, default, what in (
        ("samples", int, 1, "answers to each prompt (1)"),
        ("max_new_tokens", int, None, "longest answer (as long as max_target_length allows)"),
        ("temperature", float, 1.0, "sampling temperature; 0 is greedy (1)"),
        ("top_k", int, 0, "sample from the N most likely tokens; 0 = all (0)"),
        ("top_p", float, 1.0, "sample from the most likely tokens of this total probability (1)"),
        ("seed", int, 0, "of sampling (0)"),
        ("num_speculative_tokens", int, 0, "tokens that the model's draft proposes for a pass (0)"),
    ):
        add(f"--{name}", type=kind, default=default, metavar="N", help=what)
    add("--stop", **texts, help="end an answer at this text; may be given several times")
    add("--json", action="store_true", help="print one JSON object per answer")
    add("keys", nargs="*", metavar="key=value")
    options = parser.parse_intermixed_args(arguments)
    if not (options.prompt or options.prompt_file or options.chat):
        raise ConfigError("no prompt is given; use --prompt TEXT, --prompt_file FILE, or --chat")
    if options.samples > 1 and not (options.prompt or options.prompt_file):
        raise ConfigError(f"--samples {options.samples}: a conversation has one answer at a time")
    if "" in options.stop:
        raise ConfigError("--stop '' would end every answer before its first token; give a text")
    for name in ("samples", "max_new_tokens"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ConfigError(f"--{name} {getattr(options, name)} must be 1 or more")
    if not 0 <= options.num_speculative_tokens <= _MOST_PROPOSED:
        raise ConfigError(
            f"--num_speculative_tokens {options.num_speculative_tokens} must be 0 to "
            f"{_MOST_PROPOSED}; each takes a step of the draft, and late ones are seldom right"
        )
    if not 0 <= options.seed < 2**32:
        raise ConfigError(f"--seed {options.seed} must be 0 or more and below 2^32 = {2**32}")
    Sampling(options.temperature, options.top_k, options.top_p).check()
    return options


def _replace_bad_bytes(argument: str) -> str:
    """Replaces bytes of a command line's argument that are not UTF-8."""
    return argument.encode(errors="surrogateescape").decode(errors="replace")


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _chat_text(messages: Sequence[dict[str, str]], tokenizer: PromptTokenizer) -> ChatText:
    try:
        return tokenizer.chat(messages)
    except BadRecord as bad:
        raise ConfigError(f"--chat {messages[-1]['content']}: {bad}") from None


def _read_message() -> str:
    """Reads what the user says next from stdin; "" at its end, or if it is closed."""
    if sys.stdin and sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
    for line in sys.stdin or ():
        if text := _replace_bad_bytes(line.strip()):
            return text
    return ""


def _print_new(unprinted: list[tuple[str, AnswerText]]) -> None:
    """Prints the new text of the first unfinished answer and of those before it, each after its
    heading, and removes finished ones from the list."""
    while unprinted:
        heading, text = unprinted[0]
        print(heading + text.new(), end="\n" * text.done, flush=True)
        if not text.done:
            unprinted[0] = "", text
            return
        del unprinted[0]


if __name__ == "__main__":
    run(main)
