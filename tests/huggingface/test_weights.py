"""Folders in, and out again: logits of transformers 5.23.0, and bits that nothing changes."""

import dataclasses
import errno
import json
import os

import jax
import ml_dtypes
import numpy as np
import pytest
from opened import config_of, contents, load, logits
from small_models import CONFIGS, DELTA, TOKENS_BT, fuse_experts, tensors, write_file, write_folder

from maxramp.errors import ConfigError, TrainingError
from maxramp.handover.export import export
from maxramp.handover.opening import open_model
from maxramp.huggingface import config_json, writing
from maxramp.huggingface import folder as released
from maxramp.model.families.table import FAMILIES

# Logits of tokens 0 to 3 behind the 24 of the first row, in float64.
LOGITS = {
    "llama2": [1.025871, 0.6503075, 1.612939, 0.3055606],
    "llama3.1": [-1.066454, -0.2543226, 0.2883878, 1.745472],
    "smollm2": [-0.4556763, -0.7171515, 0.9099445, 0.9408427],
    "mistral": [0.4431652, 1.279232, 0.5133868, -0.4040432],
    "qwen2.5": [-1.093388, 0.4035266, -0.6340503, 0.1460493],
    "qwen3": [0.5307152, 0.263553, -1.938719, -0.01671704],
    "gemma2": [0.4451374, 1.180771, 0.4085184, -0.7411908],
    "gemma3": [-0.1697695, 2.968156, 0.7088717, -1.276586],
    "olmo2": [-1.060326, 0.0128716, -0.7635879, 1.41282],
    "olmo3": [-1.210828, -1.368718, 0.08731948, 0.6316202],
    "mixtral": [0.6406224, -0.4593171, -0.7951101, 1.251992],
    "qwen3_moe": [-1.35334, 1.899141, 0.6102671, 0.7275049],
    "olmoe": [1.355005, 0.01590214, 0.4144442, 0.2993829],
    "dots1": [1.682764, 1.061812, 0.6824106, -1.028854],
    "glm4_moe": [0.6955175, 1.254584, -1.171304, 0.2292855],
    "gpt_oss": [1.004655, -0.06210462, 1.206605, -0.01171614],
    "deepseek_v3": [-3.242073, -0.5585298, -0.8004727, 1.707481],
    "moonlight": [-1.067545, -1.299355, -0.3868647, 0.8973283],
    # in float32, as transformers routes in no other
    "qwen3_next": [-1.241232, -1.040892, -0.04328566, 1.081493],
    "qwen3_5": [3.308441, 0.2121528, -2.55886, 0.6455256],
    "qwen3_5_moe": [0.1536666, -1.383056, 2.063945, 0.06949299],
}
MESHES = {
    "one": (),
    "all axes": ("ici_data_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"),
    "experts": ("ici_expert_parallelism=2", "ici_fsdp_parallelism=2", "ici_tensor_parallelism=2"),
    "expert pipeline": (
        *("ici_pipeline_parallelism=2", "num_pipeline_repeats=2", "ici_expert_parallelism=2"),
        *("ici_fsdp_parallelism=2", "num_pipeline_microbatches=2"),
    ),
    "pipeline": ("ici_pipeline_parallelism=2", "ici_fsdp_parallelism=4"),
    "circular pipeline": (
        *("ici_pipeline_parallelism=2", "num_pipeline_repeats=2", "ici_tensor_parallelism=2"),
        *("ici_fsdp_parallelism=2", "num_pipeline_microbatches=2"),
    ),
}


def on_mesh(folder, mesh, *keys):
    """A config of a folder's model on a mesh, and its weights there."""
    devices = 8 if MESHES[mesh] else 1
    rows = f"per_device_batch_size={2 if 'pipeline' in mesh else 1}"
    config = config_of(folder, *MESHES[mesh], rows, *keys, devices=devices)
    return config, load(folder, config)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_transformers(tmp_path, name):
    config, model = on_mesh(write_folder(tmp_path, name), "one")
    actual = logits(model, config, TOKENS_BT)
    limit = 1e-5 * (actual.max() - actual.min())
    np.testing.assert_allclose(actual[0, -1, :4], LOGITS[name], atol=limit)


