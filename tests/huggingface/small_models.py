"""Small models of every family in Hugging Face's form, whose weights let each feature bite."""

import json
import pathlib

import ml_dtypes
import numpy as np

_SIZES = {
    **{"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"intermediate_size": 48, "num_hidden_layers": 4, "vocab_size": 40},
    **{"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu"},
    **{"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2},
    "torch_dtype": "float32",
}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3["original_max_position_embeddings"] = 16
_YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
_YARN |= {"beta_fast": 2.0, "beta_slow": 0.5}
_GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 5}
_GEMMA |= {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}
_GEMMA |= {"pad_token_id": None}  # whose embedding torch does not train


def _model(kind: str, **others) -> dict:
    """What config.json says of a kind, whose class has its name."""
    name = "".join(word.title() for word in kind.removesuffix("_text").split("_"))
    config = _SIZES | {"model_type": kind, "architectures": [f"{name}ForCausalLM"]} | others
    return config if "rope_parameters" in others else config | {"rope_theta": 100.0}


# A head's width, 16, is not the model's width over the number of heads.
_DEFAULT = {"rope_theta": 100.0, "rope_type": "default"}
_OLMO3 = {"full_attention": {**_YARN, "rope_theta": 100.0}}
_OLMO3["sliding_attention"] = _DEFAULT | {"rope_theta": 20.0}
_LINEAR = {"rope_type": "linear", "factor": 4.0}
_ROUTED = {"num_experts_per_tok": 3, "moe_intermediate_size": 24, "norm_topk_prob": True}
_DOTS1 = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 2}
_DOTS1 |= {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5} | _ROUTED
_LATENT = {**_DOTS1, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 10}
_LATENT |= {"qk_rope_head_dim": 8, "v_head_dim": 6}
# A norm of a head's first tokens multiplies rounding by the root of 1 / epsilon.
_DELTA = {"head_dim": 16, "rms_norm_eps": 1e-3, "linear_num_key_heads": 2}
_DELTA |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12}
_DELTA["rope_parameters"] = _DEFAULT | {"partial_rotary_factor": 0.25}
_HALF = _DEFAULT | {"partial_rotary_factor": 0.5}
_SHARED = {"shared_expert_intermediate_size": 24, "num_experts": 8, **_ROUTED}
CONFIGS = {
    "llama2": _model("llama", head_dim=16),
    "llama3.1": _model("llama", rope_scaling=_LLAMA3),
    "smollm2": _model(
        "llama", rope_parameters=_DEFAULT, tie_word_embeddings=True, num_key_value_heads=1
    ),
    "mistral": _model("mistral", sliding_window=5, head_dim=16),
    "qwen2.5": _model("qwen2", use_sliding_window=False),
    "qwen3": _model("qwen3", head_dim=16, tie_word_embeddings=True),
    "gemma2": _model("gemma2", **_GEMMA, attn_logit_softcapping=1.5, final_logit_softcapping=3.0),
    "gemma3": _model(  # a period of 6 layers, and 2 behind it
        "gemma3_text",
        **_GEMMA,
        **{"num_hidden_layers": 8, "rope_local_base_freq": 20.0, "rope_scaling": _LINEAR},
    ),
    "olmo2": _model("olmo2", pad_token_id=None, attention_bias=False),
    "olmo3": _model(
        "olmo3", num_hidden_layers=5, pad_token_id=None, sliding_window=5, rope_parameters=_OLMO3
    ),
    "mixtral": _model(
        "mixtral", head_dim=16, sliding_window=5, num_local_experts=4, num_experts_per_tok=2
    ),
    "qwen3_moe": _model("qwen3_moe", head_dim=16, num_experts=8, **_ROUTED),
    "olmoe": _model(
        "olmoe", pad_token_id=None, num_experts=4, num_experts_per_tok=2, norm_topk_prob=False
    ),
    "dots1": _model("dots1", **_DOTS1),
    "glm4_moe": _model(
        *("glm4_moe",),
        **{**_DOTS1, "head_dim": 16, "use_qk_norm": True, "attention_bias": True},
        rope_parameters=_HALF,
    ),
    "gpt_oss": _model(
        "gpt_oss",
        **{"head_dim": 16, "sliding_window": 5, "attention_bias": True},
        **{"num_local_experts": 4, "num_experts_per_tok": 2},
        rope_parameters=_YARN | {"rope_theta": 100.0, "truncate": False},
    ),
    "deepseek_v3": _model(
        "deepseek_v3",
        **{**_LATENT, "q_lora_rank": 16},
        rope_scaling=_YARN | {"mscale": 2.0, "mscale_all_dim": 0.7},
    ),
    "moonlight": _model(
        "deepseek_v3", **{**_LATENT, "q_lora_rank": None, "n_group": 1, "topk_group": 1}
    ),
    "qwen3_next": _model("qwen3_next", **_DELTA, **_SHARED),
    "qwen3_5": _model("qwen3_5_text", **_DELTA, architectures=["Qwen3_5ForCausalLM"]),
    "qwen3_5_moe": _model(
        "qwen3_5_moe_text", **_DELTA, **_SHARED, architectures=["Qwen3_5MoeForCausalLM"]
    ),
}
DELTA = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
EXPERTS = dict.fromkeys(("mixtral", "gpt_oss"), "num_local_experts")  # how many there are
EXPERTS |= dict.fromkeys(("dots1", "glm4_moe", "deepseek_v3"), "n_routed_experts")
EXPERTS |= dict.fromkeys(("qwen3_moe", "olmoe", "qwen3_next", "qwen3_5_moe"), "num_experts")
TOKENS_BT = (np.arange(48, dtype=np.int32) * 7 % 40).reshape(2, 24) ^ np.array([[0], [3]])


def shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Of the tensors, by name, as transformers has them."""
    D, F, V = (config[name] for name in ("hidden_size", "intermediate_size", "vocab_size"))
    H, K = config["num_attention_heads"], config["num_key_value_heads"]
    h = config.get("head_dim") or D // H
    by_name: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    kind = config["model_type"].removesuffix("_text")
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        attention = f"{layer}self_attn."
        by_name |= {
            f"{layer}input_layernorm.weight": (D,),
            f"{layer}self_attn.q_proj.weight": (H * h, D),
            f"{layer}self_attn.k_proj.weight": (K * h, D),
            f"{layer}self_attn.v_proj.weight": (K * h, D),
            f"{layer}self_attn.o_proj.weight": (D, H * h),
            f"{layer}post_attention_layernorm.weight": (D,),
        }
        if kind in EXPERTS and i >= config.get("first_k_dense_replace", 0):
            by_name |= _expert_shapes(layer, config)
        else:
            by_name |= _mlp_shapes(f"{layer}mlp.", F, D)
        heads = (("q", H), ("k", K), ("v", K))
        if kind == "qwen2" or config.get("attention_bias"):
            by_name |= {f"{attention}{n}_proj.bias": (w * h,) for n, w in heads}
        if kind == "gpt_oss":
            by_name |= {f"{attention}o_proj.bias": (D,), f"{attention}sinks": (H,)}
        if kind.startswith("gemma"):
            by_name |= {f"{layer}pre_feedforward_layernorm.weight": (D,)}
        if kind.startswith(("gemma", "olmo2", "olmo3")):
            by_name |= {f"{layer}post_feedforward_layernorm.weight": (D,)}
        if kind in ("olmo2", "olmo3"):
            del by_name[f"{layer}input_layernorm.weight"]
        if kind in ("qwen3", "qwen3_moe", "dots1", "glm4_moe", "gemma3", *DELTA):
            by_name |= {f"{layer}self_attn.{n}_norm.weight": (h,) for n in "qk"}
        if kind.startswith("olmo"):
            by_name |= {f"{attention}{n}_norm.weight": (w * h,) for n, w in heads[:2]}
        if kind == "deepseek_v3":
            by_name = {n: x for n, x in by_name.items() if not n.startswith(attention)}
            by_name |= _latent_shapes(attention, config)
        if kind in DELTA:
            by_name[f"{attention}q_proj.weight"] = (2 * H * h, D)
        if kind in DELTA and (i + 1) % 4:
            by_name = {n: x for n, x in by_name.items() if not n.startswith(attention)}
            by_name |= _delta_shapes(f"{layer}linear_attn.", config)
    by_name["model.norm.weight"] = (D,)
    if not config["tie_word_embeddings"]:
        by_name["lm_head.weight"] = (V, D)
    return by_name


def _mlp_shapes(
    prefix: str, F: int, D: int, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
) -> dict[str, tuple[int, ...]]:
    shapes = (F, D), (F, D), (D, F)
    return {f"{prefix}{name}.weight": x for name, x in zip(names, shapes, strict=True)}


def _delta_shapes(prefix: str, config: dict) -> dict[str, tuple[int, ...]]:
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    D, (K, H, k, v) = config["hidden_size"], (config[f"linear_{name}"] for name in names)
    F = 2 * K * k + H * v
    by_name = {"in_proj_qkv": (F, D), "in_proj_z": (H * v, D), "in_proj_b": (H, D)}
    by_name["in_proj_a"] = (H, D)
    if config["model_type"] == "qwen3_next":
        by_name = {"in_proj_qkvz": (F + H * v, D), "in_proj_ba": (2 * H, D)}
    by_name |= {"conv1d": (F, 1, 4), "norm": (v,), "out_proj": (D, H * v)}
    by_name = {f"{name}.weight": shape for name, shape in by_name.items()}
    return {f"{prefix}{n}": x for n, x in (by_name | {"A_log": (H,), "dt_bias": (H,)}).items()}


def _latent_shapes(prefix: str, config: dict) -> dict[str, tuple[int, ...]]:
    D, H, v = (config[name] for name in ("hidden_size", "num_attention_heads", "v_head_dim"))
    n, r, c = (config[x] for x in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
    by_name = {"q_proj": (H * (n + r), D)}
    if q := config["q_lora_rank"]:
        by_name = {"q_a_proj": (q, D), "q_a_layernorm": (q,), "q_b_proj": (H * (n + r), q)}
    by_name |= {"kv_a_proj_with_mqa": (c + r, D), "kv_a_layernorm": (c,)}
    by_name |= {"kv_b_proj": (H * (n + v), c), "o_proj": (D, H * v)}
    return {f"{prefix}{name}.weight": shape for name, shape in by_name.items()}


def _expert_shapes(layer: str, config: dict) -> dict[str, tuple[int, ...]]:
    kind, D = config["model_type"].removesuffix("_text"), config["hidden_size"]
    E, F = config[EXPERTS[kind]], config.get("moe_intermediate_size", config["intermediate_size"])
    if kind == "gpt_oss":
        experts = {"gate_up_proj": (E, D, 2 * F), "down_proj": (E, F, D)}
        experts |= {f"{name}_bias": (E, shape[2]) for name, shape in experts.items()}
        by_name = {f"{layer}mlp.experts.{name}": shape for name, shape in experts.items()}
        return by_name | {f"{layer}mlp.router.weight": (E, D), f"{layer}mlp.router.bias": (E,)}
    mlp = f"{layer}{'block_sparse_moe' if kind == 'mixtral' else 'mlp'}."
    names = [("w1", "w3", "w2")] if kind == "mixtral" else []
    by_name = {f"{mlp}gate.weight": (E, D)}
    for e in range(E):
        by_name |= _mlp_shapes(f"{mlp}experts.{e}.", F, D, *names)
    if kind in ("dots1", "glm4_moe", "deepseek_v3"):
        by_name[f"{mlp}gate.e_score_correction_bias"] = (E,)
        by_name |= _mlp_shapes(f"{mlp}shared_experts.", config["n_shared_experts"] * F, D)
    if kind in DELTA:
        by_name[f"{mlp}shared_expert_gate.weight"] = (1, D)
        by_name |= _mlp_shapes(f"{mlp}shared_expert.", F, D)
    return by_name


def fuse_experts(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors as transformers 5 holds them: those of all experts of a layer in two."""
    by_name, experts_by_layer = {}, {}
    for name, x in arrays.items():
        name = name.replace("block_sparse_moe", "mlp")
        for old, new in (("w1", "gate_proj"), ("w3", "up_proj"), ("w2", "down_proj")):
            name = name.replace(f".{old}.", f".{new}.")
        layer, is_of_expert, rest = name.partition("mlp.experts.")
        if is_of_expert and "." in rest:  # gpt-oss has no others
            expert, matrix, _ = rest.split(".")
            experts_by_layer.setdefault(layer, {}).setdefault(int(expert), {})[matrix] = x
        else:
            by_name[name] = x
    for layer, experts in experts_by_layer.items():
        experts_in_order = [experts[e] for e in range(len(experts))]
        gate_up = [np.concatenate([x["gate_proj"], x["up_proj"]]) for x in experts_in_order]
        by_name[f"{layer}mlp.experts.gate_up_proj"] = np.stack(gate_up)
        down = [x["down_proj"] for x in experts_in_order]
        by_name[f"{layer}mlp.experts.down_proj"] = np.stack(down)
    return by_name


