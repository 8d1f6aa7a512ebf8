"""The sections of the data: what to read, how far ahead, and what to evaluate on."""

import dataclasses
import math
import os
from collections.abc import Sequence

from maxramp.data import hub
from maxramp.errors import ConfigError
from maxramp.keys import base
from maxramp.keys.section import (
    Keys,
    above_zero_or_open,
    at_least,
    below_one,
    one_of,
    positive_or_open,
    uint32,
)
from maxramp.rampup.numbers import exact

# Which marks come into documents; a prepared set keeps these with its tokenizer.
MARK_KEYS = ("add_bos", "add_eos", "split_special_tokens")
_SUFFIXES = {".json": "huggingface", ".model": "sentencepiece", ".tiktoken": "tiktoken"}
_GO_WITH = dict.fromkeys(("grain_train_files", "grain_eval_files"), "grain") | dict.fromkeys(
    ("hf_path", "hf_name", "hf_eval_split", "train_split"), "hf"
)

_NEEDED = {
    "grain_train_files": (
        "grain",
        "a folder that maxramp.prepare made, or glob,weight;glob,weight",
    ),
    "hf_path": ("hf", "the name of a data set, such as allenai/c4"),
    "train_split": ("hf", "a split of the data set, such as train"),
}


@dataclasses.dataclass(frozen=True)
class DataKeys(Keys):
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
    train_data_columns: Sequence[str]
    tokenizer_type: str = one_of("", "bytes", "huggingface", "sentencepiece", "tiktoken")
    tokenizer_path: str
    tokenize_train_data: bool
    add_bos: bool
    add_eos: bool
    split_special_tokens: bool
    vocab_size: int
    eval_fraction: float = below_one()
    eval_interval: int
    max_target_length: int
    packing: bool
    separate_documents: bool
    grain_packing_type: str = one_of("concat_then_split", "best_fit")
    num_epoch: int = uint32(1)
    enable_data_shuffling: bool
    data_shuffle_seed: int = uint32()
    expansion_factor_real_data: float = above_zero_or_open()

    @property
    def mark_keys(self) -> dict[str, bool]:
        """The keys that say which marks documents get."""
        return {name: getattr(self, name) for name in MARK_KEYS}

    def check(self) -> None:
        """Checks each key, and that files, columns and the kind of data go together.

        Raises:
          ConfigError: names the key, its value, the relation it breaks and a remedy.
        """
        super().check()
        if self.dataset_type == "text" and self.vocab_size < 258:
            raise ConfigError(
                f"vocab_size={self.vocab_size} is too small for dataset_type=text: 256 bytes and "
                "two marks make 258; use 320 (a multiple of 64) or more"
            )
        for name, goes_with in _GO_WITH.items():
            value = getattr(self, name)
            if value != base.base()[name] and self.dataset_type != goes_with:
                raise ConfigError(
                    f"{name}={value} goes with dataset_type={goes_with}, not {self.dataset_type}"
                )
        for name, (kind, what) in _NEEDED.items():
            if self.dataset_type == kind and not getattr(self, name):
                raise ConfigError(f"dataset_type={kind} needs {name}: {what}")
        columns = self.train_data_columns
        if len(columns) != 1 or not isinstance(columns[0], str):
            raise ConfigError(f"train_data_columns={columns} must be one name, such as [text]")
        from_fraction = self.dataset_type != "synthetic" and not (
            self.grain_eval_files or self.hf_eval_split
        )
        if self.eval_interval > 0 and from_fraction and self.eval_fraction == 0:
            raise ConfigError(
                f"eval_interval={self.eval_interval} asks for evaluation, but eval_fraction=0 "
                "holds no text out; use eval_fraction=0.02, or eval_interval=-1"
            )
        factor = self.expansion_factor_real_data
        if factor > 1 and factor % 1:
            raise ConfigError(
                f"expansion_factor_real_data={factor:g} must be a whole number of processes; use "
                f"{math.floor(factor)} or {math.ceil(factor)}"
            )
        _ = self.type_of_tokenizer

    @property
    def type_of_tokenizer(self) -> str:
        """`tokenizer_type` as given, or what the name of the tokenizer's file says.

        Raises:
          ConfigError: the keys contradict each other or the dataset, or the name says nothing.
        """
        kind, path = self.tokenizer_type, self.tokenizer_path
        if self.dataset_type == "synthetic":
            return kind or "bytes"  # of no use; the start of the run says so
        for name, given in {
            "tokenizer_path": path != "",
            "tokenizer_type": kind not in ("", "bytes"),
            "split_special_tokens": not self.split_special_tokens,
        }.items():
            if self.dataset_type == "text" and given:
                raise ConfigError(
                    f"{name}={getattr(self, name)}: dataset_type=text trains on bytes, without a "
                    "tokenizer; use dataset_type=grain grain_train_files=FILES, or leave it out"
                )
        if kind == "bytes" and path:
            raise ConfigError(
                f"tokenizer_type=bytes has no file, but tokenizer_path={path}; leave one out"
            )
        if kind or not path:
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

    grain_worker_count: int = at_least(0)
    grain_num_threads: int = at_least(1)
    grain_prefetch_buffer_size: int = at_least(1)
    grain_prefetch_buffer_gib: float = at_least(0)


@dataclasses.dataclass(frozen=True)
class EvalKeys(Keys):
    """When to evaluate, and on how much."""

    eval_interval: int = positive_or_open()
    eval_steps: int = positive_or_open()
    eval_per_device_batch_size: float = at_least(0)
    log_eval_batches: bool

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether to evaluate after `step` steps of a run."""
        interval = self.eval_interval
        return interval > 0 and (step % interval == 0 or step == total_steps)

    def rows(self, num_devices: int) -> int:
        """Rows of an evaluation batch on all devices; 0 = the run never evaluates."""
        if self.eval_interval < 1:
            return 0
        return int(exact(self.eval_per_device_batch_size) * num_devices)
