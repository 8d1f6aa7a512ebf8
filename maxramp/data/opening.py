"""The corpus on every process of a job, whether it reads or not.

Processes that do not read learn the sizes from the first process. What is wrong in one process ends
all of them with the same line, before anything is trained.
"""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxramp.config import Config
from maxramp.data.sources import Corpus, open_corpus
from maxramp.errors import ConfigError


def open_shared(config: Config, reads: bool) -> Corpus:
    """The rows that a resolved config names; called by all processes of the job.

    Args:
      config: a resolved config.
      reads: whether this process opens the data. The others get items with a length only.

    Raises:
      ConfigError: on every process, what is wrong on one of them.
    """
    corpus = agree(lambda: open_corpus(config) if reads else None)
    return corpus


def agree(function: Callable[[], Corpus | None]) -> Corpus:
    """Calls `function` on every process; its corpus, or that of the first process without tokens.

    Raises:
      ConfigError: what one of them raised, or that they see different data.
    """
    answer: dict[str, Any] = {}
    corpus = None
    try:
        corpus = function()
        if corpus is not None:
            answer["summary"] = corpus.summary()
    except ConfigError as error:
        answer["error"] = str(error)
    answers = _exchange(answer)
    for process, other in enumerate(answers):
        if "error" in other:
            raise ConfigError(other["error"])
        if "summary" in other and other["summary"] != answers[0]["summary"]:
            raise ConfigError(
                f"process {process} sees other data than process 0: hash "
                f"{other['summary']['hash']}, not {answers[0]['summary']['hash']}; give all "
                "processes the same files"
            )
    return corpus if corpus is not None else Corpus.from_summary(answers[0]["summary"])


def _exchange(value: dict[str, Any]) -> list[dict[str, Any]]:
    """The JSON values of all processes, in their order."""
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.pad(text, (0, sizes.max() - len(text)))
    texts = multihost_utils.process_allgather(padded)
    return [json.loads(t[:n].tobytes()) for t, n in zip(texts, sizes, strict=True)]
