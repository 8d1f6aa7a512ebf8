"""Which tokenizer tokenizer_type and tokenizer_path name together; no file is read."""

import os

from maxramp.data import hub
from maxramp.errors import ConfigError

# Which marks come into documents; a prepared set keeps these with its tokenizer.
MARK_KEYS = ("add_bos", "add_eos", "split_special_tokens")

_SUFFIXES = {".json": "huggingface", ".model": "sentencepiece", ".tiktoken": "tiktoken"}


def type_of(kind: str, path: str, dataset_type: str) -> str:
    """The type of the tokenizer that the keys name: as given, or what the name of its file says.

    Args:
      kind: the key tokenizer_type.
      path: the key tokenizer_path.
      dataset_type: the key.

    Raises:
      ConfigError: the keys contradict each other or the dataset, or the name says nothing.
    """
    if dataset_type == "synthetic":
        return kind or "bytes"  # of no use; the start of the run says so
    if dataset_type == "text" and (path or kind not in ("", "bytes")):
        shown = f"tokenizer_path={path}" if path else f"tokenizer_type={kind}"
        raise ConfigError(
            f"{shown}: dataset_type=text trains on bytes, without a tokenizer; use "
            "dataset_type=grain grain_train_files=FILES, or leave it out"
        )
    if kind == "bytes" and path:
        raise ConfigError(
            f"tokenizer_type=bytes has no file, but tokenizer_path={path}; leave one of them out"
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
