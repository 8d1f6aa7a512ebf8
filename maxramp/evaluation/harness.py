"""lm-eval, the field's evaluation harness, on process 0: its tasks, asked of our model.

How texts become tokens follows lm-eval's own backend for transformers (`hf`): where a context ends
and its continuation begins, what stands before an empty context, which tokens a row too long loses,
which windows a long text is cut into.
"""

import dataclasses
import difflib
import functools
import importlib.metadata
import logging
import os
import pathlib
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from maxramp.commandline import count, print_note
from maxramp.data.chats.messages import Chat
from maxramp.data.files.records import BadRecord
from maxramp.errors import ConfigError, Stopped, TrainingError, install
from maxramp.evaluation.scorer import Scored
from maxramp.evaluation.server import DryRun, EvalOptions, EvalServer
from maxramp.generation.generator import GenerationConfig
from maxramp.generation.sampling import Sampling
from maxramp.handover.opening import PromptTokenizer
from maxramp.run.metrics import TASK

os.environ.setdefault("DISABLE_MULTIPROC", "1")  # or it would fork a process that JAX runs in
os.environ.setdefault("TQDM_DISABLE", "1")  # or a bar of each task would run through our lines
try:
    from lm_eval import evaluator
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.task import Task
    from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml  # which has no public name
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ImportError as error:
    raise ConfigError(f"tasks need lm-eval ({error}): {install('evaluate')}") from None


