"""Generates answers to prompts: reads the prompts once, then writes a token with each pass, or a
few if a draft proposes them.

Two programs are compiled once for each shape. `prefill` fills the layers' states from the prompts,
`decode` runs any number of passes and stops when every row is done. Shapes are rounded up, so that
prompts of many lengths share them.

A draft (multi-token prediction) proposes k tokens, one after the other. The next pass reads all of
them, samples the token after each, and keeps those before the first that was proposed otherwise,
and that one. As noise depends on a token's position alone, they are what passes over one token
would write; and the draft's own draw, with the same noise, is likely to be the same.

Shapes: B rows, P tokens of the longest prompt, S tokens of the longest row, k proposed tokens, T
tokens of a pass, 1 + k or more, V vocabulary.
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
from maxramp.parallel.axes import ROW_AXES
from maxramp.parallel.mesh import Jitted, attach_mesh, mesh_of, move_into_fsdp
from maxramp.parallel.sharding import REPLICATED, ROWS_B, ROWS_BT, without_axis

NOT_FINITE = "the weights give logits that are not numbers; take another checkpoint"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rows:
    """Prompts, each followed by its answer so far."""

    tokens_BS: Any  # int32 ids; PADDING after the last one
    log_probs_BS: Any  # float32, of the answers' tokens (`sampling.sample`), and 0 elsewhere
    lengths_B: Any  # int32, current tokens
    limits_B: Any  # int32, most tokens
    draws_B2: Any  # uint32, seed and number of the sample (`sampling.sample`)
    done_B: Any  # bool, whether the last token is a stop id, or the limit is reached
    passes_B: Any  # int32, how many wrote the answer


@dataclasses.dataclass(frozen=True)
class GenerationConfig:
    """How answers are generated."""

    max_new_tokens: int | None  # of an answer; None = as many as its prompt leaves of a row
    sampling: Sampling
    seed: int = 0  # of the draws, a uint32
    stop_ids: tuple[int, ...] = ()  # tokens that end an answer
    # of the longest prompt, for which programs are compiled; 0 = of the longest of each call
    max_prompt_tokens: int = 0
    shortest: int = 16  # tokens of the smallest shape
    num_speculative_tokens: int = 0  # that the model's first draft proposes for each pass


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to a prompt."""

    tokens: np.ndarray  # int32 ids; the last one is a stop id, unless the answer is truncated
    log_probs: np.ndarray  # float32, of each token (`sampling.sample`)
    done: bool  # whether it is complete
    truncated: bool  # whether it ended at its limit, without a stop id
    passes: int = 0  # how many wrote it: one for each token, fewer where proposed ones were right


