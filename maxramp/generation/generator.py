"""Answers to prompts: read the prompts once, then write a token at a time.

Two programs, compiled once for each shape. `prefill` fills the states with the prompts, `decode`
goes through any number of further tokens and stops when every row is done. Shapes are rounded up,
so that prompts of many lengths share them.

Shapes: B rows, P tokens of the longest prompt, S tokens of the longest row, V vocabulary.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from maxramp.data.rows import PADDING
from maxramp.errors import ConfigError, NotFiniteError
from maxramp.generation.sampling import Sampling, sample
from maxramp.model.decoder import Decoder
from maxramp.model.keys import ModelKeys
from maxramp.model.mixers.mixer import State
from maxramp.parallel.axes import ROW_AXES
from maxramp.parallel.mesh import Jitted, attach_mesh, mesh_of, move_into_fsdp
from maxramp.parallel.sharding import REPLICATED, ROWS_B, ROWS_BT, without_axis

NO_NUMBERS = "the weights give logits that are not numbers; take another checkpoint"
_FEWEST_TOKENS = 16  # of a shape


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Prompts, and the answers behind them as far as they are written."""

    tokens_BS: Any  # int32 ids; PADDING behind the last one
    log_probs_BS: Any  # float32, of the answers' tokens (`sampling.sample`), and 0 elsewhere
    lengths_B: Any  # int32, tokens that there are
    limits_B: Any  # int32, tokens that there may be
    draws_B2: Any  # uint32, the numbers that a row's draws depend on (`sampling.sample`)
    done_B: Any  # bool, whether the last token is one that stops, or the limit is reached