@pytest.mark.parametrize(
    "name, mesh",
    [
        *(("qwen3", "all axes"), ("olmoe", "experts")),
        *(
            pytest.param(name, mesh, marks=pytest.mark.slow)
            for name, mesh in (
                *(("qwen2.5", "pipeline"), ("qwen2.5", "circular pipeline"), ("dots1", "experts")),
                *(("gemma2", "pipeline"), ("gemma3", "all axes"), ("olmoe", "expert pipeline")),
                *(("qwen3_next", "experts"), ("qwen3_5", "all axes"), ("gpt_oss", "experts")),
                ("deepseek_v3", "all axes"),
            )
        ),
    ],
)
def test_any_mesh_holds_the_same_weights_and_gives_them_back(tmp_path, name, mesh):
    """Bit by bit, in several files, from several files."""
    # A single key and value head cannot be cut.
    folder = write_folder(tmp_path / "in", name, files=3)
    config, model = on_mesh(folder, mesh)
    _, one = on_mesh(folder, "one")
    if "num_pipeline_repeats=2" not in MESHES[mesh]:  # which holds its layers in another order
        jax.tree.map(np.testing.assert_array_equal, *map(jax.tree.leaves, (model, one)))
    write(tmp_path / "out", config, model, file_bytes=20_000)
    assert len([n for n in os.listdir(tmp_path / "out") if n.endswith(".safetensors")]) > 3
    assert_same_tensors(tmp_path / "out", tensors(CONFIGS[name]))


def write(to, config, model, dtype="float32", vocab_size=40, **options):
    values = config_json.make_config(config.model, {}, dtype)
    beside = {"config.json": json.dumps(values).encode()}
    form = writing.Format(config.model.decoder_block, dtype, vocab_size, **options)
    writing.write(to, model, form, beside, {})


def assert_same_tensors(folder, expected):
    jax.tree.map(np.testing.assert_array_equal, contents(folder), expected)