class Generator:
    """Generates answers on the devices of a model's weights. Devices along `context` get rows of
    their own, as texts grow by one token.

    Every process of a job makes the same calls, and gets all answers. A server with a copy of the
    weights (vLLM, SGLang-JAX) could replace it in reinforcement learning: it needs `prepare`,
    `answer` and `trace_programs`.

    Attributes:
      prepare: a function from the model to its weights for the programs: layer by layer, in the
        dtype of the arithmetic, and whole on each device except over the tensor axis, so that no
        token waits for a gather. They need memory beside those of the model.
    """

    def __init__(
        self,
        keys: ModelKeys,
        model: Decoder,
        config: GenerationConfig,
        options: Mapping[str, Any] | None = None,
    ):
        """Prepares for a model, or its shapes and shardings; `options` are the compiler's. A
        ConfigError if the model is a pipeline. To propose tokens it must have a draft."""
        self.config, self._keys, mesh = config, keys, mesh_of(model)
        if mesh.shape["stage"] > 1:
            raise ConfigError(
                f"a pipeline of {mesh.shape['stage']} stages generates no text; use "
                "ici_pipeline_parallelism=1 dcn_pipeline_parallelism=1"
            )
        self._proposed = config.num_speculative_tokens
        # That a pass reads after a row's last: XLA for GPUs needs a power of two in all.
        self._ahead = (1 << self._proposed.bit_length()) - 1
        assert model.pattern.drafts or not self._proposed, "no draft to propose tokens"
        self._mesh = move_into_fsdp(mesh, "context")
        jit_options = {"compiler_options": dict(options or {}) or None}
        jit = functools.partial(Jitted, self._mesh, **jit_options)
        prepare = functools.partial(_prepare, dtype=keys.dtype, with_draft=self._proposed > 0)
        prepared = attach_mesh(Jitted(mesh, prepare).eval_shape(model), self._mesh)
        leaves, self._structure = jax.tree.flatten(prepared)
        if mesh != self._mesh:
            jit_options["out_shardings"] = [x.sharding for x in leaves]
        self.prepare = Jitted(mesh, lambda model: jax.tree.leaves(prepare(model)), **jit_options)
        self._prefill = jit(self._read_prompts, static_argnames=("length", "slots"))
        # A step reuses the memory of the states and rows of the step before.
        self._decode = jit(
            self._write, static_argnames=("sampling", "stop_ids"), donate_argnums=(1, 2)
        )
        self._gather = jit(lambda rows: jax.tree.map(lambda x: jax.reshard(x, REPLICATED), rows))

    def answer(
        self,
        weights: list[jax.Array],
        prompts: Sequence[np.ndarray],
        samples: Sequence[int] | None = None,
    ) -> list[Answer]:
        """Returns the answers to prompts (token ids), at least one; `weights` are from `prepare`.

        Draws depend only on the seed, the number of the prompt in `samples` (uint32; 0, 1, ... if
        None) and the position of a token, not on other prompts or on batches.

        Raises:
          ConfigError: a prompt is empty, has ids outside the vocabulary, is longer than
            `config.max_prompt_tokens`, or leaves no room for its answer in max_target_length.
          NotFiniteError: the weights give logits that are not numbers.
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
        """Yields all answers so far after every `every` passes (1 or more), at last those of
        `answer`, whose limits hold here too; a ConfigError comes with the first `next`."""
        self._check(prompts)
        most = max(map(self._max_new_tokens, prompts))
        sizes = self._sizes(max(map(len, prompts)))
        samples = range(len(prompts)) if samples is None else samples
        rows = jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, self._sharding(x), x.__getitem__),
            self._new_rows(prompts, samples, sizes["slots"]),
        )
        states = self._prefill(weights, rows, **sizes)
        for first in range(0, most, every):
            steps = np.int32(min(every, most - first))
            states, rows = self._decode(weights, states, rows, steps, **self._static)
            answers = _answers(jax.device_get(self._gather(rows)), prompts, self.config.stop_ids)
            yield answers
            if all(answer.done for answer in answers):
                return

    def trace_programs(
        self, model: Decoder, count: int, longest: int = 0
    ) -> dict[str, Callable[[], jax.stages.Traced]]:
        """Returns the programs of `prepare` and `answer` by name, for `count` prompts of up to
        `longest` tokens (0 = max_prompt_tokens). Lower and compile what they return: JAX keeps it,
        and a call uses it.
        """
        weights = attach_mesh(self.prepare.eval_shape(model), self._mesh)
        sizes = self._sizes(longest)
        rows = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding(x)),
            self._new_rows([np.zeros(1, np.int32)] * count, range(count), sizes["slots"]),
        )

        def decode() -> jax.stages.Traced:
            states = self._prefill.eval_shape(weights, rows, **sizes)
            return self._decode.trace(weights, states, rows, np.int32(1), **self._static)

        return {
            "preparing weights": lambda: self.prepare.trace(model),
            "reading prompts": lambda: self._prefill.trace(weights, rows, **sizes),
            "writing answers": decode,
            "gathering answers": lambda: self._gather.trace(rows),
        }

    def shape(self, count: int, longest: int) -> tuple[int, int, int]:
        """Returns the shape of the programs: rows, tokens of a prompt, and all tokens of a row."""
        sizes = self._sizes(longest)
        return self._rows(count), sizes["length"], sizes["slots"]

    @property
    def _static(self) -> dict[str, Any]:
        return {"sampling": self.config.sampling, "stop_ids": self.config.stop_ids}

    def _sizes(self, longest: int) -> dict[str, int]:
        longest, most = self.config.max_prompt_tokens or longest, self._keys.max_target_length
        new = self.config.max_new_tokens
        sizes = {"length": longest, "slots": most if new is None else longest + new}
        return {k: min(rounded_up(max(n, self.config.shortest)), most) for k, n in sizes.items()}

    def _max_new_tokens(self, prompt: np.ndarray) -> int:
        new = self.config.max_new_tokens
        return max(1, self._keys.max_target_length - len(prompt)) if new is None else new

    def _check(self, prompts: Sequence[np.ndarray]) -> None:
        """Refuses prompts without tokens, too long with their answers, or with ids that the model
        lacks."""
        longest = self._keys.max_target_length
        for number, prompt in enumerate(prompts):
            most = self._max_new_tokens(prompt)
            if not len(prompt):
                raise ConfigError(f"prompt {number} has no tokens; give it one")
            if len(prompt) + most > longest:
                raise ConfigError(
                    f"prompt {number} of {len(prompt)} tokens and an answer of up to {most} make "
                    f"{len(prompt) + most}, but max_target_length={longest} is what the model was "
                    "trained on; shorten the prompt or the answer, or raise max_target_length"
                )
            if 0 < self.config.max_prompt_tokens < len(prompt):
                raise ConfigError(
                    f"prompt {number} has {len(prompt)} tokens, more than the "
                    f"{self.config.max_prompt_tokens} that programs are compiled for; shorten it"
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
        """Returns rows of the prompts, and empty rows, which are done."""
        count = self._rows(len(prompts))
        lengths_B, draws_B2 = np.ones(count, np.int32), np.zeros((count, 2), np.uint32)
        tokens_BS, limits_B = np.full((count, slots), PADDING, np.int32), lengths_B.copy()
        for row, (prompt, number) in enumerate(zip(prompts, samples, strict=True)):
            tokens_BS[row, : len(prompt)], lengths_B[row] = prompt, len(prompt)
            draws_B2[row] = self.config.seed, number
            limits_B[row] = len(prompt) + self._max_new_tokens(prompt)
        return Rows(
            tokens_BS=tokens_BS,
            log_probs_BS=np.zeros((count, slots), np.float32),
            lengths_B=lengths_B,
            limits_B=limits_B,
            draws_B2=draws_B2,
            done_B=np.arange(count) >= len(prompts),
            passes_B=np.zeros(count, np.int32),
        )

    def _sharding(self, x: np.ndarray) -> NamedSharding:
        return NamedSharding(self._mesh, ROWS_BT if x.ndim == 2 else ROWS_B)

    def _read_prompts(
        self, weights: list[jax.Array], rows: Rows, length: int, slots: int
    ) -> tuple[tuple[Any, ...], jax.Array | None]:
        """Returns the states after each prompt but its last token, with room for rows of `slots`
        tokens, and the draft's vector for the token after that one. No prompt is longer than
        `length`."""
        model, keys = self._structure.unflatten(weights), self._keys
        count, ahead = len(rows.lengths_B), self._ahead
        states = [block.mixer.empty_state(keys, count, length) for block in model.layers]
        first_B = jnp.zeros_like(rows.lengths_B)
        # `_write` begins with the last token of every prompt.
        valid_BT = jnp.arange(length) < rows.lengths_B[:, None] - 1
        x_BTD, states = model.read(rows.tokens_BS[:, :length], first_B, states, keys, valid_BT)
        if ahead:
            ahead_BT = jnp.roll(rows.tokens_BS, -1, 1)[:, :length]
            x_BTD, states = model.read_draft(x_BTD, ahead_BT, first_B, states, keys, valid_BT)
        states = tuple(
            state.resize(slots + ahead, layer.mixing(keys), rows.lengths_B, ahead)
            for state, layer in zip(states, model.pattern, strict=False)
        )
        return states, _map_rows(_pick, x_BTD, rows.lengths_B - 2) if ahead else None

    def _propose(
        self,
        model: Decoder,
        x_B1D: jax.Array | None,
        states: tuple[Any, ...],
        rows: Rows,
        sampling: Sampling,
    ) -> jax.Array:
        """Returns the last token of each row and k that its draft proposes after it, [B, T] with
        zeros behind them, from the draft's vector for the first of these; its state has all tokens
        but the last. What the draft reads of its own leaves no trace."""
        tokens = [_map_rows(_last, rows)]
        for i in range(self._proposed):
            if i:
                first_B = rows.lengths_B + (i - 2)
                x_B1D, states = model.read_draft(x_B1D, tokens[-1], first_B, states, self._keys)
            draw = functools.partial(_draw, sampling=sampling, ahead=i)
            tokens.append(_map_rows(draw, rows, model.logits(x_B1D)))
        return jnp.pad(jnp.concatenate(tokens, 1), ((0, 0), (0, self._ahead - self._proposed)))

    def _write(
        self,
        weights: list[jax.Array],
        states: tuple[tuple[Any, ...], jax.Array | None],
        rows: Rows,
        steps: jax.Array,
        sampling: Sampling,
        stop_ids: tuple[int, ...],
    ) -> tuple[tuple[tuple[Any, ...], jax.Array | None], Rows]:
        """Runs up to `steps` passes, each of which appends one token or more to every row that is
        not done; reuses the memory of `states` and `rows`."""
        model = self._structure.unflatten(weights)
        append = functools.partial(_append, sampling=sampling, stop_ids=stop_ids)

        def is_unfinished(carry: tuple) -> jax.Array:
            step, _, rows = carry
            return (step < steps) & ~jnp.all(rows.done_B)

        def write(carry: tuple) -> tuple:
            step, (states, x_B1D), rows = carry
            # Reads the last token again in prompts and in rows that are done, else for the first
            # time.
            first_B = rows.lengths_B - 1
            tokens_BT = self._propose(model, x_B1D, states, rows, sampling)
            x_BTD, states = model.read(tokens_BT, first_B, states, self._keys)
            proposed_BT = tokens_BT.at[:, 1 + self._proposed :].set(-1)  # what fills up is none
            written = _map_rows(append, rows, proposed_BT, model.logits(x_BTD))
            if not self._proposed:
                return step + 1, (states, None), written
            ahead = functools.partial(_tokens_from, count=1 + self._ahead)
            ahead_BT = _map_rows(ahead, written, rows.lengths_B)
            x_BTD, states = model.read_draft(x_BTD, ahead_BT, first_B, states, self._keys)
            counts_B = written.lengths_B - rows.lengths_B
            states = tuple(state.keep(counts_B) for state in states)
            return step + 1, (states, _map_rows(_pick, x_BTD, counts_B - 1)), written

        _, states, rows = jax.lax.while_loop(is_unfinished, write, (jnp.int32(0), states, rows))
        return states, rows


def rounded_up(number: int) -> int:
    """Rounds 1 or more up to one of 1, 2, 3, 4, 6, 8, 12, ..., the sizes of shapes."""
    power = 1 << (number - 1).bit_length()
    return power * 3 // 4 if number <= power * 3 // 4 and power > 2 else power


def _prepare(model: Decoder, dtype: str, with_draft: bool) -> Decoder:
    def gather(weight: jax.Array) -> jax.Array:
        return jax.reshard(weight, without_axis(jax.typeof(weight).sharding.spec, "fsdp"))

    return jax.tree.map(gather, model.cast(dtype).one_by_one(with_draft))


def _map_rows(function: Callable, *arrays: Any) -> Any:
    """Applies a function of arrays [B, ...] on every device to its own rows."""
    arrays = jax.tree.map(lambda x: jax.reshard(x, ROWS_B), arrays)
    return jax.shard_map(function, in_specs=ROWS_B, out_specs=ROWS_B, check_vma=False)(*arrays)


def _last(rows: Rows) -> jax.Array:
    """Returns the last token of every row: [B, 1]."""
    return jnp.take_along_axis(rows.tokens_BS, rows.lengths_B[:, None] - 1, axis=1)


def _tokens_from(rows: Rows, first_B: jax.Array, count: int) -> jax.Array:
    index_BT = first_B[:, None] + jnp.arange(count)
    return jnp.take_along_axis(rows.tokens_BS, index_BT, axis=1, mode="clip")


def _pick(x_BTD: jax.Array, index_B: jax.Array) -> jax.Array:
    """Returns one vector of each row, [B, 1, D]; the first where the index is below 0."""
    return jnp.take_along_axis(x_BTD, jnp.maximum(index_B, 0)[:, None, None], axis=1)


def _draw(rows: Rows, logits_B1V: jax.Array, sampling: Sampling, ahead: int) -> jax.Array:
    """Samples the token `ahead` tokens after each row's next one: [B, 1]."""
    return sample(logits_B1V[:, 0], sampling, rows.draws_B2, rows.lengths_B + ahead)[0][:, None]


