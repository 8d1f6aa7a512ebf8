"""Writes text with the weights of a run.

python -m maxramp.generate RUN --prompt TEXT [--prompt TEXT ...] [options] [key=value ...]
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from maxramp.commandline import OneLineParser, count
from maxramp.config.usage import HelpKeys
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError, TrainingError, report
from maxramp.folders.place import place
from maxramp.generation.generator import Answer, Generator
from maxramp.generation.loading import TrainedRun
from maxramp.generation.sampling import Sampling
from maxramp.parallel.processes import run
from maxramp.training.programs import compiler_options

USAGE = """RUN is the folder of a run, or one of its checkpoints. Text streams as it comes; that of
several prompts and samples follows one another. key=value sets the mesh (ici_fsdp_parallelism=4),
hardware, dtype, attention, max_target_length or the tokenizer.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit status."""
    try:
        _generate(_parse(arguments))
        return 0
    except (ConfigError, TrainingError, jax.errors.JaxRuntimeError, MemoryError, OSError) as error:
        return report(error)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = OneLineParser(
        prog="python -m maxramp.generate",
        description=__doc__.partition("\n")[0],
        epilog=USAGE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=place)
    parser.add_argument("--prompt", action="append", required=True, help="may be given again")
    parser.add_argument("--samples", type=int, default=1, help="answers to each prompt (1)")
    parser.add_argument(
        "--max_new_tokens", type=int, help="of an answer (as many as max_target_length leaves)"
    )
    parser.add_argument(
        "--temperature", type=float, default=1.0, help="divides the logits; 0 = greedy (1)"
    )
    parser.add_argument("--top_k", type=int, default=0, help="of the likeliest tokens; 0 = all")
    parser.add_argument(
        "--top_p", type=float, default=1.0, help="of the likeliest, with this probability (1)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (0)")
    parser.add_argument(
        "--stop", action="append", default=[], help="a text of one token that ends an answer too"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object per answer")
    parser.add_argument("--help-keys", action=HelpKeys)
    parser.add_argument("keys", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args(arguments)
    for name in ("samples", "max_new_tokens"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise ConfigError(f"--{name} {getattr(given, name)} must be 1 or more")
    if not 0 <= given.seed < 2**32:
        raise ConfigError(f"--seed {given.seed} must be 0 or more and below 2^32 = {2**32}")
    Sampling(given.temperature, given.top_k, given.top_p).check("--")
    return given


def _generate(given: argparse.Namespace) -> None:
    trained = TrainedRun(given.run, given.keys)
    tokenizer = trained.tokenizer()
    stops = [*tokenizer.ends, *map(tokenizer.stop, map(_text, given.stop))]
    texts = [_text(prompt) for prompt in given.prompt for _ in range(given.samples)]
    prompts = tokenizer.encode(texts)
    room = trained.config.model.max_target_length - max(map(len, prompts))
    most_tokens = given.max_new_tokens or max(1, room)
    vocab_size = tokenizer.tokenizer.vocab_size
    sampling = Sampling(given.temperature, given.top_k, given.top_p, vocab_size)
    model = trained.load()
    options = compiler_options(jax.default_backend())
    generator = Generator(trained.config.model, model, options)
    weights = generator.prepare(model)
    del model

    is_first = jax.process_index() == 0
    show = (_Json if given.json else _Text)(texts, prompts, tokenizer.tokenizer)
    every = most_tokens if given.json else 1
    start = time.perf_counter()
    for answers in generator.stream(
        weights, prompts, most_tokens, sampling, given.seed, stops, every=every
    ):
        if is_first:
            show(answers)
    seconds, tokens = time.perf_counter() - start, sum(len(answer.tokens) for answer in answers)
    if is_first:
        print(f"{count(tokens, 'token')} in {seconds:.1f} s, compiling included", file=sys.stderr)


def _text(argument: str) -> str:
    """An argument of the command line, whose bytes that are no text come as surrogates."""
    return argument.encode(errors="surrogateescape").decode(errors="replace")


class _Json:
    """Prints every answer as a line of JSON."""

    def __init__(self, texts: Sequence[str], prompts: Sequence[np.ndarray], tokenizer: Tokenizer):
        self._texts, self._prompts, self._tokenizer = texts, prompts, tokenizer

    def __call__(self, answers: Sequence[Answer]) -> None:
        for text, prompt, answer in zip(self._texts, self._prompts, answers, strict=True):
            shown = IncrementalText(self._tokenizer.decode, prompt)
            line = {
                "prompt": text,
                "answer": shown.more(_without_stop(answer), True),
                "truncated": answer.truncated,
                "tokens": answer.tokens.tolist(),
                "log_probs": [float(f"{x:.6g}") for x in answer.log_probs],
            }
            print(json.dumps(line))


class _Text:
    """Prints answers behind their prompts: each when the one before is whole, as it comes."""

    def __init__(self, texts: Sequence[str], prompts: Sequence[np.ndarray], tokenizer: Tokenizer):
        self._texts, self._prompts, self._tokenizer = texts, prompts, tokenizer
        self._number, self._shown = 0, None

    def __call__(self, answers: Sequence[Answer]) -> None:
        while self._number < len(answers):
            if self._shown is None:
                if len(answers) > 1:
                    print(f"--- {self._number + 1} of {len(answers)}")
                print(self._texts[self._number], end="")
                self._shown = IncrementalText(self._tokenizer.decode, self._prompts[self._number])
            answer = answers[self._number]
            print(self._shown.more(_without_stop(answer), answer.done), end="", flush=True)
            if not answer.done:
                return
            print()
            self._number, self._shown = self._number + 1, None


def _without_stop(answer: Answer) -> np.ndarray:
    return answer.tokens[:-1] if answer.done and not answer.truncated else answer.tokens


class IncrementalText:
    """The text of tokens that come one after another, behind a prompt.

    A token may hold a part of a character, and what it looks like may depend on the one before it.
    So the last tokens are decoded together with those before them, and what ends within a character
    waits for the rest.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt: np.ndarray):
        self._decode, self._prompt = decode, prompt
        self._begin, self._end = 0, len(prompt)  # of the last tokens that were shown

    def more(self, tokens: np.ndarray, whole: bool) -> str:
        """What is new in the text.

        Args:
          tokens: all that have come.
          whole: whether they are the last: what is no character then shows as U+FFFD.
        """
        tokens = np.concatenate([self._prompt, tokens])
        before = self._decode(tokens[self._begin : self._end])
        now = self._decode(tokens[self._begin :])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and not whole:
            return ""
        self._begin, self._end = self._end, len(tokens)
        return now[len(before) :]


if __name__ == "__main__":
    run(main)