class _LastError(logging.Handler):
    """Keeps the last error that lm-eval logs: what it raises then says less."""

    line = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps the line of a record; for `logging`."""
        self.line = record.getMessage()


_logged, _logger = _LastError(), logging.getLogger("lm_eval")
_logger.setLevel(logging.ERROR)
_logger.addHandler(_logged)
_logger.propagate = False

_MOST_TOKENS = 256  # of an answer, where a task does not say
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
# The options of a task that generates text: what each value must be, and a check of that.
_GENERATION_OPTIONS = {
    **dict.fromkeys(_LENGTHS, ("a whole number, 1 or more", lambda x: _is_whole(x) and x >= 1)),
    "until": (
        "text, or a list of texts",
        lambda x: isinstance(x, str | list | tuple) and all(isinstance(text, str) for text in x),
    ),
    "do_sample": ("true or false", lambda x: isinstance(x, bool)),
    "temperature": ("a number, 0 or more", lambda x: type(x) in (int, float) and x >= 0),
    "top_k": ("a whole number, 0 or more", lambda x: _is_whole(x) and x >= 0),
    "top_p": ("above 0 and at most 1", lambda x: type(x) in (int, float) and 0 < x <= 1),
}
_SEED = 1234  # lm-eval's own
_TASK_OPTIONS = "num_fewshot", "gen_kwargs"  # set in each task; lm-eval takes the others


class Tasks(TaskManager):
    """The tasks of some names, with their data, loaded once."""

    def __init__(self, key: str, names: Sequence[str], include_path: str, stages: int):
        """Loads the tasks; a ConfigError if one is missing, broken, or not for a pipeline.

        Args:
          key: the key or option that names the tasks, for errors.
          names: of tasks, groups, tags or files of tasks.
          include_path: a folder of tasks beside lm-eval's own, or "".
          stages: those of a pipeline, which cannot do all tasks.
        """
        self.names = list(map(os.path.expanduser, names))
        own = os.path.expanduser(include_path) or None
        if own and not os.path.isdir(own):
            raise ConfigError(
                f"{include_path} is not a folder of tasks; give one that has .yaml files"
            )
        super().__init__(include_path=own, include_defaults=not own)
        if own and self._missing():
            _refuse_broken(own)
            # lm-eval's own are thousands, which take a while to list.
            super().__init__(include_path=own)
        for name in self._missing():
            near = difflib.get_close_matches(name, self.all_tasks, 1)
            hint = f"did you mean {near[0]}?" if near else "lm-eval ls tasks lists all"
            where = f" in {include_path}, nor" if include_path else ""
            raise ConfigError(f"{key}={name}: no such task{where} in lm-eval; {hint}")
        try:
            self.loaded = self.load(self.names)
        except Exception as error:  # of a file of somebody's, or of what loads its data
            raise ConfigError(
                f"{key}={','.join(names)}: lm-eval cannot load it: {_error_text(error)}"
            ) from None

        for name, task in self.loaded["tasks"].items():
            if stages > 1 and task.get_config("output_type") == "generate_until":
                raise ConfigError(
                    f"the task {name} has the model write, and a pipeline of {stages} stages "
                    "generates no text; use ici_pipeline_parallelism=1 dcn_pipeline_parallelism=1, "
                    "or tasks that compare likelihoods"
                )

    def _missing(self) -> list[str]:
        return [n for n in self.names if n not in self.task_index and not os.path.isfile(n)]


def _refuse_broken(folder: str) -> None:
    """Refuses a file of a folder of tasks that is not YAML: lm-eval skips it in silence."""
    for path in sorted(pathlib.Path(folder).rglob("*.yaml")):
        try:
            load_yaml(path, resolve_func=False)
        except Exception as error:
            raise ConfigError(f"{path}: no task can be read: {_error_text(error)}") from None


class Model(TemplateLM):
    """Our model behind lm-eval's interface."""

    def __init__(self, server: EvalServer | DryRun, tokenizer: PromptTokenizer):
        super().__init__()
        self._server, self._chats = server, tokenizer
        # A special token that a text spells is that token, as in a chat template.
        has_names = tokenizer.tokenizer.type in ("huggingface", "tiktoken")
        self._tokenizer = dataclasses.replace(
            tokenizer.tokenizer, add_eos=False, split_special_tokens=not has_names
        )

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text, or the one that begins it."""
        end = self._tokenizer.model.end
        return self.prefix_token_id if end is None else end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text whose first token is scored too; a ConfigError without one."""
        for token in (self._tokenizer.model.begin, self._tokenizer.model.end):
            if token is not None:
                return token
        raise ConfigError(
            f"tokenizer_path={self._tokenizer.path} has no token that begins or ends a text, and a "
            "task scores one from its first token on; give another tokenizer"
        )

    @property
    def max_length(self) -> int:
        """The most tokens of a row whose likelihoods are asked, beside the one before them."""
        return self._server.longest

    @property
    def tokenizer_name(self) -> str:
        """For lm-eval's cache of requests."""
        return self._tokenizer.hash

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Returns the ids of a text, as lm-eval's `hf` does: with add_bos behind the token that
        begins texts, if `add_special_tokens` (None: unless the text spells it); else none of "".
        `kwargs` are lm-eval's, and not used.
        """
        self._server.beat()  # a task may have hundreds of thousands of texts
        bos = self._tokenizer.model.begin
        if add_special_tokens is None:
            has_bos = bos is not None and has_bos_prefix(string, self._tokenizer.decode([bos]))
            add_special_tokens = not has_bos
        (ids,) = dataclasses.replace(self._tokenizer, add_bos=False).encode([string])
        if add_special_tokens and self._tokenizer.add_bos:
            return [bos, *ids.tolist()]
        return ids.tolist()

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation, and whether it is the greedy one.
        Raises what `_loglikelihood_tokens` and `prefix_token_id` raise.
        """
        return super().loglikelihood(requests, disable_tqdm)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Scores continuations of 1 to max_length tokens, each behind a context; for lm-eval's
        `loglikelihood`, and for `loglikelihood_rolling`, whose requests have no texts. A context is
        cut on the left to max_length + 1 tokens in all; the prefix token stands for an empty one.
        `kwargs` are lm-eval's, and not used. A ConfigError for a continuation of another length.
        """
        rows = []
        for texts, context, continuation in requests:
            length, most = len(continuation), self.max_length
            if not 0 < length <= most:
                rule = f", not 1 to max_target_length={most}; raise that, or" * (length > most)
                raise ConfigError(
                    f"a task scores a continuation of {count(length, 'token')}{rule or ';'} mend "
                    f"the task ({str(texts)[-100:]})"
                )
            context = context or [self.prefix_token_id]  # of spaces, which lm-eval moves
            whole = (context + continuation)[-(most + 1) :]
            rows.append(Scored(whole, length))
        return self._server.score(rows)

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Returns the log-probability of each text, of any length, from its first token on, in
        windows of max_length; 0 of "". A ConfigError if the tokenizer has no token that begins or
        ends a text. Notes texts that begin with two; `disable_tqdm` is lm-eval's, and not used.
        """
        windows, request_numbers = [], []
        for number, request in enumerate(requests):
            tokens, longest = self.tok_encode(request.args[0]), self.max_length
            if tokens[:1] == [self.prefix_token_id]:
                _note_two_bos(self._tokenizer.decode(tokens[:1]))
            cut = get_rolling_token_windows(tokens, self.prefix_token_id, longest, context_len=1)
            for context, continuation in map(make_disjoint_window, cut):
                windows.append((None, context, continuation))
                request_numbers.append(number)
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows)
        for number, (log_p, _) in zip(request_numbers, scores, strict=True):
            totals[number] += log_p
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the answer to each prompt, up to the first stop text. A ConfigError for options
        that `_check_generation` or `Sampling` refuses.
        """
        # The requests that share their options are answered together.
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items())), []).append(number)
        answers = [""] * len(requests)
        for numbers in groups.values():
            options = _check_generation(requests[numbers[0]].args[1])
            kwargs = normalize_gen_kwargs(options, _MOST_TOKENS)
            max_new_tokens, until = kwargs.pop("max_gen_toks"), kwargs.pop("until")
            until = handle_stop_sequences(until, self._tokenizer.decode([self.eot_token_id]))
            prompts = [
                self.tok_encode(requests[n].args[0]) or [self.prefix_token_id] for n in numbers
            ]
            generation = GenerationConfig(max_new_tokens, self._sampling(kwargs), _SEED)
            texts = self._server.write(prompts, generation, until)
            for number, text in zip(numbers, texts, strict=True):
                answers[number] = text
        return answers

    def apply_chat_template(
        self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """Returns the text of a chat, up to where an answer begins or continues. A template that
        takes no system message gets none; a ConfigError for a chat that it refuses otherwise.
        """
        last = chat_history[-1]["content"]
        rest = [message for message in chat_history if message["role"] != "system"]
        try:
            try:
                text = self._render(chat_history, add_generation_prompt)
            except BadRecord:
                text = self._render(rest, add_generation_prompt)
        except BadRecord as error:
            raise ConfigError(f"--apply_chat_template: {error}") from None
        if add_generation_prompt:
            return text
        # The last message is the beginning of the answer, which the template must not end.
        start, kept = text.rindex(last.strip()), last.lstrip()
        if not text.startswith(kept, start):
            kept = last.strip()
        return text[:start] + kept

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the only chat template, whichever is asked for, for lm-eval's report; None for
        False.
        """
        return self._tokenizer.chat_template if chat_template else None

    def _render(self, messages: list[dict[str, Any]], ask: bool) -> str:
        return self._chats.template.render(Chat(messages, None, []), ask=ask)

    def _sampling(self, kwargs: Mapping[str, Any]) -> Sampling:
        """Returns how to draw, by the options of a task; greedy without do_sample. A ConfigError as
        `Sampling.check`."""
        vocab_size = self._tokenizer.vocab_size
        if not kwargs["do_sample"]:
            return Sampling(0.0, vocab_size=vocab_size)
        names = {"temperature": float, "top_k": int, "top_p": float}
        values = {name: kind(kwargs[name]) for name, kind in names.items() if name in kwargs}
        sampling = Sampling(**values, vocab_size=vocab_size)
        sampling.check()
        return sampling