def tensors(config: dict) -> dict[str, np.ndarray]:
    """Of a model, float32: matrices of 0.2, norms about 1 (or of 1 + weights: 0), biases of 0.5."""
    random, by_name = np.random.default_rng(0), {}
    is_offset = config["model_type"].startswith(("gemma", *DELTA))
    for name, shape in shapes(config).items():
        mean = not is_offset or "linear_attn." in name
        x = random.standard_normal(shape)
        x = mean + 0.3 * x if "norm" in name else x * (0.5 if name.endswith("bias") else 0.2)
        if name.endswith(("sinks", "gate_up_proj")):  # so that sinks count, and gates are cut
            x *= 5
        by_name[name] = x.astype(np.float32)
    return by_name


def draft_tensors(config: dict) -> dict[str, np.ndarray]:
    """Those of a folder's draft layer: as its last full layer, and what joins two vectors."""
    D, L = config["hidden_size"], config["num_hidden_layers"]
    is_appended = config["model_type"] in ("glm4_moe", "deepseek_v3")
    last, begin = f"model.layers.{L - 1}.", f"model.layers.{L}." if is_appended else "mtp.layers.0."
    by_name = {n.replace(last, begin): x for n, x in shapes(config).items() if n.startswith(last)}
    if is_appended:
        own = [f"{begin}{n}.weight" for n in ("enorm", "hnorm", "eh_proj", "shared_head.norm")]
    else:
        own = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
        own = [f"mtp.{n}.weight" for n in own]
    by_name |= dict(zip(own, ((D,), (D,), (D, 2 * D), (D,)), strict=True))
    random, held = np.random.default_rng(2), {}
    for name, shape in by_name.items():
        x = random.standard_normal(shape)
        x = is_appended + 0.3 * x if "norm" in name else x * (0.5 if name[-4:] == "bias" else 0.2)
        held[name] = x.astype(np.float32)
    if is_appended:
        main = tensors(config)
        copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
        held |= {f"{begin}{n}.weight": main[f"{x}.weight"] for n, x in copies.items()}
    return held


_SHAPES = ("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_hidden_layers")
_CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "int8": "I8"}
_CODES |= {"uint8": "U8", "float8_e4m3fn": "F8_E4M3"}


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
    folder: pathlib.Path,
    name: str,
    files: int = 1,
    dtype: str = "float32",
    drafts: bool = False,
    **changes,
) -> pathlib.Path:
    """The folder of a model; its tensors in so many files, and other values in config.json."""
    config = CONFIGS[name] | changes
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    sizes = {key: value for key, value in changes.items() if key in _SHAPES}
    arrays = tensors(CONFIGS[name] | sizes)
    arrays |= draft_tensors(CONFIGS[name] | sizes) if drafts else {}
    arrays = {key: x.astype(kind) for key, x in arrays.items()}
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
