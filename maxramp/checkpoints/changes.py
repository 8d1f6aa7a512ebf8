"""What a start changes in its run since the checkpoint that it continues from."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from maxramp.checkpoints.folder import Checkpoint
from maxramp.data.corpus import DataIdentity
from maxramp.errors import ConfigError

# Keys that decide which rows the run has seen, and from which weights it began.
_HISTORY_KEYS = (
    *("dataset_type", "max_target_length", "eval_fraction"),
    *("enable_data_shuffling", "data_shuffle_seed"),
    *("init_weights_seed", "lora_alpha", "use_rslora", "trainable_layers"),
    *("tokenizer_type", "tokenizer_path", "add_bos", "add_eos", "split_special_tokens"),
    *("packing", "grain_packing_type", "separate_documents"),
)
_CORPUS = "corpus"  # in allow_changed: what the corpus hash stands for


def changes_since(
    checkpoint: Checkpoint,
    values: Mapping[str, Any],
    allow_changed: Sequence[str],
    data: DataIdentity,
    versions: Mapping[str, str],
) -> str:
    """Lists in one line the keys and versions that a start changes since its checkpoint; "" for
    none. `values` (of all keys, resolved), `data` and `versions` are those of the start. Refuses
    what makes the run another one, unless `allow_changed` names it. Mixtures to come may differ.
    """
    pairs = checkpoint.differences(values)
    pairs.pop("allow_changed", None)
    refused = {name: pair for name, pair in pairs.items() if name in _HISTORY_KEYS}
    if checkpoint.corpus_hash != data.hash:
        refused[_CORPUS] = _changed_parts(checkpoint, data)
    today = seen_mixtures(data.mixtures, checkpoint.consumed_samples)
    for before, now in itertools.zip_longest(checkpoint.mixtures, today):
        if _without_names(before) != _without_names(now):
            refused.setdefault(_CORPUS, (_mixture(before), _mixture(now)))
    if _CORPUS in refused:
        pairs[_CORPUS] = refused[_CORPUS]
    for kind, digest in data.evaluations.items():
        if (before := checkpoint.evaluations.get(kind, digest)) != digest:
            pairs[f"{kind} hash"] = before, digest
    refused = {name: pair for name, pair in refused.items() if name not in allow_changed}
    if refused:
        raise ConfigError(
            f"{checkpoint}: trained with {_list_changes(refused)}, which would change what "
            "the run has seen; give the values from before, "
            f"allow_changed=[{','.join([*allow_changed, *refused])}], or another run_name"
        )
    pairs |= {
        name: (checkpoint.versions[name], version)
        for name, version in versions.items()
        if checkpoint.versions.get(name, version) != version
    }
    return _list_changes(pairs)


def seen_mixtures(mixtures: Sequence[Any], consumed_samples: int) -> list[Any]:
    return [mixture for mixture in mixtures if mixture[0] < consumed_samples]


def _changed_parts(checkpoint: Checkpoint, data: DataIdentity) -> tuple[str, str]:
    """Describes the parts that differ, then and now; a name alone makes no difference."""
    both = itertools.zip_longest(checkpoint.parts, data.parts)
    pairs = [pair for pair in both if not all(pair) or pair[0][1:] != pair[1][1:]]
    if not pairs:
        return checkpoint.corpus_hash, data.hash
    then, now = zip(*pairs, strict=True)
    return _parts(filter(None, then)), _parts(filter(None, now))


def _without_names(mixture: Sequence[Any] | None) -> Any:
    return mixture and [mixture[0], [list(part[1:]) for part in mixture[1]]]


def _parts(parts: Iterable[Any]) -> str:
    described = []
    for name, weight, digest in parts:
        share = f" weight {weight:g}" if weight != 1 else ""
        described.append(f"{name}{share}" + (f" (hash {digest})" if digest else ""))
    return ", ".join(described) or "nothing"


def _mixture(mixture: list[Any] | None) -> str:
    return f"{_parts(mixture[1])} from sample {mixture[0]} on" if mixture else "the mixture before"


def _list_changes(pairs: dict[str, tuple]) -> str:
    return ", ".join(f"{name}={before} (now {after})" for name, (before, after) in pairs.items())
