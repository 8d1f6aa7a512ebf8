"""Exports a run's weights: everything in a model's folder besides the tensors."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from maxramp.checkpoints.folder import steps_in
from maxramp.commandline import print_note
from maxramp.config.keys import Config
from maxramp.data import tokenizers
from maxramp.data.tokenizers import Tokenizer
from maxramp.errors import ConfigError, reason_of
from maxramp.files import storage
from maxramp.files.place import Place, set_aside
from maxramp.handover.opening import ModelSource, open_model
from maxramp.handover.weights import KEY, Weights, is_run
from maxramp.huggingface import adapter, config_json, writing
from maxramp.huggingface.folder import TOKENIZER
from maxramp.huggingface.safetensors import Tensor
from maxramp.model.adapters import (
    attach_adapters,
    has_adapters,
    merge_adapters,
    stored_part,
    without_adapters,
)
from maxramp.model.decoder import Decoder
from maxramp.model.families.table import FAMILIES
from maxramp.model.parts.weights import fingerprint_of_weights
from maxramp.model.pipeline import order_by_layer
from maxramp.parallel.mesh import mesh_of
from maxramp.processes import agreement

_DTYPES = ("float32", "bfloat16", "float16")
_STALE = ".stale"  # ends the name of an export of a state that the run no longer has


def export_run(config: Config, pause: Callable[[], None], say: Callable[[str], None]) -> None:
    """Exports the newest checkpoint of a finished run, never the best one, to exported/STEP of its
    folder, once; all processes call it together, with the resolved config.

    Exports nothing if the run saved no state, because the one that it continues was finished. An
    export of another state with that number is set aside. `pause` is called between two tensors, on
    every process; `say` prints a line, on the first. Raises as `open_model` and `export`.
    """
    pause()
    run, mesh = config.run.folder, config.mesh
    if not agreement.decide_on_first(lambda: bool(steps_in(run / "checkpoints"))):
        return
    keys = mesh.group("ici") | mesh.group("dcn")
    if config.model.lora_rank:  # the base may have moved since the checkpoint
        keys[KEY] = config.checkpoints.load_parameters_path
    source = open_model(str(run), [f"{name}={value}" for name, value in keys.items()])
    to = run / "exported" / source.path.rpartition("/")[2]
    if agreement.decide_on_first(lambda: _is_exported(to, source.weights)):
        return
    export(source, source.load(), to, merge=not source.weights.adapted_model, pause=pause)
    say(f"wrote {to}")


def _is_exported(to: Place, weights: Weights) -> bool:
    """Returns whether a folder is an export of this state; sets aside one of another, or raises a
    ConfigError. For process 0."""
    exported = writing.read_source(to)
    if exported is None:
        return False
    if exported.get("weights") == weights.saved:
        return True
    try:
        _note(
            f"{to} is of another state than {weights.path}, or has lost files: now "
            f"{set_aside(to, _STALE)}"
        )
    except OSError as error:
        raise ConfigError(f"{to}: cannot be set aside: {reason_of(error)}") from None
    return False


def _note(line: str) -> None:
    if jax.process_index() == 0:
        print_note(line)


def export(
    source: ModelSource,
    model: Decoder,
    to: Place,
    dtype: str = "",
    merge: bool = False,
    fuse_experts: bool = False,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Writes a model as a Hugging Face folder, on every process; adapters alone, in PEFT's form,
    unless `merge`. `dtype` "" is that in which the tensors came, bfloat16 for quantized ones, or
    weight_dtype. `pause` is called between two tensors; `fuse_experts` is as in `writing.Format`. A
    `model` that is merged may lose its memory. Raises as `writing.write`, and a ConfigError for
    adapters that PEFT could not open.
    """
    if has_adapters(model) and not merge:
        _export_adapters(source, model, to, dtype, pause)
        return
    keys, original = source.config.model, source.origin.config if source.origin else {}
    if not dtype:
        dtype = original.get("dtype") or original.get("torch_dtype")
        plain = "bfloat16" if "quantization_config" in original else keys.weight_dtype
        dtype = dtype if dtype in _DTYPES else plain
    if has_adapters(model):
        model = _merge_adapters(model, dtype)
    side_files, special_ids, num_tokens = _make_side_files(source)
    vocab_size = keys.vocab_size
    if source.origin:  # without rows that only the mesh asked for
        vocab_size = min(vocab_size, max(source.origin.keys["vocab_size"], num_tokens))
    keys = dataclasses.replace(keys, vocab_size=vocab_size)
    values = config_json.make_config(keys, original, dtype) | special_ids
    side_files["config.json"] = _json(values)
    if special_ids:
        name = "generation_config.json"
        values = storage.parse_json(name, side_files.get(name, b"{}"))
        side_files[name] = _json(values | special_ids)
    drafts = FAMILIES[keys.decoder_block].released.drafts
    if keys.mtp_num_layers and not drafts:
        _note("the export has no drafts (mtp_num_layers), for which folders have no tensors")
    form = writing.Format(keys.decoder_block, dtype, vocab_size, fuse_experts=fuse_experts)
    side_tensors = _find_side_tensors(source)
    writing.write(
        to, model, form, side_files, _describe_weights(source, model), pause, side_tensors
    )


