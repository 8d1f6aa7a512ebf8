"""Generation with proposals of a draft beside generation without them, greedy and drawn.

python benchmarks/speculative.py RUN [--json FILE]

RUN has a draft (mtp_num_layers). Rounds are interleaved, and medians of their ratios are reported.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"

import functools
import itertools
import statistics
import time

import figures
import numpy as np

from maxramp.generation.generator import GenerationConfig, Generator
from maxramp.generation.sampling import Sampling
from maxramp.handover.opening import open_model
from maxramp.processes import backend

PROMPT, NEW, ROUNDS = 32, 96, 7
PROPOSED, COUNTS, TEMPERATURES = (0, 1, 2, 3), (1, 8), (0, 1)


def measure(source, model, prompts, temperature):
    """Figures by the number of proposed tokens."""
    seconds, answers, answer = {k: [] for k in PROPOSED}, {}, {}
    for k in PROPOSED:
        config = GenerationConfig(NEW, Sampling(temperature), num_speculative_tokens=k)
        generator = Generator(source.config.model, model, config)
        answer[k] = functools.partial(generator.answer, generator.prepare(model), prompts)
    for round in range(ROUNDS + 1):
        for k in PROPOSED:
            start = time.perf_counter()
            answers[k] = answer[k]()
            if round:  # the first compiles
                seconds[k].append(time.perf_counter() - start)
    report = {}
    for k in PROPOSED:
        passes = sum(x.passes for x in answers[k])
        written = sum(len(x.tokens) for x in answers[k])
        pairs = zip(answers[0], answers[k], strict=True)
        report[k] = {
            "tokens_per_second": written / statistics.median(seconds[k]),
            "times_as_fast": float(statistics.median(map(np.divide, seconds[0], seconds[k]))),
            "tokens_per_pass": written / passes,
            "accepted": (written - passes) / (k * passes) if k else None,
            "equal_texts": sum(np.array_equal(x.tokens, y.tokens) for x, y in pairs),
        }
    return report


def main():
    parser = figures.parser("speculative", __doc__)
    parser.add_argument("run", metavar="RUN")
    options = parser.parse_args()
    source = open_model(options.run, [f"max_target_length={PROMPT + NEW}"], with_drafts=True)
    text = (figures.ROOT / "benchmarks" / "joints.py").read_text()
    (tokens,) = source.tokenizer().encode([text])
    backend.start(source.config.backend)
    model, report = source.load(), {}
    for count, temperature in itertools.product(COUNTS, TEMPERATURES):
        prompts = [tokens[i * PROMPT :][:PROMPT] for i in range(count)]
        name = f"{count} prompts, temperature {temperature}"
        report[name] = measure(source, model, prompts, temperature)
        for k, row in report[name].items():
            print(f"{name}, {k} proposed: {row}")
    figures.save(options.json, report)


if __name__ == "__main__":
    main()
