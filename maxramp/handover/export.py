"""Exports a run's weights: everything in a model's folder besides the tensors."""

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
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
from maxramp.handover.opening import Opened, is_run, open_model
from maxramp.huggingface import adapter, config_json, writing
from maxramp.huggingface.folder import TOKENIZER
from maxramp.model.adapters import (
    attach_adapters,
    has_adapters,
    merge_adapters,
    stored_part,
    without_adapters,
)
from maxramp.model.decoder import Decoder
from maxramp.model.fingerprint import fingerprint_of_weights
from maxramp.model.order import order_by_layer
from maxramp.parallel.mesh import mesh_of
from maxramp.processes import agreement

_DTYPES = ("float32", "bfloat16", "float16")
_STALE = ".stale"  # of an export of a state that the run no longer has


def export_run(config: Config, pause: Callable[[], None], say: Callable[[str], None]) -> None:
    """Exports a finished run to exported/STEP of its folder, once.

    A run that saved no state, as the one it continues was finished, exports nothing. An export of
    another state of that number is set aside. `pause` is called between two tensors, on every
    process; `say` prints a line, on the first.
    """
    pause()
    run, mesh, base = config.run.folder, config.mesh, config.checkpoints.load_parameters_path
    if not agreement.decide_on_first(lambda: bool(steps_in(run / "checkpoints"))):
        return
    given = mesh.group("ici") | mesh.group("dcn")
    if config.model.lora_rank:  # the base may have moved since the checkpoint
        given["load_parameters_path"] = base
    opened = open_model(str(run), [f"{name}={value}" for name, value in given.items()])
    to = run / "exported" / opened.path.rpartition("/")[2]
    if agreement.decide_on_first(lambda: _is_made(to, opened)):
        return
    export(opened, opened.load(), to, "", not opened.adapted, pause=pause)
    say(f"wrote {to}")


def _is_made(to: Place, opened: Opened) -> bool:
    """Whether an export is of this state; sets aside one that is not."""
    if (made_of := writing.read_source(to)) is None:
        return False
    if made_of.get("weights") == opened.saved:
        return True
    try:
        _note(
            f"{to} is of another state than {opened.path}, or has lost files: now "
            f"{set_aside(to, _STALE)}"
        )
    except OSError as error:
        raise ConfigError(f"{to}: cannot be set aside: {reason_of(error)}") from None
    return False


def _note(line: str) -> None:
    if jax.process_index() == 0:
        print_note(line)


def _whole(model: Decoder, dtype: str) -> Decoder:
    """The model in a dtype with its adapters merged; it takes over the base's memory."""
    base = without_adapters(model)
    reusable = () if {x.dtype for x in jax.tree.leaves(base)} - {jnp.dtype(dtype)} else (0,)
    with jax.set_mesh(mesh_of(model)):
        merge = jax.jit(
            lambda base, adapters: merge_adapters(attach_adapters(adapters, base), dtype),
            donate_argnums=reusable,
        )
        return merge(base, stored_part(model))


def export(
    opened: Opened,
    model: Decoder,
    to: Place,
    dtype: str = "",
    merge: bool = False,
    fuse_experts: bool = False,
    pause: Callable[[], None] = lambda: None,
) -> None:
    """Writes a model as a folder of Hugging Face's, on every process; of adapters these alone, as
    PEFT has them, unless `merge`. `dtype` "" is that in which the tensors came, or weight_dtype.
    `pause` is called between two tensors.
    """
    if has_adapters(model) and not merge:
        _export_adapters(opened, model, to, dtype, pause)
        return
    keys, came_in = opened.config.model, opened.origin.config if opened.origin else {}
    came_as = came_in.get("dtype") or came_in.get("torch_dtype")
    dtype = dtype or (came_as if came_as in _DTYPES else keys.weight_dtype)
    model = _whole(model, dtype) if has_adapters(model) else model
    beside, marks, known = _files_beside(opened)
    vocab_size = keys.vocab_size
    if opened.origin:  # without rows that only the mesh asked for
        vocab_size = min(vocab_size, max(opened.origin.keys["vocab_size"], known))
    keys = dataclasses.replace(keys, vocab_size=vocab_size)
    values = config_json.make_config(keys, came_in, dtype) | marks
    beside["config.json"] = _json(values)
    if marks:
        name = "generation_config.json"
        beside[name] = _json(storage.parse_json(name, beside.get(name, b"{}")) | marks)
    form = writing.Format(keys.decoder_block, dtype, vocab_size, fuse_experts=fuse_experts)
    writing.write(to, model, form, beside, _source(opened, model), pause)