def _find_side_tensors(source: ModelSource) -> Mapping[str, Tensor]:
    """Returns tensors of the first weights that our model has no place for (draft layers),
    to be copied; {} for families without them, or, with a note, if they are gone."""
    keys = source.config.model
    begin = FAMILIES[keys.decoder_block].released.side_prefix
    begin = begin.format(keys.base_num_decoder_layers)
    if not begin or not source.origin or keys.mtp_num_layers:
        return {}
    try:
        return source.weights.side_tensors
    except ConfigError as error:
        _note(
            f"the export has no tensors {begin}*, which the model may have come with: {error}; to "
            "have them, put its folder back and export again"
        )
        return {}


def _merge_adapters(model: Decoder, dtype: str) -> Decoder:
    """Returns a model in a dtype with its adapters merged; `model` may lose its memory to it."""
    base = without_adapters(model)
    reusable = () if {x.dtype for x in jax.tree.leaves(base)} - {jnp.dtype(dtype)} else (0,)
    with jax.set_mesh(mesh_of(model)):
        merge = jax.jit(
            lambda base, adapters: merge_adapters(attach_adapters(adapters, base), dtype),
            donate_argnums=reusable,
        )
        return merge(base, stored_part(model))


def _export_adapters(
    source: ModelSource, model: Decoder, to: Place, dtype: str, pause: Callable[[], None]
) -> None:
    """Writes adapters as PEFT has them, on every process; a ConfigError if what they adapt is no
    model that PEFT can open, and as `writing.write`."""
    weights, keys = source.weights, source.config.model
    if not weights.adapted_model:
        why = "by whose positions and windows it no longer sees"
        if is_run(weights.base):
            why = "a run and no folder of Hugging Face's"
        raise ConfigError(
            f"{source.path} adapts {weights.base}, {why}: PEFT cannot open it; give --merge, which "
            "writes the whole model"
        )
    side_files, *_ = _make_side_files(source)
    for name in ("config.json", "generation_config.json"):
        side_files.pop(name, None)
    layers = source.config.optimizer.trainable_layers
    is_larger = bool(source.origin and source.origin.is_larger)
    values = adapter.make_config(keys, weights.adapted_model, layers, is_larger)
    side_files[adapter.CONFIG] = values
    form = writing.Format(
        *(keys.decoder_block, dtype or "float32", keys.vocab_size, layers),
        single_file=adapter.TENSORS,
        file_bytes=math.inf,
        in_larger=is_larger,
    )
    model = stored_part(model)
    writing.write(to, model, form, side_files, _describe_weights(source, model), pause)


def _describe_weights(source: ModelSource, model: Decoder) -> dict[str, Any]:
    """Returns what an export is made of: a saved state by its name, or weights by their hash, for
    which all processes call it together."""
    return {"weights": source.weights.saved or fingerprint_of_weights(order_by_layer(model))}


