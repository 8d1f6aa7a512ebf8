"""The sections of the data: what to read, how far ahead, and what to evaluate on."""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence

from maxramp.data import hub
from maxramp.errors import ConfigError
from maxramp.keys import section
from maxramp.keys.numbers import exact
from maxramp.keys.section import Keys, day, form, limit, minimum, one_of, positive_or_open, uint32
from maxramp.objectives.objective import Objective
from maxramp.objectives.table import find_objective
from maxramp.stage import Fields

# Which marks come into documents; a prepared set keeps these with its tokenizer.
MARK_KEYS = ("add_bos", "add_eos", "split_special_tokens")
LOCAL_CACHE = "~/.cache/maxramp/prepared"  # of sets on this machine, where no other folder is named
_SUFFIXES = {".json": "huggingface", ".model": "sentencepiece", ".tiktoken": "tiktoken"}


@dataclasses.dataclass(frozen=True)
class ChatKeys(Keys):
    """How chats become text, and which of it is trained on."""

    use_sft: bool
    use_dpo: bool
    sft_train_on_completion_only: bool
    sft_train_on_last_answer_only: bool
    chat_template: str
    chat_template_date: str = day()
    chat_template_switches: Sequence[str] = form(
        "[^=]+=.*", "must be names with values, such as [enable_thinking=false]"
    )
    long_chats: str = one_of("leave_out", "cut")
    chats_with_marks: str = one_of("refuse", "leave_out")

    @property
    def objective(self) -> Objective:
        return find_objective(vars(self))

    @property
    def reads_chats(self) -> str:
        """The key that asks for chats, with its value; "" where the data is text."""
        return self.objective.asked_by


@dataclasses.dataclass(frozen=True)
class DataKeys(ChatKeys):
    """Which text a run trains on, as which tokens, in which order."""

    dataset_type: str = one_of("text", "synthetic", "grain", "hf")
    text_files: str
    grain_train_files: str
    grain_eval_files: str
    grain_file_type: str = one_of(
        "", "prepared", "arrayrecord", "parquet", "jsonl", "text", "megatron"
    )
    hf_path: str
    hf_name: str
    train_split: str
    hf_eval_split: str
    data_cache_dir: str
    eval_sets: Mapping[str, str] = section.named_texts()
    train_data_columns: Sequence[str] = limit(
        lambda value: len(value) == 1 and isinstance(value[0], str),
        "must be one name, such as [text]",
    )
    tokenizer_type: str = one_of("", "bytes", "huggingface", "sentencepiece", "tiktoken")
    tokenizer_path: str
    tokenize_train_data: bool
    add_bos: bool
    add_eos: bool
    split_special_tokens: bool
    vocab_size: int
    eval_fraction: float = section.below_one()
    eval_interval: int
    max_target_length: int
    packing: bool
    separate_documents: bool
    grain_packing_type: str = one_of("concat_then_split", "best_fit")
    num_epoch: int = uint32(1)
    enable_data_shuffling: bool
    data_shuffle_seed: int = uint32()
    expansion_factor_real_data: float = limit(
        lambda value: value == -1 or 0 < value <= 1 or (value > 0 and value % 1 == 0),
        "must be a whole number of processes or a fraction up to 1, and above 0; or -1",
    )

    @property
    def fields(self) -> Fields:
        """The arrays of a batch, as far as the keys say: prepared sets decide about documents."""
        reads_documents = self.dataset_type in ("grain", "hf")
        apart = reads_documents and self.packing and self.separate_documents
        return functools.partial(self.objective.fields, separate=apart)

    @property
    def mark_keys(self) -> dict[str, bool]:
        return {name: getattr(self, name) for name in MARK_KEYS}

    @property
    def type_of_tokenizer(self) -> str:
        """`tokenizer_type`, or the type that its file's name tells; a ConfigError if none."""
        kind, path = self.tokenizer_type, self.tokenizer_path
        if kind or not path or self.dataset_type == "synthetic":  # which uses none, and says so
            return kind or "bytes"
        local = os.path.expanduser(path)
        kind = _SUFFIXES.get(os.path.splitext(path)[1].lower(), "")
        if hub.is_name(path) or os.path.isfile(os.path.join(local, "tokenizer.json")):
            return "huggingface"
        if not kind or os.path.isdir(local):
            what = "its name does not say of what type it is"
            if os.path.isdir(local):
                what = "the folder has no tokenizer.json"
            elif "://" not in path and not os.path.exists(local):
                what = "no such file or folder, nor a name such as meta-llama/Meta-Llama-3-8B"
            raise ConfigError(
                f"tokenizer_path={path}: {what}; give a tokenizer.json (or its folder), .model or "
                ".tiktoken file, or tokenizer_type as well"
            )
        return kind


@dataclasses.dataclass(frozen=True)
class ReadingKeys(Keys):
    """How a process reads ahead."""

    grain_worker_count: int = minimum(0)
    grain_num_threads: int = minimum(1)
    grain_prefetch_buffer_size: int = minimum(1)
    grain_prefetch_buffer_gib: float = minimum(0)


# What a state is evaluated on: the first words of the names of these numbers.
HELD_OUT, TASKS = "eval", "task"


@dataclasses.dataclass(frozen=True)
class EvalKeys(Keys):
    """When to evaluate, and on how much."""

    eval_interval: int = minimum(-1)
    eval_samples: int = positive_or_open()
    eval_per_device_batch_size: float = minimum(0)
    log_eval_batches: bool
    evaluate_tasks: Sequence[str]
    evaluate_tasks_interval: int = positive_or_open()
    evaluate_tasks_include_path: str

    def tasks_are_due(self, before: int, consumed: int, is_last: bool) -> bool:
        """Returns whether the step over samples [before, consumed) reaches a multiple of the
        interval, or is the last.
        """
        interval = self.evaluate_tasks_interval
        reached = interval > 0 and consumed // interval > before // interval
        return bool(self.evaluate_tasks) and (reached or is_last)

    def due(self, step: int, before: int, consumed: int, total_steps: int) -> list[str]:
        """Returns what to evaluate after `step` steps, the last over samples [before, consumed):
        HELD_OUT and TASKS, or some of them."""
        interval, is_last = self.eval_interval, step == total_steps
        is_first = interval == 0 and step == 1
        interval = interval or -(-total_steps // 4)
        held_out = interval != -1 and (step % interval == 0 or is_first or is_last)
        tasks = self.tasks_are_due(before, consumed, is_last)
        return [HELD_OUT] * held_out + [TASKS] * tasks

    def rows(self, num_devices: int) -> int:
        """Returns the rows of an evaluation batch on all devices; 0 = the run never evaluates."""
        evaluates = self.eval_interval != -1
        return int(exact(self.eval_per_device_batch_size) * num_devices) if evaluates else 0