def _append(
    rows: Rows,
    read_BT: jax.Array,
    logits_BTV: jax.Array,
    sampling: Sampling,
    stop_ids: tuple[int, ...],
) -> Rows:
    """Samples the token after each of those that were read: a row's last and the proposed ones.
    Appends to each row that is not done the first, and each next one as long as the one before it
    is as proposed and does not end the row: with a stop id, or at its limit."""
    (B, S), (_, T, V) = rows.tokens_BS.shape, logits_BTV.shape
    positions_BT = rows.lengths_B[:, None] + jnp.arange(T)
    draws = jnp.repeat(rows.draws_B2, T, axis=0), positions_BT.ravel()
    sampled = sample(logits_BTV.reshape(B * T, V), sampling, *draws)
    tokens_BT, log_probs_BT = (x.reshape(B, T) for x in sampled)
    ends_BT = jnp.isin(tokens_BT, jnp.asarray(stop_ids, jnp.int32))
    ends_BT |= positions_BT + 1 >= rows.limits_B[:, None]
    has_next_Bk = (tokens_BT[:, :-1] == read_BT[:, 1:]) & ~ends_BT[:, :-1]
    is_new_BT = jnp.concatenate([~rows.done_B[:, None], has_next_Bk], axis=1)
    is_new_BT = jnp.cumprod(is_new_BT, axis=1, dtype=jnp.int32) > 0
    index = jnp.arange(B)[:, None], jnp.where(is_new_BT, positions_BT, S)  # S: nowhere
    return dataclasses.replace(
        rows,
        tokens_BS=rows.tokens_BS.at[index].set(tokens_BT, mode="drop"),
        log_probs_BS=rows.log_probs_BS.at[index].set(log_probs_BT, mode="drop"),
        lengths_B=rows.lengths_B + is_new_BT.sum(1),
        done_B=rows.done_B | (is_new_BT & ends_BT).any(1),
        passes_B=rows.passes_B + ~rows.done_B,
    )


def _answers(rows: Rows, prompts: Sequence[np.ndarray], stop_ids: Sequence[int]) -> list[Answer]:
    """Reads the answers so far from rows on the host; a NotFiniteError if a log-probability is
    NaN."""
    if np.isnan(rows.log_probs_BS).any():
        raise NotFiniteError(NOT_FINITE)
    answers = []
    for row, prompt in enumerate(prompts):
        answer, done = np.s_[row, len(prompt) : rows.lengths_B[row]], bool(rows.done_B[row])
        tokens, log_probs = rows.tokens_BS[answer].copy(), rows.log_probs_BS[answer].copy()
        truncated = done and tokens[-1] not in stop_ids
        passes = int(rows.passes_B[row])
        answers.append(Answer(tokens, log_probs, done, truncated, passes))
    return answers