def _make_side_files(source: ModelSource) -> tuple[dict[str, bytes], dict[str, Any], int]:
    """Returns the side files of an export: those that the model came with, with the tokenizer and
    the chat template that it was trained with; the special ids for config.json if that is another
    tokenizer, else {}; and its number of tokens, 0 if not known. A ConfigError if these are more
    than the model's rows."""
    vocab_size = source.config.model.vocab_size
    side_files = dict(source.origin.side_files) if source.origin else {}
    tokenizer, special_ids = _load_tokenizer(source), {}
    files = _tokenizer_files(tokenizer) if tokenizer else {}
    if tokenizer and files["tokenizer.json"] != side_files.get("tokenizer.json"):
        if tokenizer.vocab_size > vocab_size:
            raise ConfigError(
                f"tokenizer_path={source.config.data.tokenizer_path}: has {tokenizer.vocab_size} "
                f"tokens, and the model has vocab_size={vocab_size}; give the tokenizer that it "
                "was trained with"
            )
        special_ids = {"bos_token_id": tokenizer.model.begin, "eos_token_id": tokenizer.model.end}
        side_files = {name: x for name, x in side_files.items() if name not in TOKENIZER} | files
    side_files |= _template_file(source, tokenizer)
    return side_files, special_ids, tokenizer.vocab_size if tokenizer else 0


def _load_tokenizer(source: ModelSource) -> Tokenizer | None:
    """Returns the tokenizer of the data if transformers has such tokenizers, else None, with a
    note. A ConfigError if it cannot be opened, and the model has more rows than it came with."""
    try:
        tokenizer = source.tokenizer().tokenizer
    except ConfigError as error:
        vocab_size = source.config.model.vocab_size
        released = source.origin.keys["vocab_size"] if source.origin else vocab_size
        if vocab_size > released:
            raise ConfigError(
                f"{error}; without it nobody knows which of vocab_size={vocab_size} rows are "
                f"tokens, beyond the {released} that the model came with; give tokenizer_path=FILE"
            ) from None
        _note(f"{error}; no tokenizer is written but what the model came with")
        return None
    if tokenizer.type == "huggingface":
        return tokenizer
    if not source.origin:
        _note(
            f"tokenizer_type={tokenizer.type}: transformers has no such tokenizer, so the "
            "folder has none"
        )
    return None


def _template_file(source: ModelSource, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """Returns the file of the chat template, if the model came without it: the tokenizer's own, or
    if that has none the one that chats were trained with, a ConfigError if it is gone. `tokenizer`
    None = that which the model came with."""
    path, released_template = source.config.data.chat_template, ""
    with contextlib.suppress(ConfigError):
        if source.origin:
            released = tokenizers.load(*source.origin.tokenizer, add_bos=False, add_eos=False)
            tokenizer, released_template = tokenizer or released, released.chat_template
    if own := tokenizer.chat_template if tokenizer else "":
        if path:
            _note(f"chat_template={path} was for training: the tokenizer's own is in the folder")
        return {} if own == released_template else {"chat_template.jinja": own.encode()}
    try:
        return {"chat_template.jinja": storage.read_bytes(path)} if path else {}
    except ConfigError as error:
        raise ConfigError(
            f"chat_template={path}: {error}; put it back, or write the folder with "
            f"maxramp.convert {source.path} --to FOLDER chat_template=FILE (='' for none)"
        ) from None


def _tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Returns the files of a Hugging Face tokenizer, by name."""
    ids = {"bos_token": tokenizer.model.begin, "eos_token": tokenizer.model.end}
    special = {name: tokenizer.decode([i]) for name, i in ids.items() if i is not None}
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | special
    files = {"tokenizer_config.json": _json(config)}
    if template := tokenizer.chat_template:
        files["chat_template.jinja"] = template.encode()
    return files | tokenizer.files()


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, indent=2, sort_keys=True).encode() + b"\n"
