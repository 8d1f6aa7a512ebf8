"""Likelihoods of texts, and answers to prompts: what lm-eval needs of a model.

Every process of a job calls this alike, and gets all results. Rows are sorted by length and padded
on the right to a few lengths, so that few programs are compiled, in the background while the first
ones run.

Shapes: B rows, T tokens of a row.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from maxramp.data.rows import PADDING
from maxramp.errors import ConfigError, NotFiniteError
from maxramp.generation.generator import NOT_FINITE, Answer, GenerationConfig, Generator, rounded_up
from maxramp.handover.opening import PromptTokenizer
from maxramp.model.decoder import Decoder
from maxramp.parallel.axes import ROW_AXES, TOKEN_AXES
from maxramp.parallel.compiler import compiler_options
from maxramp.parallel.mesh import Jitted, mesh_of
from maxramp.parallel.sharding import REPLICATED, ROWS_BT
from maxramp.training.background_compiler import BackgroundCompiler
from maxramp.training.keys import Recipe
from maxramp.training.log_probs import scores

_FEWEST_TOKENS = 16  # of a shape
_TOKENS_AT_ONCE = 8192  # of a device in a pass, where no batch size is given
_QUEUED = 2  # passes that wait on the devices before the results of the first are read
_CHECK_EVERY = 16  # tokens that are written between two searches for a text that ends an answer


@dataclasses.dataclass(frozen=True)
class Scored:
    """A row of tokens, of which the last ones are scored."""

    tokens: list[int]
    count: int  # of the last tokens, below len(tokens)


class Scorer:
    """Scores and continues rows of tokens with a model's weights, on their mesh."""

    def __init__(
        self,
        recipe: Recipe,
        model: Decoder,
        tokenizer: PromptTokenizer,
        compiler: BackgroundCompiler,
        batch_size: int = 0,
        beat: Callable[[str], None] = lambda line: None,
    ):
        """Prepares for the weights of a model; nothing is compiled yet.

        Args:
          recipe: its `max_target_length` is the longest row, its loss says how many logits exist
            at a time on a device.
          model: its shapes and shardings.
          batch_size: rows of a device in a pass; 0 = as many as make 8,192 tokens.
          beat: called when a pass or a part of one is done, with how far the work is, on all
            processes after the same part; what it raises ends the work.
        """
        self.keys, self._abstract, self._mesh = recipe.model, model, mesh_of(model)
        self._block_tokens = recipe.loss.loss_block_tokens
        self._tokenizer, self._ends = tokenizer.tokenizer, tuple(tokenizer.ends)
        self._compiler, self._batch_size, self._beat = compiler, batch_size, beat
        self._options = compiler_options(self._mesh.devices.flat[0].platform)
        self._score = Jitted(self._mesh, self._scores, compiler_options=self._options or None)
        self._generators: dict[GenerationConfig, Generator] = {}
        shape = self._mesh.shape
        self._ranks = math.prod(shape[axis] for axis in ROW_AXES)
        self._parts = math.prod(shape[axis] for axis in TOKEN_AXES)
        parts = max(1, self.keys.num_pipeline_microbatches) if shape["stage"] > 1 else 1
        # The rows of a pass are a multiple of this, so that every device of a rank has as many, and
        # every micro batch of a pipeline.
        self._unit = self._ranks // shape["stage"] * math.lcm(shape["stage"], parts)

    def score(self, model: Decoder, rows: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Returns the log-probability of each row's last tokens, and whether each of them is the
        likeliest; raises a NotFiniteError if the weights give no numbers.

        Every process calls it with the same rows, of 2 to max_target_length + 1 tokens: a caller
        cuts longer ones.
        """
        scored: list[Any] = [None] * len(rows)
        waiting: collections.deque[tuple[list[int], Any]] = collections.deque()
        done = 0

        def read() -> None:
            nonlocal done
            numbers, results = waiting.popleft()
            log_p_BT, is_first_BT = jax.device_get(results)
            for b, number in enumerate(numbers):
                end = len(rows[number].tokens) - 1
                last = np.s_[b, end - rows[number].count : end]
                total = float(log_p_BT[last].sum(dtype=np.float64))
                if math.isnan(total):
                    raise NotFiniteError(NOT_FINITE)
                scored[number] = total, bool(is_first_BT[last].all())
            done += len(numbers)
            self._beat(f"tasks    {done:,} of {len(rows):,} rows have their likelihoods")

        for (B, T), numbers in self.expect_scores([len(row.tokens) - 1 for row in rows]):
            program, _ = self._compiler.get(self._key(B, T))
            arrays = self._arrays(B, T, [rows[n] for n in numbers])
            waiting.append((numbers, program(model, *arrays)))
            self._compiler.lower()
            if len(waiting) > _QUEUED:
                read()
        while waiting:
            read()
        return scored

    def write(
        self,
        model: Decoder,
        prompts: Sequence[Sequence[int]],
        generation: GenerationConfig,
        until: Sequence[str],
    ) -> list[str]:
        """Returns the text that the model writes behind each prompt (token ids), up to any of the
        texts in `until`; the ids that end an answer are the scorer's. Prompts too long for the rows
        lose their beginning. Every process calls it alike; raises as `Generator.answer`, and as
        `expect_answers`."""
        lengths = [len(prompt) for prompt in prompts]
        passes = self.expect_answers(lengths, generation)
        room = self.keys.max_target_length - generation.max_new_tokens
        prompts = [np.asarray(prompt[-room:], np.int32) for prompt in prompts]
        generator = self._generator(generation)
        weights, texts, done = None, [""] * len(prompts), 0
        for programs, numbers in passes:
            for program in programs:
                self._compiler.get(program)
            weights = weights or generator.prepare(model)
            self._compiler.lower()
            pass_prompts = [prompts[n] for n in numbers]
            for answers in generator.stream(weights, pass_prompts, numbers, every=_CHECK_EVERY):
                self._beat(f"tasks    {done:,} of {len(prompts):,} prompts have their answers")
                decoded = [self._text(answer, until) for answer in answers]
                if all(is_whole for _, is_whole in decoded):
                    break
            for number, (text, _) in zip(numbers, decoded, strict=True):
                texts[number] = text
            done += len(numbers)
        return texts

    def expect_scores(self, lengths: Sequence[int]) -> list[tuple[tuple[int, int], list[int]]]:
        """Announces the programs for `score`, on all processes alike; returns the shape [B, T] of
        each pass, and the numbers of its rows. A row has a token more than its length here, which
        is 1 to max_target_length.
        """
        passes = self._passes(lengths)
        for (B, T), _ in passes:
            name = f"the score of {B} rows of {T} tokens"
            trace = functools.partial(self.trace, B, T)
            self._announce(self._key(B, T), name, trace)
        return passes

    def expect_answers(
        self, lengths: Sequence[int], generation: GenerationConfig
    ) -> list[tuple[list[Hashable], list[int]]]:
        """Announces the programs for `write`, on all processes alike, by the lengths of prompts;
        returns the keys of each pass's programs, and the numbers of its prompts. A ConfigError if
        answers of `max_new_tokens`, which must be a number, leave no room for a prompt.
        """
        max_new_tokens = generation.max_new_tokens
        room = self.keys.max_target_length - max_new_tokens
        if room < 1:
            raise ConfigError(
                f"max_gen_toks={max_new_tokens} of a task leaves no room for a prompt in rows of "
                f"max_target_length={self.keys.max_target_length}; raise that, or have the task "
                "ask for less (of maxramp.evaluate, --gen_kwargs max_gen_toks=N)"
            )
        lengths = [min(length, room) for length in lengths]
        generator, passes = self._generator(generation), []
        # An answer's rows are longer than its prompt: passes by prompts alone would be too large.
        for _, numbers in self._passes([length + max_new_tokens for length in lengths]):
            longest = max(lengths[n] for n in numbers)
            passes.append((self._expect_writing(generator, len(numbers), longest), numbers))
        return passes

    def _expect_writing(self, generator: Generator, count: int, longest: int) -> list[Hashable]:
        """Announces the programs that answer `count` prompts of up to `longest` tokens; returns
        their keys."""
        B, P, S = shape = generator.shape(count, longest)
        keys = []
        for name, trace in generator.trace_programs(self._abstract, count, longest).items():
            key = name, self, generator.config
            if name != "preparing weights":
                key = *key, shape
                name = f"{name}, {B} rows of {P} tokens and up to {S - P} more"
            self._announce(key, name, trace)
            keys.append(key)
        return keys

    def trace(self, B: int, T: int) -> jax.stages.Traced:
        sharding = NamedSharding(self._mesh, ROWS_BT)
        ids = jax.ShapeDtypeStruct((B, T), np.int32, sharding=sharding)
        return self._score.trace(self._abstract, ids, ids)

    def _scores(self, model: Decoder, tokens_BT: jax.Array, targets_BT: jax.Array):
        model, dtype = model.cast(self.keys.dtype), self.keys.dtype
        x_BTD, _ = model.hidden(tokens_BT, self.keys)
        limits = self._block_tokens, model.logits_cap
        results = scores(x_BTD, model.head(dtype), targets_BT, *limits)
        return tuple(jax.reshard(x_BT, REPLICATED) for x_BT in results)

    def _announce(self, key: Hashable, name: str, trace: Callable[[], Any]) -> None:
        self._compiler.announce(key, name, self._mesh, lambda: trace().lower())

    def _key(self, B: int, T: int) -> Hashable:
        return "score", self, B, T  # another scorer's positions or windows may differ, on this mesh

    def _generator(self, generation: GenerationConfig) -> Generator:
        generation = dataclasses.replace(generation, stop_ids=self._ends)
        if generation not in self._generators:
            generator = Generator(self.keys, self._abstract, generation, self._options)
            self._generators[generation] = generator
        return self._generators[generation]

    def _arrays(self, B: int, T: int, rows: Sequence[Scored]) -> tuple[jax.Array, jax.Array]:
        """Lays at most B rows of at most T + 1 tokens, the same on all processes, on the devices:
        returns int32 tokens and targets [B, T], padded with PADDING."""
        tokens_BT = np.full((B, T), PADDING, np.int32)
        targets_BT = tokens_BT.copy()
        for b, row in enumerate(rows):
            tokens_BT[b, : len(row.tokens) - 1] = row.tokens[:-1]
            targets_BT[b, : len(row.tokens) - 1] = row.tokens[1:]
        sharding = NamedSharding(self._mesh, ROWS_BT)
        return tuple(
            jax.make_array_from_callback((B, T), sharding, x_BT.__getitem__)
            for x_BT in (tokens_BT, targets_BT)
        )

    def _passes(self, lengths: Sequence[int]) -> list[tuple[tuple[int, int], list[int]]]:
        """Returns the shapes [B, T] of passes, and the numbers of their rows, the longest first:
        what is too large for the memory fails at once."""
        order = sorted(range(len(lengths)), key=lambda n: (-lengths[n], n))
        passes = []
        longest = self.keys.max_target_length
        rounded = [max(n, min(rounded_up(max(n, _FEWEST_TOKENS)), longest)) for n in lengths]
        rounded = [-(-n // self._parts) * self._parts for n in rounded]
        for T, group in itertools.groupby(order, rounded.__getitem__):
            numbers = list(group)
            most = self._rows(self._batch_size or max(1, _TOKENS_AT_ONCE // T))
            B = min(most, self._rows(rounded_up(-(-len(numbers) // self._ranks))))
            passes += [((B, T), numbers[i : i + B]) for i in range(0, len(numbers), B)]
        return passes

    def _rows(self, rank_rows: int) -> int:
        return -(-rank_rows * self._ranks // self._unit) * self._unit

    def _text(self, answer: Answer, until: Sequence[str]) -> tuple[str, bool]:
        """Returns the text of an answer so far, and whether it is whole."""
        ids = answer.tokens[: len(answer.tokens) - (answer.done and not answer.truncated)]
        text = self._tokenizer.decode(ids)
        for special in self._tokenizer.model.special:
            text = text.replace(special, "")
        stops = [text.find(stop) for stop in until if stop and stop in text]
        return (text[: min(stops)], True) if stops else (text, answer.done)