@dataclasses.dataclass(frozen=True)
class Writing:
    """How answers are written."""

    most_tokens: int | None  # of an answer; None = as many as its prompt leaves of a row
    sampling: Sampling
    seed: int = 0  # of the draws, a uint32
    stops: tuple[int, ...] = ()  # ids that end an answer
    room: int = 0  # tokens of the longest prompt that shares these programs; 0 = of those at hand


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a model wrote behind a prompt."""

    tokens: np.ndarray  # int32 ids; the last one stops, unless the answer is truncated
    log_probs: np.ndarray  # float32, of each (`sampling.sample`)
    done: bool  # nothing more will come
    truncated: bool  # it ended at its limit, without a token that stops


class Generator:
    """Writes answers with the weights that it is given, on their devices. Those along `context`
    have rows of their own here, as texts grow by one token.

    Every process of a job calls it alike, and gets all answers. A server that keeps a copy of the
    weights (vLLM, SGLang-JAX) could take its place in reinforcement learning: what has `prepare`,
    `answer` and `trace_programs`.

    Attributes:
      prepare: the model -> its weights as the programs read them: one layer after the other, in the
        dtype of the arithmetic, and whole on each device but for the tensor axis, so that no token
        waits until they are gathered. They take room beside those of the model.
    """

    def __init__(
        self,
        keys: ModelKeys,
        model: Decoder,
        writing: Writing,
        options: Mapping[str, Any] | None = None,
    ):
        """`model` may be its shapes and shardings; `options` are the compiler's."""
        self.writing, self._keys, mesh = writing, keys, mesh_of(model)
        if mesh.shape["stage"] > 1:
            raise ConfigError(
                f"a pipeline of {mesh.shape['stage']} stages generates no text; use "
                "ici_pipeline_parallelism=1 dcn_pipeline_parallelism=1"
            )
        self._mesh = move_into_fsdp(mesh, "context")
        given = {"compiler_options": dict(options or {}) or None}
        jit = functools.partial(Jitted, self._mesh, **given)
        prepared = functools.partial(_prepare, dtype=keys.dtype)
        made = attach_mesh(Jitted(mesh, prepared).eval_shape(model), self._mesh)
        leaves, self._structure = jax.tree.flatten(made)
        if mesh != self._mesh:
            given["out_shardings"] = [x.sharding for x in leaves]
        self.prepare = Jitted(mesh, lambda model: jax.tree.leaves(prepared(model)), **given)
        self._prefill = jit(self._read_prompts, static_argnames=("length", "slots"))
        # The states and rows of a step take the place of those of the step before.
        self._decode = jit(
            self._write, static_argnames=("sampling", "stops"), donate_argnums=(1, 2)
        )
        self._gather = jit(lambda rows: jax.tree.map(lambda x: jax.reshard(x, REPLICATED), rows))

    def answer(
        self,
        weights: list[jax.Array],
        prompts: Sequence[np.ndarray],
        samples: Sequence[int] | None = None,
    ) -> list[Answer]:
        """The answers to prompts (token ids). Draws depend on the seed, the number of the prompt in
        `samples` (0, 1, ...) and the position of a token, so neither on the prompts beside it nor
        on how they are cut into batches. A ConfigError where a prompt is empty or too long, a
        NotFiniteError where the weights give no numbers.
        """
        *_, answers = self.stream(weights, prompts, samples, self._keys.max_target_length)
        return answers

    def stream(
        self,
        weights: list[jax.Array],
        prompts: Sequence[np.ndarray],
        samples: Sequence[int] | None = None,
        every: int = 1,
    ) -> Iterator[list[Answer]]:
        """`answer`, with the unfinished answers after every `every` tokens."""
        self._check(prompts)
        most, how = max(map(self._most_tokens, prompts)), self._how
        sizes = self._sizes(max(map(len, prompts)))
        samples = range(len(prompts)) if samples is None else samples
        rows = jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, self._sharding(x), x.__getitem__),
            self._new_rows(prompts, samples, sizes["slots"]),
        )
        states = self._prefill(weights, rows, **sizes)
        for first in range(0, most, every):
            steps = np.int32(min(every, most - first))
            states, rows = self._decode(weights, states, rows, steps, **how)
            answers = _answers(jax.device_get(self._gather(rows)), prompts, how["stops"])
            yield answers
            if all(answer.done for answer in answers):
                return

    def trace_programs(
        self, model: Decoder, count: int, longest: int = 0
    ) -> dict[str, Callable[[], jax.stages.Traced]]:
        """The programs of `prepare` and `answer` for this many prompts, the longest of `longest`
        tokens (0 = `room`). Lower and compile what they return, and a call finds it: JAX keeps what
        it lowers.
        """
        weights = attach_mesh(self.prepare.eval_shape(model), self._mesh)
        sizes = self._sizes(longest)
        rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding(x)),
            self._new_rows([np.zeros(1, np.int32)] * count, range(count), sizes["slots"]),
        )

        def decode() -> jax.stages.Traced:
            states = self._prefill.eval_shape(weights, rows, **sizes)
            return self._decode.trace(weights, states, rows, np.int32(1), **self._how)

        return {
            "preparing weights": lambda: self.prepare.trace(model),
            "reading prompts": lambda: self._prefill.trace(weights, rows, **sizes),
            "writing answers": decode,
            "gathering them": lambda: self._gather.trace(rows),
        }

    def shape(self, count: int, longest: int) -> tuple[int, int, int]:
        """Rows, tokens that are read at once and all tokens of a row: prompts share programs."""
        sizes = self._sizes(longest)
        return self._rows(count), sizes["length"], sizes["slots"]

    @property
    def _how(self) -> dict[str, Any]:
        return {"sampling": self.writing.sampling, "stops": self.writing.stops}

    def _sizes(self, longest: int) -> dict[str, int]:
        longest, most = self.writing.room or longest, self._keys.max_target_length
        slots = most if self.writing.most_tokens is None else longest + self.writing.most_tokens
        sizes = {"length": longest, "slots": slots}
        return {k: min(rounded_up(max(n, _FEWEST_TOKENS)), most) for k, n in sizes.items()}

    def _most_tokens(self, prompt: np.ndarray) -> int:
        most = self.writing.most_tokens
        return max(1, self._keys.max_target_length - len(prompt)) if most is None else most

    def _check(self, prompts: Sequence[np.ndarray]) -> None:
        longest = self._keys.max_target_length
        for number, prompt in enumerate(prompts):
            most = self._most_tokens(prompt)
            if not len(prompt):
                raise ConfigError(f"prompt {number} has no tokens; give it one")
            if len(prompt) + most > longest:
                raise ConfigError(
                    f"prompt {number} of {len(prompt)} tokens and an answer of up to {most} make "
                    f"{len(prompt) + most}, but max_target_length={longest} is what the model was "
                    "trained on; shorten the prompt or the answer, or raise max_target_length"
                )
            if prompt.min() < 0 or prompt.max() >= self._keys.vocab_size:
                raise ConfigError(
                    f"prompt {number}: its token ids are {prompt.min()} to {prompt.max()}, and "
                    f"vocab_size={self._keys.vocab_size}; use the tokenizer of the training data"
                )

    def _rows(self, count: int) -> int:
        ranks = math.prod(self._mesh.shape[axis] for axis in ROW_AXES)
        return ranks * rounded_up(-(-count // ranks))

    def _new_rows(self, prompts: Sequence[np.ndarray], samples: Sequence[int], slots: int) -> Rows:
        """Rows of prompts, and of nothing, which are done."""
        count = self._rows(len(prompts))
        lengths_B, draws_B2 = np.ones(count, np.int32), np.zeros((count, 2), np.uint32)
        tokens_BS, limits_B = np.full((count, slots), PADDING, np.int32), lengths_B.copy()
        for row, (prompt, number) in enumerate(zip(prompts, samples, strict=True)):
            tokens_BS[row, : len(prompt)], lengths_B[row] = prompt, len(prompt)
            draws_B2[row] = self.writing.seed, number
            limits_B[row] = len(prompt) + self._most_tokens(prompt)
        return Rows(
            tokens_BS=tokens_BS,
            log_probs_BS=np.zeros((count, slots), np.float32),
            lengths_B=lengths_B,
            limits_B=limits_B,
            draws_B2=draws_B2,
            done_B=np.arange(count) >= len(prompts),
        )

    def _sharding(self, x: np.ndarray) -> NamedSharding:
        return NamedSharding(self._mesh, ROWS_BT if x.ndim == 2 else ROWS_B)

    def _read_prompts(self, weights: list[jax.Array], rows: Rows, length: int, slots: int):
        """Returns states that remember the first `length` tokens of every row, for `slots`."""
        model, keys, count = self._structure.unflatten(weights), self._keys, len(rows.lengths_B)
        empty = [block.mixer.empty_state(keys, count, length) for block in model.layers]
        first_B = jnp.zeros_like(rows.lengths_B)
        _, states = model.read(rows.tokens_BS[:, :length], first_B, empty, keys)
        return tuple(
            state.resize(slots, layer.mixing(keys), rows.lengths_B)
            for state, layer in zip(states, model.pattern, strict=True)
        )

    def _write(
        self,
        weights: list[jax.Array],
        states: tuple[State, ...],
        rows: Rows,
        steps: jax.Array,
        sampling: Sampling,
        stops: tuple[int, ...],
    ) -> tuple[tuple[State, ...], Rows]:
        """Up to `steps` more tokens for every row that is not done."""
        model = self._structure.unflatten(weights)
        append = functools.partial(_append, sampling=sampling, stops=stops)

        def is_unfinished(carry: tuple) -> jax.Array:
            step, _, rows = carry
            return (step < steps) & ~jnp.all(rows.done_B)

        def write(carry: tuple) -> tuple:
            step, states, rows = carry
            # The last token is read, for the first time but in prompts and in rows that are done.
            first_B = rows.lengths_B - 1
            x_B1D, states = model.read(_map_rows(_last, rows), first_B, states, self._keys)
            return step + 1, states, _map_rows(append, rows, model.logits(x_B1D)[:, 0])

        _, states, rows = jax.lax.while_loop(is_unfinished, write, (jnp.int32(0), states, rows))
        return states, rows


def rounded_up(number: int) -> int:
    """The least of 1, 2, 3, 4, 6, 8, 12, ... that is not smaller: sizes that shapes share."""
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if number <= power * 3 // 4 and power > 2 else power


def _prepare(model: Decoder, dtype: str) -> Decoder:
    def gather(weight: jax.Array) -> jax.Array:
        return jax.reshard(weight, without_axis(jax.typeof(weight).sharding.spec, "fsdp"))

    return jax.tree.map(gather, model.cast(dtype).one_by_one())


def _map_rows(function: Callable, *arrays: Any) -> Any:
    """A function of arrays [B, ...], on every device of its rows alone."""
    arrays = jax.tree.map(lambda x: jax.reshard(x, ROWS_B), arrays)
    return jax.shard_map(function, in_specs=ROWS_B, out_specs=ROWS_B, check_vma=False)(*arrays)


def _last(rows: Rows) -> jax.Array:
    """The last token of every row: [B, 1]."""
    return jnp.take_along_axis(rows.tokens_BS, rows.lengths_B[:, None] - 1, axis=1)


def _append(rows: Rows, logits_BV: jax.Array, sampling: Sampling, stops: tuple[int, ...]) -> Rows:
    """The rows with one more token each, but for those that are done."""
    tokens_B, log_probs_B = sample(logits_BV, sampling, rows.draws_B2, rows.lengths_B)
    B, S = rows.tokens_BS.shape
    place = jnp.arange(B), jnp.where(rows.done_B, S, rows.lengths_B)  # S: nowhere
    lengths_B = rows.lengths_B + ~rows.done_B
    stopped_B = jnp.isin(tokens_B, jnp.asarray(stops, jnp.int32))
    return dataclasses.replace(
        rows,
        tokens_BS=rows.tokens_BS.at[place].set(tokens_B, mode="drop"),
        log_probs_BS=rows.log_probs_BS.at[place].set(log_probs_B, mode="drop"),
        lengths_B=lengths_B,
        done_B=rows.done_B | stopped_B | (lengths_B >= rows.limits_B),
    )


def _answers(rows: Rows, prompts: Sequence[np.ndarray], stops: Sequence[int]) -> list[Answer]:
    if np.isnan(rows.log_probs_BS).any():
        raise NotFiniteError(NO_NUMBERS)
    answers = []
    for row, prompt in enumerate(prompts):
        answer, done = np.s_[row, len(prompt) : rows.lengths_B[row]], bool(rows.done_B[row])
        tokens, log_probs = rows.tokens_BS[answer].copy(), rows.log_probs_BS[answer].copy()
        answers.append(Answer(tokens, log_probs, done, done and tokens[-1] not in stops))
    return answers