def _export_adapters(
    opened: Opened, model: Decoder, to: Place, dtype: str, pause: Callable[[], None]
) -> None:
    if not opened.adapted:
        below, why = opened.weights.base, "by whose positions and windows it no longer sees"
        if is_run(below):
            why = "a run and no folder of Hugging Face's"
        raise ConfigError(
            f"{opened.path} adapts {below}, {why}: PEFT cannot open it; give --merge, which writes "
            "the whole model"
        )
    keys, (beside, *_) = opened.config.model, _files_beside(opened)
    for name in ("config.json", "generation_config.json"):
        beside.pop(name, None)
    layers = opened.config.optimizer.trainable_layers
    is_larger = bool(opened.origin and opened.origin.is_larger)
    beside[adapter.CONFIG] = adapter.make_config(keys, opened.adapted, layers, is_larger)
    written = keys.decoder_block, dtype or "float32", keys.vocab_size, layers
    form = writing.Format(*written, adapter.TENSORS, math.inf, in_larger=is_larger)
    model = stored_part(model)
    writing.write(to, model, form, beside, _source(opened, model), pause)


def _source(opened: Opened, model: Decoder) -> dict[str, Any]:
    """What an export is of: a saved state by its name, or weights by their hash."""
    return {"weights": opened.saved or fingerprint_of_weights(order_by_layer(model))}


def _files_beside(opened: Opened) -> tuple[dict[str, bytes], dict[str, Any], int]:
    """What the model came with, but the tokenizer and the template of what it was trained on; the
    marks of another tokenizer, as config.json has them; and how many tokens it has.
    """
    vocab_size, beside = opened.config.model.vocab_size, {}
    if opened.origin:
        beside = dict(opened.origin.side_files)
    tokenizer, marks = _tokenizer_of(opened), {}
    files = _files_of(tokenizer) if tokenizer else {}
    if tokenizer and files["tokenizer.json"] != beside.get("tokenizer.json"):  # not what came in
        if tokenizer.vocab_size > vocab_size:
            raise ConfigError(
                f"tokenizer_path={opened.config.data.tokenizer_path}: has {tokenizer.vocab_size} "
                f"tokens, and the model has vocab_size={vocab_size}; give the tokenizer that it "
                "was trained with"
            )
        marks = {"bos_token_id": tokenizer.model.begin, "eos_token_id": tokenizer.model.end}
        beside = {name: data for name, data in beside.items() if name not in TOKENIZER} | files
    beside |= _template_of(opened, tokenizer)
    return beside, marks, tokenizer.vocab_size if tokenizer else 0


def _tokenizer_of(opened: Opened) -> Tokenizer | None:
    try:
        tokenizer = opened.tokenizer().tokenizer
    except ConfigError as error:
        size = opened.config.model.vocab_size
        if opened.origin and size > (there := opened.origin.keys["vocab_size"]):
            raise ConfigError(
                f"{error}; without it nobody knows which of vocab_size={size} rows are tokens, "
                f"beyond the {there} that the model came with; give tokenizer_path=FILE"
            ) from None
        _note(f"{error}; no tokenizer is written but what the model came with")
        return None
    if tokenizer.type != "huggingface" and not opened.origin:
        _note(
            f"tokenizer_type={tokenizer.type}: transformers has no such tokenizer, so the "
            "folder has none"
        )
    return tokenizer if tokenizer.type == "huggingface" else None


def _template_of(opened: Opened, tokenizer: Tokenizer | None) -> dict[str, bytes]:
    """The template for chats, if it is not the one that the model came with: the tokenizer's own,
    or where that has none the file that chats were trained with.
    """
    path, came_with = opened.config.data.chat_template, ""
    with contextlib.suppress(ConfigError):
        if opened.origin:
            released = tokenizers.load(*opened.origin.tokenizer, False, False)
            tokenizer, came_with = tokenizer or released, released.chat_template
    if own := tokenizer.chat_template if tokenizer else "":
        if path:
            _note(f"chat_template={path} was for training: the tokenizer's own is in the folder")
        return {} if own == came_with else {"chat_template.jinja": own.encode()}
    try:
        return {"chat_template.jinja": storage.read_bytes(path)} if path else {}
    except ConfigError as error:
        raise ConfigError(
            f"chat_template={path}: {error}; put it back, or write the folder with "
            f"maxramp.convert {opened.path} --to FOLDER chat_template=FILE (='' for none)"
        ) from None


def _files_of(tokenizer: Tokenizer) -> dict[str, bytes]:
    named = {"bos_token": tokenizer.model.begin, "eos_token": tokenizer.model.end}
    marks = {name: tokenizer.decode([mark]) for name, mark in named.items() if mark is not None}
    files = {"tokenizer_config.json": _json({"tokenizer_class": "PreTrainedTokenizerFast"} | marks)}
    if template := tokenizer.chat_template:
        files["chat_template.jinja"] = template.encode()
    return files | tokenizer.files()


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, indent=2, sort_keys=True).encode() + b"\n"