@functools.cache  # once in a process
def _note_two_bos(bos: str) -> None:
    print_note(
        f"the tokenizer begins texts with {bos}, and lm-eval puts it before them again: the "
        f"likelihood of a whole text counts log p({bos} | {bos}), as with lm-eval's own "
        "backend; add_bos=False leaves it out"
    )


def _check_generation(options: Mapping[str, Any]) -> dict[str, Any]:
    """Refuses options of a task that generates text (a ConfigError), or returns those that have a
    value."""
    options = {name: value for name, value in options.items() if value is not None}
    for name, value in options.items():
        if name not in _GENERATION_OPTIONS:
            raise ConfigError(
                f"{name}={value}: a task or --gen_kwargs sets how the model writes by "
                f"{', '.join(_GENERATION_OPTIONS)} alone; leave it out"
            )
        rule, is_valid = _GENERATION_OPTIONS[name]
        if not is_valid(value):
            raise ConfigError(f"{name}={value}: of a task or --gen_kwargs, must be {rule}")
    return options


def _is_whole(x: Any) -> bool:
    return type(x) in (int, float) and float(x).is_integer()


def evaluate(tasks: Tasks, model: Model, options: EvalOptions) -> dict[str, Any]:
    """Evaluates a model on tasks, on process 0; returns lm-eval's results. A ConfigError if a
    task's own code fails; raises what the model raises. Sets the random seeds of the process."""
    # As lm-eval's `simple_evaluate` does first. That function ends by listing all that is
    # installed, which takes seconds for which training would wait.
    random.seed(0)
    np.random.seed(_SEED)
    try:
        for task in tasks.loaded["tasks"].values():
            _set_up(task, options)
        others = {name: x for name, x in vars(options).items() if name not in _TASK_OPTIONS}
        results = evaluator.evaluate(model, tasks.loaded, fewshot_as_multiturn=True, **others)
    except (ConfigError, TrainingError, Stopped):
        raise
    except Exception as error:  # of a task's own code
        raise ConfigError(f"the tasks {','.join(tasks.names)}: {_error_text(error)}") from None
    settings = {"config": dataclasses.asdict(options) | {"seed": _SEED}, "date": time.time()}
    return dict(results) | settings | {"lm_eval_version": importlib.metadata.version("lm_eval")}


