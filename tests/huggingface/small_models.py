"""Small models of every family in Hugging Face's form, whose weights let each feature bite."""

import json
import pathlib

import ml_dtypes
import numpy as np

_SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3["original_max_position_embeddings"] = 16


def _model(kind: str, architecture: str, **others) -> dict:
    return {**_SIZES, "model_type": kind, "architectures": [architecture], **others}


# What config.json says. Heads of 16 are no quotient of the width.
CONFIGS = {
    "llama2": _model("llama", "LlamaForCausalLM", rope_theta=100.0, head_dim=16),
    "llama3.1": _model("llama", "LlamaForCausalLM", rope_theta=100.0, rope_scaling=_LLAMA3),
    "smollm2": _model(
        *("llama", "LlamaForCausalLM"),
        rope_parameters={"rope_theta": 100.0, "rope_type": "default"},
        tie_word_embeddings=True,
        num_key_value_heads=1,
    ),
    "mistral": _model(
        "mistral", "MistralForCausalLM", rope_theta=100.0, sliding_window=5, head_dim=16
    ),
    "qwen2.5": _model("qwen2", "Qwen2ForCausalLM", rope_theta=100.0, use_sliding_window=False),
    "qwen3": _model(
        *("qwen3", "Qwen3ForCausalLM"), rope_theta=100.0, head_dim=16, tie_word_embeddings=True
    ),
}
# What makes each of them another model than a Llama 2 with the same weights: a change of its
# config.json that takes it away, and tensors that go with it.
FEATURES = {
    "llama3.1": ({"rope_scaling": None}, ()),
    "mistral": ({"sliding_window": None}, ()),
    "qwen2.5": ({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, (".bias",)),
    "qwen3": (
        {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        (".q_norm.weight", ".k_norm.weight"),
    ),
}
TOKENS_BT = (np.arange(48, dtype=np.int32) * 7 % 40).reshape(2, 24) ^ np.array([[0], [3]])


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Of the tensors, by name, as transformers has them."""
    D, F, V = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    h = config.get("head_dim") or D // H
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        found |= {
            f"{layer}input_layernorm.weight": (D,),
            f"{layer}self_attn.q_proj.weight": (H * h, D),
            f"{layer}self_attn.k_proj.weight": (K * h, D),
            f"{layer}self_attn.v_proj.weight": (K * h, D),
            f"{layer}self_attn.o_proj.weight": (D, H * h),
            f"{layer}post_attention_layernorm.weight": (D,),
            f"{layer}mlp.gate_proj.weight": (F, D),
            f"{layer}mlp.up_proj.weight": (F, D),
            f"{layer}mlp.down_proj.weight": (D, F),
        }
        if config["model_type"] == "qwen2":
            found |= {
                f"{layer}self_attn.{n}_proj.bias": (w * h,)
                for n, w in zip("qkv", (H, K, K), strict=True)
            }
        if config["model_type"] == "qwen3":
            found |= {f"{layer}self_attn.{n}_norm.weight": (h,) for n in "qk"}
    found["model.norm.weight"] = (D,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (V, D)
    return found


def tensors(config: dict) -> dict[str, np.ndarray]:
    """Of a model, float32: matrices of 0.2, norms about 1, biases of 0.5."""
    random, found = np.random.default_rng(0), {}
    for name, shape in shapes(config).items():
        x = random.standard_normal(shape)
        x = 1 + 0.3 * x if "norm" in name else x * (0.5 if name.endswith("bias") else 0.2)
        found[name] = x.astype(np.float32)
    return found


_WIDTHS = ("vocab_size", "hidden_size", "intermediate_size", "head_dim")
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8"}


def write_file(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """A safetensors file, by its description."""
    entries, at = {"__metadata__": {"format": "pt"}}, 0
    for name, x in arrays.items():
        entries[name] = {"dtype": _CODES[x.dtype.name], "shape": list(x.shape)}
        entries[name]["data_offsets"] = [at, at + x.nbytes]
        at += x.nbytes
    header = json.dumps(entries).encode()
    data = b"".join(x.tobytes() for x in arrays.values())
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def write_folder(
    folder: pathlib.Path, name: str, files: int = 1, dtype: str = "float32", **changes
) -> pathlib.Path:
    """The folder of a model; its tensors in so many files, and other values in config.json."""
    config = CONFIGS[name] | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    sizes = {key: value for key, value in changes.items() if key in _WIDTHS}
    arrays = {key: x.astype(kind) for key, x in tensors(CONFIGS[name] | sizes).items()}
    if files == 1:
        write_file(folder / "model.safetensors", arrays)
        return folder
    where = {}
    for i in range(files):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        part = {key: arrays[key] for key in list(arrays)[i::files]}
        write_file(folder / file, part)
        where |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder
