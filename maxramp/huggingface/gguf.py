"""A GGUF file -> a model's folder as Hugging Face has them: weights, sizes, tokenizer, template.

GGUF is llama.cpp's format (https://github.com/ggml-org/ggml, docs/gguf.md): one file of tensors,
mostly quantized, with the tokenizer among its fields. Quantized weights come out as the numbers
that they stand for. Imports no JAX.
"""

import json
import math
import os
import shutil
from typing import Any

import numpy as np

from maxramp.commandline import print_progress
from maxramp.errors import ConfigError, reason_of
from maxramp.files.place import Place, is_near
from maxramp.files.storage import optional
from maxramp.huggingface.safetensors import CODES, DTYPES, ONE, header_of

# A tensor's name in a GGUF -> in a folder; those of a layer begin with blk.N.
_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_OF_LAYERS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# How words are cut, by llama.cpp's names: whether digits stand alone.
_DIGITS_ALONE = {"smollm": True, "gpt-2": False}
_CONTROL = 3  # the type of a token that is a mark


def unpack(path: str, to: Place, dtype: str) -> None:
    """Writes the folder of a model with tensors of this dtype; it appears when all is there."""
    if not is_near(to):
        raise ConfigError(
            f"--to {to}: a GGUF file is unpacked to a local folder; copy it afterwards"
        )
    gguf = optional("gguf", "gguf", path, extra="gguf")
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        config, sources = _config(path, fields, dtype), {}
        for tensor in reader.tensors:
            name = _name_of(tensor.name)
            if not name:
                raise ConfigError(f"{path}: its tensor {tensor.name} is not one of a Llama's")
            sources[name] = tensor
        config["tie_word_embeddings"] = "lm_head.weight" not in sources
        shapes = {name: tuple(map(int, tensor.shape[::-1])) for name, tensor in sources.items()}
        _check(path, shapes, config)
        beside = {"config.json": config, **_tokenizer(path, fields)}
    except ConfigError:
        raise
    except Exception as error:  # of the reader or of tokenizers, which have many
        reason = f"{type(error).__name__}: {reason_of(error)}"
        raise ConfigError(f"{path}: is not a GGUF file, or is torn ({reason})") from None
    print_progress(f"reading the weights of {path}")

    unfinished = to.with_name(f".{to.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir(parents=True)
        for name, content in beside.items():
            text = content if isinstance(content, str) else json.dumps(content, indent=2)
            (unfinished / name).write_text(text, encoding="utf-8")
        with open(unfinished / ONE, "wb") as file:
            file.write(header_of({name: (CODES[dtype], shape) for name, shape in shapes.items()}))
            for name, tensor in sources.items():
                x = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shapes[name])
                if name.endswith(("q_proj.weight", "k_proj.weight")):
                    x = _pair_halves(x, config["head_dim"])
                file.write(np.ascontiguousarray(x, DTYPES[CODES[dtype]]).view(np.uint8).data)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(to)
    except OSError as error:
        raise ConfigError(f"--to {to}: cannot be written ({error.strerror or error})") from None
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(f"{path}: {name} cannot be read ({reason_of(error)})") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _name_of(name: str) -> str:
    """The name that a tensor has in a folder; "" where there is none."""
    block, _, rest = name.partition(".")
    number, _, kind = rest.partition(".")
    if block != "blk":
        return _NAMES.get(name, "")
    ours = _OF_LAYERS.get(kind.removesuffix(".weight"), "")
    return f"model.layers.{number}.{ours}.weight" if ours else ""


def _check(path: str, shapes: dict[str, tuple[int, ...]], config: dict[str, Any]) -> None:
    V, D, F = (config[name] for name in ("vocab_size", "hidden_size", "intermediate_size"))
    H, K = (config[f"num_{of}_heads"] * config["head_dim"] for of in ("attention", "key_value"))
    of_layer = {"q_proj": (H, D), "k_proj": (K, D), "v_proj": (K, D), "o_proj": (D, H)}
    of_layer = {f"self_attn.{name}": shape for name, shape in of_layer.items()}
    of_layer |= {"mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)}
    of_layer |= {"input_layernorm": (D,), "post_attention_layernorm": (D,)}
    expected = {
        f"model.layers.{i}.{name}.weight": shape
        for i in range(config["num_hidden_layers"])
        for name, shape in of_layer.items()
    }
    expected |= {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    if not config["tie_word_embeddings"]:
        expected["lm_head.weight"] = (V, D)
    for name in sorted(expected.keys() | shapes.keys()):
        if shapes.get(name) != expected.get(name):
            raise ConfigError(
                f"{path}: {name} is {shapes.get(name, 'not there')}, and its fields make it "
                f"{expected.get(name, 'none of the model')}; it is torn"
            )


def _pair_halves(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Rows of queries or keys whose rotary pairs are neighbours -> number i beside i + h / 2."""
    rows = weight.reshape(-1, head_dim // 2, 2, weight.shape[-1])
    return rows.swapaxes(1, 2).reshape(weight.shape)


def _config(path: str, fields: dict[str, Any], dtype: str) -> dict[str, Any]:
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
    return config | _marks(fields)


def _short(value: float) -> float:
    """The shortest number that is this float32."""
    return float(str(np.float32(value))) if math.isfinite(value) else value


def _marks(fields: dict[str, Any]) -> dict[str, int]:
    """The ids of marks by the names of config.json."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {f"{n}_token_id": fields.get(f"tokenizer.ggml.{x}_token_id") for n, x in names.items()}
    return {name: number for name, number in ids.items() if number is not None}


def _tokenizer(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    said = {
        name: fields.get(f"tokenizer.ggml.{name}") for name in ("model", "pre", "add_bos_token")
    }
    if said["model"] != "gpt2" or said["pre"] not in _DIGITS_ALONE:
        raise ConfigError(
            f"{path}: its tokenizer is of the kind {said['model']}, {said['pre']}; those of gpt2 "
            f"with {', '.join(_DIGITS_ALONE)} can be unpacked"
        )
    library = optional("tokenizers", "tokenizers", path)
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    model = library.Tokenizer(library.models.BPE(vocabulary, merges))
    steps = library.pre_tokenizers
    cut = steps.ByteLevel(add_prefix_space=False)
    if _DIGITS_ALONE[said["pre"]]:
        cut = steps.Sequence([steps.Digits(individual_digits=True), cut])
    model.pre_tokenizer, model.decoder = cut, library.decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    model.add_special_tokens([library.AddedToken(t, special=True) for t in special])
    ids = _marks(fields)
    if said["add_bos_token"]:
        begin = tokens[ids["bos_token_id"]]
        model.post_processor = library.processors.TemplateProcessing(
            f"{begin} $A", special_tokens=[(begin, ids["bos_token_id"])]
        )
    named = {name.removesuffix("_id"): tokens[number] for name, number in ids.items()}
    described = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    files = {"tokenizer.json": model.to_str(), "tokenizer_config.json": described}
    files["generation_config.json"] = ids
    if template := fields.get("tokenizer.chat_template"):
        files["chat_template.jinja"] = template
    return files
