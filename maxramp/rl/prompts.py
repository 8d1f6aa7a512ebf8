"""Prompts by number: number i of a run is the same prompt whatever the batch, host or restart."""

import dataclasses
import functools
import hashlib
import json
import pathlib
from typing import Any

import numpy as np

from maxramp.commandline import count
from maxramp.data.files.records import UTF16, BadRecord, is_utf16
from maxramp.errors import ConfigError
from maxramp.handover.opening import ChatText, PromptTokenizer
from maxramp.model.keys import ModelKeys
from maxramp.rl.keys import RolloutKeys
from maxramp.rl.rewards import shorten


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt, and what the data says about its answer (None if nothing)."""

    text: str
    truth: Any


class Sums:
    """Sums of two numbers below a bound, drawn evenly: "3+14=" and "17"."""

    def __init__(self, bound: int, seed: int):
        self._bound, self._seed, self.hash = bound, seed, f"sums-{bound}-{seed}"
        self.description = f"sums of two numbers below {bound}"
        self.texts = [f"{bound - 1}+{bound - 1}="]  # the longest one stands for all

    def __getitem__(self, number: int) -> Prompt:
        a, b = np.random.default_rng([self._seed, number]).integers(0, self._bound, 2)
        return Prompt(f"{a}+{b}=", str(a + b))


class FilePrompts:
    """The lines of a JSON lines file, pass after pass, each pass in a random order of its own.

    Attributes are those of `Sums`.
    """

    def __init__(
        self,
        path: str,
        seed: int | None,
        key: str = "prompt_file",
        tokenizer: PromptTokenizer | None = None,
    ):
        """Reads lines that are objects with "prompt", a text or the messages of a chat (also named
        "messages"), and perhaps "answer".

        `seed` None keeps the order of the file; `path` is the value of `key`, for errors; chats
        need the `tokenizer`. A ConfigError if it cannot be read, has another line, or none.
        """
        try:
            data = pathlib.Path(path).expanduser().read_bytes()
        except (OSError, RuntimeError, ValueError) as error:  # no such user, no path
            reason = getattr(error, "strerror", None) or error
            raise ConfigError(f"{key}={path}: cannot be read: {reason}") from None
        if is_utf16(data):
            raise ConfigError(f"{key}={path}: {UTF16}")
        lines = [(n, line) for n, line in enumerate(data.splitlines(), 1) if line.strip()]
        self._prompts = [_parse(f"{key}={path}: line {n}", line, tokenizer) for n, line in lines]
        if not self._prompts:
            raise ConfigError(f"{key}={path}: holds no prompt; write one object a line")
        self.hash = f"{hashlib.blake2b(data, digest_size=8).hexdigest()}-{seed}"
        if any(isinstance(prompt.text, ChatText) for prompt in self._prompts):
            self.hash += f"-{tokenizer.template.hash}"
        self.description = f"{path}: {count(len(lines), 'prompt')}"
        self.texts = [prompt.text for prompt in self._prompts]
        self._seed = seed
        self._order = functools.lru_cache(2)(
            lambda epoch: np.random.default_rng([seed, epoch]).permutation(len(self._prompts))
        )

    def __getitem__(self, number: int) -> Prompt:
        epoch, position = divmod(number, len(self._prompts))
        return self._prompts[position if self._seed is None else self._order(epoch)[position]]


Prompts = Sums | FilePrompts


def open_prompts(
    keys: RolloutKeys, tokenizer: PromptTokenizer, model: ModelKeys
) -> dict[str, Prompts]:
    """Returns the prompts of a run, and those that are held out if there are any, by their key. A
    ConfigError if one has no tokens, or leaves no room for its answer; raises as `FilePrompts`."""
    opened: dict[str, Prompts] = {"prompt_file": Sums(keys.sums_below, keys.data_shuffle_seed)}
    if keys.prompt_file:
        seed = keys.data_shuffle_seed if keys.enable_data_shuffling else None
        opened["prompt_file"] = FilePrompts(keys.prompt_file, seed, tokenizer=tokenizer)
    if keys.eval_prompt_file:
        key = "eval_prompt_file"
        opened[key] = FilePrompts(keys.eval_prompt_file, None, key, tokenizer)
    longest, answer = model.max_target_length, keys.max_completion_length
    for name, prompts in opened.items():
        for text, tokens in zip(prompts.texts, tokenizer.encode(prompts.texts), strict=True):
            if not len(tokens):
                raise ConfigError(
                    f"{name}={getattr(keys, name)}: {shorten(text)} has no tokens; leave it "
                    "out, or use add_bos=True"
                )
            if len(tokens) > longest - answer:
                raise ConfigError(
                    f"max_completion_length={answer} leaves a prompt {longest - answer} of "
                    f"max_target_length={longest} tokens, and {shorten(text)} has {len(tokens)}; "
                    "raise max_target_length, or lower max_completion_length"
                )
    return opened


def check_enough(prompts: Prompts, keys: RolloutKeys, samples: int) -> None:
    """Refuses a run of more samples than its file has in `num_epoch` passes."""
    size, num_epoch = len(prompts.texts), keys.num_epoch
    if keys.prompt_file and samples > size * num_epoch:
        raise ConfigError(
            f"prompt_file={keys.prompt_file}: the run takes {samples} prompts, but the file has "
            f"{size} x num_epoch={num_epoch} = {size * num_epoch}; use "
            f"num_epoch={-(-samples // size)}"
        )


def _parse(where: str, line: bytes, tokenizer: PromptTokenizer | None) -> Prompt:
    """Reads the prompt in a line; a ConfigError, which begins with `where`, if it has none
    or is a chat that the tokenizer has no template for."""
    try:
        value = json.loads(line)
        prompt = value["prompt"] if "prompt" in value else value["messages"]
        if isinstance(prompt, list) and tokenizer:
            prompt = tokenizer.chat(prompt)
        if prompt.encode():  # which half a surrogate pair cannot be
            return Prompt(prompt, value.get("answer"))
    except (BadRecord, ConfigError) as bad:
        raise ConfigError(f"{where}: {bad}") from None
    except (ValueError, RecursionError, LookupError, TypeError, AttributeError):
        pass
    raise ConfigError(
        f'{where} has no text "prompt"; write one JSON object a line, '
        '{"prompt": ..., "answer": ...}'
    )