def test_tensors_are_read_in_their_dtype_and_held_in_ours(tmp_path):
    folder = write_folder(tmp_path / "in", "llama2", dtype="bfloat16")
    config, model = on_mesh(folder, "one", "weight_dtype=bfloat16")
    write(tmp_path / "out", config, model, "bfloat16")
    expected = {k: x.astype(ml_dtypes.bfloat16) for k, x in tensors(CONFIGS["llama2"]).items()}
    assert_same_tensors(tmp_path / "out", expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_changes_no_key_that_the_run_did_not_change(tmp_path, name):
    """Also of rows shorter than the model's texts, and where transformers' class decides."""
    few = {key: x for key, x in CONFIGS[name].items() if key != "max_position_embeddings"}
    keys = config_of(write_folder(tmp_path, name)).model
    both = {"rope_theta"} if "rope_parameters" in few else set()  # transformers below 5 reads it
    for original in (CONFIGS[name], few, few | {"dtype": "float32", "made_by": {"a": 1}}):
        written = config_json.make_config(keys, original, "float32")
        assert {key: x for key, x in written.items() if key in original} == original
        assert written.keys() - original.keys() <= both | ({"rope_scaling"} if both else set())
    longest = config_json.longest_text(few, "")
    longer = dataclasses.replace(keys, max_target_length=2 * longest)
    written = config_json.make_config(longer, few, "bfloat16")
    assert written["max_position_embeddings"] == 2 * longest
    assert written["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize("name", CONFIGS)
def test_config_json_says_the_same_again_and_what_was_changed(tmp_path, name):
    """Positions and windows may be others than those that the weights came with."""
    folder = write_folder(tmp_path, name)
    keys, model = released.find("", str(folder)).keys, config_of(folder).model
    rope_keys = {"rope_max_timescale": 500.0, "rope_type": "llama3.1", "rope_factor": 4.0}
    rope_keys |= {"sliding_window_size": 7} if name == "mistral" else {}
    changed = dataclasses.replace(model, **rope_keys)
    for original in ({}, CONFIGS[name]):
        same, other = (config_json.make_config(x, original, "float32") for x in (model, changed))
        assert config_json.read_keys(same, "") == keys
        assert rope_keys.items() <= config_json.read_keys(other, "").items()


def test_kimi_k2_is_a_deepseek_v3(tmp_path):
    kimi = CONFIGS["moonlight"] | {"model_type": "kimi_k2"}
    keys = config_of(write_folder(tmp_path, "moonlight", model_type="kimi_k2")).model
    assert keys == config_of(write_folder(tmp_path, "moonlight")).model
    assert config_json.make_config(keys, kimi, "float32") == CONFIGS["moonlight"]
    # Without shared experts transformers still writes their tensors, empty.
    bare = {"n_shared_experts": 0}
    folder = write_folder(tmp_path, "moonlight", **bare)
    write_file(folder / "model.safetensors", tensors(CONFIGS["moonlight"] | bare))
    load(folder, config_of(folder))


@pytest.mark.parametrize("mesh", ["one", "all axes"])
def test_new_rows_of_a_larger_vocabulary_are_the_mean_of_the_others(tmp_path, mesh):
    _, model = on_mesh(write_folder(tmp_path, "llama2"), mesh, "vocab_size=48")
    plain = tensors(CONFIGS["llama2"])
    for ours, name in ((model.embedding_VD, "model.embed_tokens"), (model.head_DV, "lm_head")):
        actual = np.asarray(ours[...])
        actual, old = actual if len(actual) == 48 else actual.T, plain[f"{name}.weight"]
        np.testing.assert_array_equal(actual[:40], old)
        np.testing.assert_allclose(actual[40:], np.tile(old.mean(0), (8, 1)), atol=1e-6)


def test_what_belongs_to_no_text_model_is_left_out_and_named(tmp_path):
    folder = write_folder(tmp_path, "qwen3")
    more = {f"vision_tower.layer.{i}.weight": np.zeros((2, 2), np.float32) for i in range(4)}
    more["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
    embedding = tensors(CONFIGS["qwen3"])["model.embed_tokens.weight"]
    held = tensors(CONFIGS["qwen3"]) | more | {"lm_head.weight": embedding}
    write_file(folder / "model.safetensors", held)
    notes = []
    load(folder, config_of(folder), notes.append)
    text = " ".join(notes)
    assert "4 tensors are left out, of no text model: vision_tower.layer.0.weight" in text
    assert "inv_freq" in text and "the head, which is the embedding: lm_head.weight" in text


@pytest.mark.parametrize(
    ("name", "layer"),
    [("qwen3_5", "mtp"), ("glm4_moe", "model.layers.4"), ("moonlight", "model.layers.4")],
)
def test_tensors_that_do_not_train_are_exported_as_they_came(tmp_path, name, layer):
    folder = write_folder(tmp_path / "in", name)
    more = {f"{layer}.fc.weight": np.full((4, 8), 0.3, ml_dtypes.bfloat16)}
    more[f"{layer}.norm.weight"] = np.arange(3, dtype=np.float32)
    held, notes = tensors(CONFIGS[name]) | more, []
    write_file(folder / "model.safetensors", held)
    load(folder, config_of(folder), notes.append)
    text = f"2 tensors are left out, not trained: an export has them as they are: {layer}.fc"
    assert text in notes[0]
    opened = open_model(str(folder), ["hardware=cpu"])
    export(opened, opened.load(), tmp_path / "out")
    assert_same_tensors(tmp_path / "out", held)


# A change by what it switches off: of tensors whose names hold a text, of the family, or of keys.
HYBRID = {
    "decay": ("A_log", lambda x: x - 40),
    "a": ("in_proj_a", lambda x: 0 * x),
    "beta": ("in_proj_b", lambda x: 0 * x),  # in_proj_ba too
    "convolution": ("conv1d", lambda x: x * [0, 0, 0, 1]),
    "step": ("dt_bias", lambda x: 0 * x),
    "shared gate": ("shared_expert_gate", lambda x: 0 * x),
    "output gate": ("q_proj", lambda x: x * (np.arange(len(x))[:, None] % 32 < 16)),  # [q, gate]
    "1 + w": {"norm_offset": 0.0},
    "partial rotary": {"rotary_share": 1},
}
GLM = {
    "biases": ("proj.bias", lambda x: 0 * x),
    "query norm": ("q_norm", lambda x: x * (np.arange(16) < 8)),
    "biases of choice": ("e_score_correction_bias", lambda x: 0 * x),
    "shared experts": ("shared_experts.down", lambda x: 0 * x),
    "scaling": {"routed_scaling_factor": 1.0},
    "groups": {"n_routing_groups": 1, "topk_routing_group": 1},
    "partial rotary": {"rotary_share": 1},
}
GPT_OSS = {
    "sinks": ("sinks", lambda x: x - 40),
    "biases": ("q_proj.bias", lambda x: 0 * x),
    "bias of the result": ("o_proj.bias", lambda x: 0 * x),
    "biases of routers": ("router.bias", lambda x: 0 * x),
    "biases of gates": ("gate_up_proj_bias", lambda x: x * (np.arange(x.shape[1]) % 2)),
    "biases of ups": ("gate_up_proj_bias", lambda x: x * (np.arange(x.shape[1]) % 2 == 0)),
    "biases of experts": ("down_proj_bias", lambda x: 0 * x),
    "cut gates": {"gate_limit": 50.0},
    "windows": {"sliding_window_size": 50},
}
LATENT = {
    "query latent": ("q_a_layernorm", lambda x: np.ones_like(x)),
    "latent": ("kv_a_layernorm", lambda x: np.ones_like(x)),
    "shared key": ("kv_a_proj", lambda x: x * (np.arange(len(x))[:, None] < 16)),
    "biases of choice": GLM["biases of choice"],
    "shared experts": GLM["shared experts"],
    "scaling": GLM["scaling"],
    "groups": GLM["groups"],
    "mscale_all_dim": {"mscale": 0.0},
    "mscale": {"rope_attention_factor": 1.0},
    "yarn": {"rope_type": "default"},
}
FEATURES = dict.fromkeys(DELTA, HYBRID) | {"glm4_moe": GLM, "gpt_oss": GPT_OSS}
FEATURES["deepseek_v3"] = LATENT


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_every_feature_counts(tmp_path, monkeypatch, name):
    """Without it logits are others, by far more than those of transformers may differ."""
    rope = {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}
    folder = write_folder(tmp_path, name, **{} if name == "deepseek_v3" else rope)
    held = tensors(CONFIGS[name])
    config, family = config_of(folder), FAMILIES[name]
    expected = logits(load(folder, config), config, TOKENS_BT)
    for what, change in FEATURES[name].items():
        changed, own, other_config = dict(held), family, config
        if isinstance(change, tuple):
            changed |= {n: change[1](x).astype("f4") for n, x in held.items() if change[0] in n}
            if not any(change[0] in n for n in held):
                assert name == "qwen3_next" if what == "a" else what == "shared gate"
                continue
        elif what in ("1 + w", "cut gates"):
            own = dataclasses.replace(family, **change)
        elif what == "partial rotary":
            own = dataclasses.replace(family, released=family.released._replace(**change))
        else:
            other_config = config.replace(**change)
        write_file(folder / "model.safetensors", changed)
        monkeypatch.setitem(FAMILIES, name, own)
        other = logits(load(folder, other_config), other_config, TOKENS_BT)
        monkeypatch.setitem(FAMILIES, name, family)
        assert np.abs(other - expected).max() > 100 * 1e-5 * np.ptp(expected), what


HEADERS = {
    "shape of text": {"shape": ["48", 32]},
    "shape of fractions": {"shape": [48.0, 32.0]},
    "three offsets": {"data_offsets": [0, 1, 2]},
    "a list of dtypes": {"dtype": ["F32"]},
    "another's bytes": {"data_offsets": [0, 6144]},
}


ONE, HEAD, EMBEDDING = (
    f"{name}.weight" for name in ("model.layers.1.mlp.up_proj", "lm_head", "model.embed_tokens")
)
ARRAYS = {
    "misshapen": lambda held: {ONE: held[ONE].T.copy()},
    "quantized": lambda held: {ONE: held[ONE].astype(np.int8)},
    "unknown": lambda held: {"model.layers.1.mlp.experts.0.weight": held[ONE]},
    "another head": lambda held: {HEAD: held[EMBEDDING][::-1].copy()},
    "fewer rows": lambda held: {EMBEDDING: held[EMBEDDING][:39]},
}


def _spoil(folder, what):
    file = folder / "model.safetensors"
    held = tensors(CONFIGS["qwen3"])
    held |= ARRAYS[what](held) if what in ARRAYS else {}
    if what == "missing":
        del held[ONE]
    write_file(file, held)
    if what in HEADERS:
        data = file.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:end])
        header[ONE] |= HEADERS[what]
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    if what == "torn":
        os.truncate(file, file.stat().st_size - 1)
    elif what == "no header":
        file.write_bytes(b"\xff" * 100)
    elif what == "no tensors":
        file.rename(folder / "pytorch_model.bin")
    elif what == "a file that is not there":
        index = {"weight_map": {ONE: "model-00001-of-00002.safetensors"}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        file.unlink()


@pytest.mark.parametrize(
    "what, says",
    [
        ("missing", "has no tensor model.layers.1.mlp.up_proj.weight"),
        ("misshapen", r"up_proj.weight is \[32, 48\], but the config makes it \[48, 32\]"),
        ("quantized", "up_proj.weight is I8; weights are read in"),
        ("unknown", "model.layers.1.mlp.experts.0.weight is not a tensor of such a model"),
        ("another head", "lm_head.weight is not the embedding, which config.json makes it"),
        ("fewer rows", r"embed_tokens.weight is \[39, 32\], but the config makes it \[40, 32\]"),
        *((what, "its header is not of safetensors") for what in list(HEADERS)[:4]),
        ("another's bytes", "begins at byte 0 of the tensors, but the one before it ends at"),
        ("torn", r"is torn: \d+ bytes, but its tensors end at \d+"),
        ("no header", "torn or not a safetensors file"),
        ("no tensors", "pytorch_model.bin is a pickle, which could run any code"),
        ("a file that is not there", "names model-00001-of-00002.safetensors, which is not in"),
    ],
)
def test_a_damaged_folder_is_refused_by_name(tmp_path, what, says):
    folder = write_folder(tmp_path, "qwen3")
    config = config_of(folder)
    _spoil(folder, what)
    with pytest.raises(ConfigError, match=says):
        load(folder, config)


def test_a_missing_head_has_a_remedy(tmp_path):
    folder, held = write_folder(tmp_path, "llama2"), tensors(CONFIGS["llama2"])
    del held["lm_head.weight"]
    write_file(folder / "model.safetensors", held)
    with pytest.raises(ConfigError, match="lm_head.weight, .*; save the model with its head"):
        load(folder, config_of(folder))


@pytest.mark.parametrize(
    "name, whole, prefix",
    [("mistral", "llava", "language_model."), ("gemma3", "gemma3", "model.language_model.")],
)
def test_the_text_model_of_a_larger_one_opens_and_is_exported_alone(tmp_path, name, whole, prefix):
    """It has a config and a prefix of its own; later ones have the head outside."""
    folder = write_folder(tmp_path, name)
    expected = logits(load(folder, config_of(folder)), config_of(folder), TOKENS_BT[:1])
    held = tensors(CONFIGS[name])
    if prefix.startswith("model."):
        renamed = {n.replace("model.", prefix, 1): x for n, x in held.items()}
    else:
        renamed = {f"{prefix}{n}": x for n, x in held.items()}
    other = ("vision_tower.patch.weight", "multi_modal_projector.mm_soft_emb_norm.weight")
    zeros = dict.fromkeys(other, np.zeros((2, 2), np.float32))
    write_file(folder / "model.safetensors", renamed | zeros)
    shared = ("architectures", "torch_dtype")
    text = {key: x for key, x in CONFIGS[name].items() if key not in shared}
    values = {"model_type": whole, "torch_dtype": "bfloat16", "text_config": text}
    (folder / "config.json").write_text(json.dumps(values))
    notes = []
    config = config_of(folder)
    actual = logits(load(folder, config, notes.append), config, TOKENS_BT[:1])
    np.testing.assert_array_equal(actual, expected)
    (note,) = notes
    assert "2 tensors are left out, of no text model" in note and all(x in note for x in other)
    assert released.find("", str(folder)).config == text | {"torch_dtype": "bfloat16"}
    written = config_json.make_config(config.model, text, "float32")
    alone = ("model_type", "architectures")
    assert [written[key] for key in alone] == [CONFIGS[name][key] for key in alone]


@pytest.mark.parametrize("ids", ['"2"', "true", '{"a": 1}', '["2"]'])
def test_end_tokens_that_are_no_ids_are_refused(tmp_path, ids):
    folder = write_folder(tmp_path, "llama2")
    (folder / "generation_config.json").write_text(f'{{"eos_token_id": {ids}}}')
    with pytest.raises(ConfigError, match="generation_config.json: eos_token_id=.* is neither"):
        _ = released.find("", str(folder)).ends


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"model_type": "gpt2"}, "model_type=gpt2 is not a family that we have"),
        ({"hidden_size": None}, "hidden_size=None must be an integer, not nothing"),
        ({"hidden_size": 32.0}, "hidden_size=32.0 must be an integer without a point: 32"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True must be an integer, not a bool"),
        ({"tie_word_embeddings": "no"}, "tie_word_embeddings=no must be True or False, not text"),
        ({"model_type": ["llama"]}, r"model_type=\['llama'\] is not a family"),
        ({"hidden_act": ["silu"]}, r"hidden_act=\['silu'\] is not supported"),
        ({"max_position_embeddings": "64"}, "max_position_embeddings=64 must be an integer"),
        ({"rope_theta": "1e4"}, "rope_theta=1e4 must be a number, not text"),
        ({"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise=0.1 is not supported"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ({"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types=.* not supported"),
        (CONFIGS["dots1"] | {"max_window_layers": 3}, "max_window_layers=3 of 4 is not supported"),
        (CONFIGS["moonlight"] | {"rope_interleave": False}, "rope_interleave=False is not"),
        (CONFIGS["moonlight"] | {"scoring_func": "softmax"}, "scoring_func=softmax is not"),
        (CONFIGS["moonlight"] | {"num_key_value_heads": 2}, "but num_attention_heads=4"),
        (CONFIGS["dots1"] | {"max_window_layers": "x"}, "max_window_layers=x of 4 is not"),
        (CONFIGS["dots1"] | {"n_routed_experts": None}, "n_routed_experts=None must be an integer"),
        ({"rope_scaling": "linear"}, "rope_scaling=linear is not supported"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "one for all layers"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not"),
        ({"mlp_bias": True}, "mlp_bias=True is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "not supported, but mxfp4 and fp8 with"),
        ({"quantization_config": {"quant_method": "fp8"}}, "not supported, but mxfp4 and fp8 with"),
        ({"use_sliding_window": True}, "use_sliding_window=True is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type=\['yarn'\] is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type=longrope is not .* whole text"),
        (
            CONFIGS["olmo3"] | {"rope_scaling": {"rope_type": "yarn", "truncate": False}},
            "truncate=False of full_attention is not supported: transformers does not read it",
        ),
        (CONFIGS["olmo3"] | {"rope_parameters": {"rope_theta": 1e6}}, "one for full_attention and"),
        (CONFIGS["olmo3"] | {"rope_parameters": {"full_attention": 5}}, "full_attention=5 is not"),
        ({"architectures": 5}, "architectures=5 is not supported, but LlamaForCausalLM and Llama"),
        ({"is_causal": False}, "is_causal=False is not supported, but True"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not"),
        ({"architectures": ["LlamaBidirectionalModel"]}, "architectures=LlamaBidirectionalModel"),
        (
            CONFIGS["gemma3"] | {"layer_types": ["full_attention"] * 8},
            "full_attention in the last of every 6",
        ),
        (CONFIGS["gemma3"] | {"sliding_window_pattern": 4}, "sliding_window_pattern=4 is not"),
        (CONFIGS["gemma3"] | {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "rope_type=llama3 has no factor; write it"),
    ],
)
def test_a_config_json_of_another_computation_is_refused(changes, says):
    with pytest.raises(ConfigError, match=f"^FILE: .*{says}"):
        config_json.read_keys(CONFIGS["llama2"] | changes, "FILE")


@pytest.mark.parametrize("name", ["llama2", "mixtral"])
def test_an_export_continues_where_it_was_stopped(tmp_path, monkeypatch, name):
    """What it has written stays as it is; another model's begins anew."""
    folder = write_folder(tmp_path / "in", name)
    config, model = on_mesh(folder, "one")
    form = {"file_bytes": 20_000, "fuse_experts": name == "mixtral"}
    real, written = writing._write_file, []

    def stops(path, *arguments):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(path.name)
        real(path, *arguments)

    monkeypatch.setattr(writing, "_write_file", stops)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", config, model, **form)
    assert not released.is_whole(tmp_path / "out")
    before = list(written)
    written[:] = []
    monkeypatch.setattr(writing, "_write_file", lambda *a: (written.append(a[0].name), real(*a)))
    order, last = [], writing.write_whole
    monkeypatch.setattr(writing, "write_whole", lambda *a: (order.append(a[0].name), last(*a)))
    write(tmp_path / "out", config, model, **form)
    assert order[-1] == "config.json"  # without which the folder is no model
    assert written and not {*written} & {*before}
    expected = tensors(CONFIGS[name])
    assert_same_tensors(tmp_path / "out", fuse_experts(expected) if name == "mixtral" else expected)
    with pytest.raises(ConfigError, match="is there already"):
        write(tmp_path / "out", config, model)
    assert [p for p in os.listdir(tmp_path) if p.startswith(".")] == []
    assert {*os.listdir(tmp_path / "out")} >= {"config.json", ".source.json"}
    assert writing.read_source(tmp_path / "out")["files"].keys() > {*before}
    largest = max(x.nbytes for x in contents(tmp_path / "out").values())
    for file in (tmp_path / "out").glob("*.safetensors"):
        header = 8 + int.from_bytes(file.read_bytes()[:8], "little")
        assert file.stat().st_size - header <= max(20_000, largest)
    with (tmp_path / "out" / before[0]).open("ab") as file:
        file.truncate(100)
    assert writing.read_source(tmp_path / "out") == {}  # no longer what it was made of
    write(tmp_path / "again", config, model, **form)
    assert writing.read_source(tmp_path / "again")
    (tmp_path / "again" / "model.safetensors.index.json").unlink()
    assert writing.read_source(tmp_path / "again") == {}


def test_an_export_begins_anew_once_there_is_room(tmp_path, monkeypatch):
    """A full disk leaves nothing; what a kill leaves is no folder of somebody else's."""
    config, model = on_mesh(write_folder(tmp_path / "in", "llama2"), "one")
    out = tmp_path / "out"
    with monkeypatch.context() as full:

        def refuse(_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        full.setattr(os, "fsync", refuse)
        with pytest.raises(TrainingError, match="out: cannot be written: .*make room"):
            write(out, config, model)
        assert os.listdir(out) == []

        def interrupt(_):
            raise KeyboardInterrupt

        full.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            write(out, config, model)
    assert [name.startswith("..source.json.") for name in os.listdir(out)] == [True]
    (out / "of_others").touch()
    with pytest.raises(ConfigError, match="is there already"):
        write(out, config, model)
    (out / "of_others").unlink()
    write(out, config, model)
    assert_same_tensors(out, tensors(CONFIGS["llama2"]))
    assert not [name for name in os.listdir(out) if name.endswith(".tmp")]