def _set_up(task: Task, options: EvalOptions) -> None:
    """Sets what lm-eval leaves to the task itself; options of None leave the task's own."""
    if options.gen_kwargs and task.get_config("output_type") == "generate_until":
        task.set_config("generation_kwargs", dict(options.gen_kwargs), update=True)
    own = task.get_config("num_fewshot")
    if own is None or (own and options.num_fewshot is not None):
        task.set_config("num_fewshot", options.num_fewshot or 0)
    task.set_fewshot_seed(_SEED)


def table(results: Mapping[str, Any]) -> str:
    """Returns lm-eval's tables of tasks and of groups."""
    parts = [make_table(results)]
    parts += [make_table(results, "groups")] if results.get("groups") else []
    return "\n".join(parts)


def numbers(results: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers of each task and group, without standard errors, of what `evaluate`
    returned, by names such as task_hellaswag_acc."""
    values = {}
    for task, metrics in results["results"].items():
        for name, value in metrics.items():
            metric, _, answer_filter = name.partition(",")
            if isinstance(value, int | float) and answer_filter and not metric.endswith("_stderr"):
                suffix = "" if answer_filter == "none" else f"_{answer_filter}"
                values[f"{TASK}{task}_{metric}{suffix}"] = float(value)
    return values


def _error_text(error: Exception) -> str:
    """Returns the text of an error of lm-eval or of a task in one line."""
    text = str(error)
    if isinstance(error, KeyError):
        text = _logged.line or f"there is no {text}"
    text = " ".join(text.split())[:300]
    return f"{text} ({type(error).__name__})" if text else type(error).__name__
