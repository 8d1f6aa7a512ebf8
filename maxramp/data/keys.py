"""The sections of the data: what to read, how far ahead, and what to evaluate on."""

import dataclasses
import math
from collections.abc import Sequence

from maxramp.data import tokenizer_keys
from maxramp.errors import ConfigError
from maxramp.keys import base
from maxramp.keys.section import Keys, at_least, below_one, one_of, positive_or_open, uint32
from maxramp.rampup.numbers import exact

_GO_WITH = dict.fromkeys(("grain_train_files", "grain_eval_files"), "grain") | dict.fromkeys(
    ("hf_path", "hf_name", "hf_eval_split", "train_split"), "hf"
)


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
    expansion_factor_real_data: float

    @property
    def mark_keys(self) -> dict[str, bool]:
        """The keys that say which marks documents get."""
        return {name: getattr(self, name) for name in tokenizer_keys.MARK_KEYS}

    def check(self) -> None:
        """Checks each key, and that files, columns and the kind of data go together.

        Raises:
          ConfigError: names the key, its value, the relation it breaks and a remedy.
        """
        super().check()
        if self.dataset_type == "text" and not self.split_special_tokens:
            raise ConfigError(
                "split_special_tokens=False: dataset_type=text trains on bytes, without a "
                "tokenizer; use dataset_type=grain grain_train_files=FILES, or leave it out"
            )
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
        if self.dataset_type == "grain" and not self.grain_train_files:
            raise ConfigError(
                "dataset_type=grain needs grain_train_files: a folder that maxramp.prepare made, "
                "or glob,weight;glob,weight"
            )
        if self.dataset_type == "hf" and not (self.hf_path and self.train_split):
            raise ConfigError(
                "dataset_type=hf needs hf_path, the name of a data set such as allenai/c4, and "
                "train_split"
            )
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
        _check_expansion(self.expansion_factor_real_data)
        _ = self.type_of_tokenizer

    @property
    def type_of_tokenizer(self) -> str:
        """`tokenizer_type` as given, or what the name of the tokenizer's file says.

        Raises:
          ConfigError: the keys contradict each other or the dataset, or the name says nothing.
        """
        return tokenizer_keys.type_of(self.tokenizer_type, self.tokenizer_path, self.dataset_type)


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


def _check_expansion(factor: float) -> None:
    name = f"expansion_factor_real_data={factor:g}"
    if factor <= 0 and factor != -1:
        raise ConfigError(
            f"{name} must be above 0, or -1 for 1: of so many processes one reads the data"
        )
    if factor > 1 and factor % 1:
        near = f"{math.floor(factor)} or {math.ceil(factor)}"
        raise ConfigError(f"{name} must be a whole number of processes; use {near}")
    if 0 < factor < 1 and abs(round(1 / factor) * factor - 1) > 1e-6:
        times = f"{1 / factor:.4g}"
        raise ConfigError(
            f"{name} stands for a checkpoint of 1/f = {times} times as many devices, which is no "
            f"whole number; use 1/{round(1 / factor)} as a decimal, or leave it out: any "
            "checkpoint reads on"
        )
