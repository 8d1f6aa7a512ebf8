"""Writes text with the weights of a run or of a released model.

python -m maxramp.generate RUN --prompt TEXT [options] [key=value ...]

RUN is a run's folder, one of its checkpoints, or a Hugging Face model (its folder or its name).
Answers are printed as they are written, one after the other. key=value sets the mesh
(ici_fsdp_parallelism=4), hardware, dtype, attention, max_target_length or the tokenizer.
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import argparse
import json
import sys
import time
from collections.abc import Sequence

import jax

from maxramp.commandline import Parser, command, count, print_progress
from maxramp.data.files.records import BadRecord
from maxramp.errors import ConfigError
from maxramp.generation.generator import Generator, Writing
from maxramp.generation.sampling import Sampling
from maxramp.generation.text import AnswerText
from maxramp.handover.opening import ChatText, PromptTokenizer, open_model
from maxramp.parallel.compiler import compiler_options
from maxramp.processes import backend
from maxramp.processes.ending import run
from maxramp.rl.prompts import FilePrompts

_SELDOM = 16  # tokens


@command
def main(arguments: list[str]) -> int:
    given = _parse(arguments)
    trained = open_model(given.run, given.keys)
    tokenizer = trained.tokenizer()
    asked = [*map(_text, given.prompt)]
    if given.chat:
        asked = [_user_chat(text, tokenizer) for text in asked]
    if given.prompt_file:
        asked += FilePrompts(given.prompt_file, None, tokenizer=tokenizer).texts
    texts = [prompt for prompt in asked for _ in range(given.samples)]
    prompts = tokenizer.encode(texts)
    vocab_size, decode = tokenizer.tokenizer.vocab_size, tokenizer.tokenizer.decode
    sampling = Sampling(given.temperature, given.top_k, given.top_p, vocab_size)
    writing = Writing(given.max_new_tokens, sampling, given.seed, tuple(tokenizer.ends))
    backend.start(trained.config.backend)
    model = trained.load(print_progress)
    options = compiler_options(jax.default_backend())
    generator = Generator(trained.config.model, model, writing, options)
    weights = generator.prepare(model)
    del model

    stops = [*map(_text, given.stop)]
    written = [AnswerText(decode, prompt, stops) for prompt in prompts]
    heads = [f"--- {n} of {len(texts)}\n" * (len(texts) > 1) for n in range(1, len(texts) + 1)]
    waiting = [(head + text, of) for head, text, of in zip(heads, texts, written, strict=True)]
    # Answers that nobody watches come at once, or often enough to notice the texts that end them.
    at_once = _SELDOM if stops else trained.config.model.max_target_length
    every = at_once if given.json else 1
    start, first = time.perf_counter(), None
    for answers in generator.stream(weights, prompts, every=every):
        first = first or (time.perf_counter(), sum(len(answer.tokens) for answer in answers))
        for text, answer in zip(written, answers, strict=True):
            text.read(answer)
        if jax.process_index() == 0 and not given.json:
            _show(waiting)
        if all(text.done for text in written):
            break
    end, tokens = time.perf_counter(), sum(text.tokens for text in written)
    if jax.process_index():
        return 0
    if given.json:
        for prompt, text, answer in zip(texts, written, answers, strict=True):
            line = {
                "prompt": prompt,
                "answer": text.new(),
                "truncated": answer.truncated and not text.stopped,
                "tokens": answer.tokens[: text.tokens].tolist(),
                "log_probs": [float(f"{x:.6g}") for x in answer.log_probs[: text.tokens]],
            }
            print(json.dumps(line))
    compiled, at_first = first
    after = sum(len(answer.tokens) for answer in answers) - at_first
    how = ", compiling included"
    if after:  # what nobody watches comes at once
        how = f"; the first after {compiled - start:.1f} s, with the compile, then "
        how += f"{after / (end - compiled):,.1f} tokens/s"
    print(f"{count(tokens, 'token')} in {end - start:.1f} s{how}", file=sys.stderr)
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="a model")
    texts = {"action": "append", "default": [], "metavar": "TEXT"}
    add("--prompt", **texts, help="text to continue; may be given several times")
    text = 'more prompts: JSON lines with "prompt", as for maxramp.grpo'
    add("--prompt_file", metavar="FILE", help=text)
    add("--chat", action="store_true", help="take each --prompt for what a user says in a chat")
    for name, kind, default, what in (
        ("samples", int, 1, "answers to each prompt (1)"),
        ("max_new_tokens", int, None, "longest answer (as long as max_target_length allows)"),
        ("temperature", float, 1.0, "of sampling; 0 always takes the likeliest token (1)"),
        ("top_k", int, 0, "sample from the N likeliest tokens; 0 = from all (0)"),
        ("top_p", float, 1.0, "sample from the likeliest tokens of this total probability (1)"),
        ("seed", int, 0, "of sampling (0)"),
    ):
        add(f"--{name}", type=kind, default=default, metavar="N", help=what)
    add("--stop", **texts, help="end an answer at this text; may be given several times")
    add("--json", action="store_true", help="print one JSON object per answer")
    add("keys", nargs="*", metavar="key=value")
    given = parser.parse_intermixed_args(arguments)
    if not (given.prompt or given.prompt_file):
        raise ConfigError("no prompt is given; use --prompt TEXT, or --prompt_file FILE")
    if "" in given.stop:
        raise ConfigError("--stop '' would end every answer before its first token; give a text")
    for name in ("samples", "max_new_tokens"):
        if getattr(given, name) is not None and getattr(given, name) < 1:
            raise ConfigError(f"--{name} {getattr(given, name)} must be 1 or more")
    if not 0 <= given.seed < 2**32:
        raise ConfigError(f"--seed {given.seed} must be 0 or more and below 2^32 = {2**32}")
    Sampling(given.temperature, given.top_k, given.top_p).check()
    return given


def _text(argument: str) -> str:
    """An argument of the command line, in which bytes that are not UTF-8 are replaced."""
    return argument.encode(errors="surrogateescape").decode(errors="replace")


def _user_chat(text: str, tokenizer: PromptTokenizer) -> ChatText:
    try:
        return tokenizer.chat([{"role": "user", "content": text}])
    except BadRecord as bad:
        raise ConfigError(f"--prompt {text}: {bad}") from None


def _show(waiting: list[tuple[str, AnswerText]]) -> None:
    """Prints the answers so far behind their headings, one after the other, and removes from the
    list what was printed."""
    while waiting:
        before, text = waiting[0]
        print(before + text.new(), end="\n" * text.done, flush=True)
        if not text.done:
            waiting[0] = "", text
            return
        del waiting[0]


if __name__ == "__main__":
    run(main)
