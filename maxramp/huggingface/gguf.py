"""A GGUF file -> a model's folder as Hugging Face has them: weights, sizes, tokenizer, template.

GGUF is llama.cpp's format (https://github.com/ggml-org/ggml, docs/gguf.md): one file of tensors,
mostly quantized, with the tokenizer among its fields. Quantized weights come out as the numbers
that they stand for. Imports no JAX.
"""

import json
import math
import os
import shutil
from collections.abc import Mapping
from typing import Any

import numpy as np

from maxramp.commandline import print_progress
from maxramp.errors import ConfigError, reason_of
from maxramp.files.place import Place, is_near
from maxramp.files.storage import optional
from maxramp.huggingface.safetensors import CODES, DTYPES, OVERFLOW, SINGLE_FILE, make_header

# By a tensor's name in a GGUF its name in a folder, and its axes: V vocabulary, D width, F width of
# the MLP, H and K all heads of queries, and of keys and values.
_TENSORS = {
    "token_embd": ("model.embed_tokens", "VD"),
    "output_norm": ("model.norm", "D"),
    "output": ("lm_head", "VD"),
}
_LAYER_TENSORS = {
    "attn_norm": ("input_layernorm", "D"),
    "attn_q": ("self_attn.q_proj", "HD"),
    "attn_k": ("self_attn.k_proj", "KD"),
    "attn_v": ("self_attn.v_proj", "KD"),
    "attn_output": ("self_attn.o_proj", "DH"),
    "ffn_norm": ("post_attention_layernorm", "D"),
    "ffn_gate": ("mlp.gate_proj", "FD"),
    "ffn_up": ("mlp.up_proj", "FD"),
    "ffn_down": ("mlp.down_proj", "DF"),
}
# By llama.cpp's name of a pre-tokenizer, whether each digit is a word of its own.
_SPLITS_DIGITS = {"smollm": True, "gpt-2": False}
_CONTROL = 3  # the type of a special token


