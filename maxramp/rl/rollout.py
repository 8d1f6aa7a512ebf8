"""Who writes the answers: an interface, and our generator behind it.

A server that keeps a copy of the weights (vLLM, SGLang-JAX) would be another implementation.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from maxramp.generation.generator import Answer, Generator
from maxramp.generation.loading import PromptTokenizer
from maxramp.generation.sampling import Sampling
from maxramp.model.decoder import Decoder
from maxramp.model.keys import ModelKeys
from maxramp.rl.keys import RolloutKeys


class Rollout(Protocol):
    """Writes answers with the weights of a step."""

    def prepare(self, model: Decoder) -> Any:
        """The weights as `answer` takes them: called once a step, before its answers."""
        ...

    def answer(
        self, weights: Any, prompts: Sequence[np.ndarray], samples: Sequence[int]
    ) -> list[Answer]:
        """Answers to prompts, on every process the same.

        Args:
          weights: from `prepare`.
          prompts: ids of each.
          samples: a number for each, which with `rollout_seed` decides what is drawn.
        """
        ...

    def traced(self, model: Decoder, count: int) -> dict[str, Callable]:
        """The programs of this process for `count` prompts (`Generator.traced`), by name."""
        ...


class GeneratorRollout:
    """Answers of `generation.generator`, on the devices that train."""

    def __init__(
        self,
        keys: RolloutKeys,
        temperature: float,
        model: ModelKeys,
        weights: Decoder,
        tokenizer: PromptTokenizer,
        options: Mapping[str, Any],
    ):
        """
        Args:
          keys: how answers are sampled.
          temperature: of the draws.
          model: its keys, resolved.
          weights: abstract.
          tokenizer: of the model.
          options: of the compiler (`training.programs.compiler_options`).
        """
        sampling = Sampling(temperature, vocab_size=tokenizer.tokenizer.vocab_size)
        self._most, self._seed = keys.max_completion_length, keys.rollout_seed
        self._room = model.max_target_length - keys.max_completion_length
        self._sampling, self._ends = sampling, tuple(tokenizer.ends)
        self._generator = Generator(model, weights, options)

    def prepare(self, model: Decoder) -> list[jax.Array]:
        """As `Generator.prepare`."""
        return self._generator.prepare(model)

    def answer(
        self, weights: list[jax.Array], prompts: Sequence[np.ndarray], samples: Sequence[int]
    ) -> list[Answer]:
        """As `Rollout.answer`; whatever the prompts' lengths, for one number of them these are the
        same programs."""
        return self._generator.generate(
            weights,
            prompts,
            self._most,
            self._sampling,
            self._seed,
            self._ends,
            samples,
            self._room,
        )

    def traced(self, model: Decoder, count: int) -> dict[str, Callable]:
        """As `Generator.traced`."""
        return self._generator.traced(
            model, count, self._room, self._most, self._sampling, self._ends
        )