def unpack(path: str, to: Place, dtype: str) -> None:
    """Writes the folder of a model with tensors of this dtype (of CODES); it appears when all is
    there. Only one process may write a folder.

    A ConfigError if `to` is not local, holds files or cannot be written, or the file cannot be
    read, or holds numbers that the dtype cannot."""
    if not is_near(to):
        raise ConfigError(
            f"--to {to}: a GGUF file is unpacked to a local folder; copy it afterwards"
        )
    gguf = optional("gguf", "gguf", path, extra="gguf")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        config = _config(path, fields, dtype)
        tensors = _rename(path, {tensor.name: tensor for tensor in reader.tensors}, config)
        config["tie_word_embeddings"] = "lm_head.weight" not in tensors
        side_files = {"config.json": config, **_tokenizer_files(path, fields)}
    except ConfigError:
        raise
    except Exception as error:  # the reader and tokenizers raise many kinds
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise ConfigError(f"{path}: is not a GGUF file, or is torn ({reason})") from None
    print_progress(f"loading the weights of {path}")

    unfinished = to.with_name(f".{to.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        for name, content in side_files.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2)
            (unfinished / name).write_text(text, encoding="utf-8")
        shapes = {name: _shape(tensor) for name, tensor in tensors.items()}
        with open(unfinished / SINGLE_FILE, "wb") as file:
            file.write(make_header({name: (CODES[dtype], shape) for name, shape in shapes.items()}))
            for name, tensor in tensors.items():
                x = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shapes[name])
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    x = _halve_rotary_pairs(x, config["head_dim"])
                with np.errstate(over="ignore"):
                    x = np.ascontiguousarray(x, DTYPES[CODES[dtype]])
                if dtype == "float16" and not np.isfinite(x).all():
                    raise ValueError(OVERFLOW)
                file.write(x.view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(to)
    except OSError as error:
        raise ConfigError(f"--to {to}: cannot be written ({error.strerror or error})") from None
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(f"{path}: {name} cannot be converted: {reason_of(error)}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _shape(tensor: Any) -> tuple[int, ...]:
    """Returns the shape of a GGUF's tensor in C order."""
    return tuple(map(int, tensor.shape[::-1]))


def _rename(path: str, tensors: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns tensors by their names in a folder; refuses others than the config's, missing ones
    and other shapes."""
    table = {f"{theirs}.weight": entry for theirs, entry in _TENSORS.items()}
    for i in range(config["num_hidden_layers"]):
        for theirs, (name, axes) in _LAYER_TENSORS.items():
            table[f"blk.{i}.{theirs}.weight"] = f"model.layers.{i}.{name}", axes
    if unknown := tensors.keys() - table.keys():
        raise ConfigError(f"{path}: its tensor {min(unknown)} is not one of its fields' Llama")
    heads = {"H": config["num_attention_heads"], "K": config["num_key_value_heads"]}
    sizes = {axis: number * config["head_dim"] for axis, number in heads.items()}
    sizes |= {"V": config["vocab_size"], "D": config["hidden_size"]}
    sizes["F"] = config["intermediate_size"]
    renamed = {}
    for theirs, (name, axes) in table.items():
        if theirs == "output.weight" and theirs not in tensors:
            continue  # the head is the embedding
        shape = _shape(tensors[theirs]) if theirs in tensors else "not there"
        expected = tuple(map(sizes.get, axes))
        if shape != expected:
            raise ConfigError(
                f"{path}: {name}.weight is {shape}, and its fields make it {expected}; it is torn"
            )
        renamed[f"{name}.weight"] = tensors[theirs]
    return renamed


def _halve_rotary_pairs(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorders rows of queries or keys: pairs (2i, 2i + 1) become pairs (i, i + h / 2)."""
    rows = weight.reshape(-1, head_dim // 2, 2, weight.shape[-1])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def _config(path: str, fields: dict[str, Any], dtype: str) -> dict[str, Any]:
    """Returns the config.json that a Llama's fields make; a ConfigError for another kind, or
    without a field."""
    kind = fields.get("general.architecture")
    if kind != "llama":
        raise ConfigError(f"{path}: is a model of the kind {kind}; only llama can be unpacked")

    def field(name: str, *default: Any) -> Any:
        if f"llama.{name}" not in fields and not default:
            raise ConfigError(f"{path}: has no field llama.{name}; it is torn")
        return fields.get(f"llama.{name}", *default)

    heads, width = field("attention.head_count"), field("embedding_length")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": field("attention.key_length", width // heads),
        "hidden_act": "silu",
        "rms_norm_eps": _short(field("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(field("rope.freq_base", 10000.0)),
        "max_position_embeddings": field("context_length"),
        "vocab_size": len(fields.get("tokenizer.ggml.tokens", ())),
        "torch_dtype": dtype,
    }
    for name in fields:
        if name.startswith("llama.rope.scaling"):
            raise ConfigError(f"{path}: {name}={fields[name]} cannot be taken over")
    return config | _special_ids(fields)


def _short(value: float) -> float:
    """Returns the shortest number that is this float32."""
    return float(str(np.float32(value))) if math.isfinite(value) else value


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    """Returns the ids of special tokens by the names of config.json."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {f"{n}_token_id": fields.get(f"tokenizer.ggml.{x}_token_id") for n, x in names.items()}
    return {name: number for name, number in ids.items() if number is not None}


def _tokenizer_files(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Makes the files of the tokenizer, the chat template and generation_config.json by name: their
    texts, or what they hold as JSON. Refuses other tokenizers than gpt2's; may raise anything for a
    torn file."""
    kind, pre = (fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre"))
    if kind != "gpt2" or pre not in _SPLITS_DIGITS:
        raise ConfigError(
            f"{path}: its tokenizer is of the kind {kind}, {pre}; those of gpt2 with "
            f"{', '.join(_SPLITS_DIGITS)} can be unpacked"
        )
    library = optional("tokenizers", "tokenizers", path)
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = library.Tokenizer(library.models.BPE(vocabulary, merges))
    steps = library.pre_tokenizers
    split = steps.ByteLevel(add_prefix_space=False)
    if _SPLITS_DIGITS[pre]:
        split = steps.Sequence([steps.Digits(individual_digits=True), split])
    model.pre_tokenizer, model.decoder = split, library.decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    model.add_special_tokens([library.AddedToken(t, special=True) for t in special])
    ids = _special_ids(fields)
    if fields.get("tokenizer.ggml.add_bos_token"):
        begin = tokens[ids["bos_token_id"]]
        model.post_processor = library.processors.TemplateProcessing(
            f"{begin} $A", special_tokens=[(begin, ids["bos_token_id"])]
        )
    named = {name.removesuffix("_id"): tokens[number] for name, number in ids.items()}
    files = {
        "tokenizer.json": model.to_str(),
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast", **named},
        "generation_config.json": ids,
    }
    if template := fields.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = template
    return files
