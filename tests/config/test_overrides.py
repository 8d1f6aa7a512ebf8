"""What files and the command line give: keys twice, unknown keys, keys of MaxText and NeMo."""

import pathlib
import re

import pytest
import yaml
from conftest import BASE, complete

from maxramp.checkpoints.snapshots import local_folder
from maxramp.config import load as loading
from maxramp.errors import ConfigError
from maxramp.keys import peers
from maxramp.keys.base import PATHS, other_names
from maxramp.keys.yamlfile import parse

BASE_VALUES = yaml.safe_load(pathlib.Path(BASE).read_text())


def load(*arguments, config=BASE):
    """The keys that differ from base.yml, and the notes."""
    notes = []
    values = loading.load([str(config), *arguments], note=notes.append).values
    return {k: v for k, v in values.items() if v != BASE_VALUES[k]}, notes


def refusal(*arguments, config=BASE):
    notes = []
    with pytest.raises(ConfigError, match="^.*$") as caught:  # `.` is no newline: one line
        loading.load([str(config), *arguments], note=notes.append)
    assert not notes  # the error alone
    return str(caught.value)


def test_the_last_value_of_a_key_wins():
    values, _ = load("log_period=3", "steps=5", "log_period=4", "log_period=7")
    assert values == {"log_period": 7, "steps": 5}
    # An overridden value is not checked: a wrapper script may have left it empty.
    assert load("log_period=", "log_period=4")[0] == {"log_period": 4}
    assert load("model_name=nonesuch", "model_name=default")[0] == {}
    # By whatever name.
    assert load("steps=5", "trainer.max_steps=7")[0] == {"steps": 7}
    assert load("steps=3", "trainer.max_steps=7", "steps=5")[0] == {"steps": 5}


def test_what_another_trainer_asked_for_may_be_overridden(tmp_path):
    """On the command line or by the file above; what is left is looked at."""
    (tmp_path / "maxtext.yml").write_text(
        "weight_sparsity_n: 2\nsteps: 150_001\nhf_data_files: c4\n"
    )
    (tmp_path / "mine.yml").write_text('base_config: maxtext.yml\nhf_data_files: ""\n')
    values, notes = load("weight_sparsity_n=4", "weight_sparsity_n=", config=tmp_path / "mine.yml")
    assert values == MAXTEXTS_OWN and "weight_sparsity_n, hf_data_files" in "".join(notes)
    assert refusal("weight_sparsity_n=", "weight_sparsity_n=4").startswith(
        "weight_sparsity_n=4 (MaxText's)"
    )
    assert refusal(config=tmp_path / "mine.yml").startswith(f"{tmp_path}/maxtext.yml: weight_spars")


def test_the_last_counts_among_alternatives():
    """Each key has its last value; two alternatives that are left say the same thing twice."""
    assert load("steps=5", "total_samples=99", "steps=-1")[0] == {"steps": -1, "total_samples": 99}
    assert load("rampup_batch_size=[8,8,99]", "rampup_batch_size=none")[0] == {}
    assert "steps=6 and total_samples=99" in refusal("steps=5", "total_samples=99", "steps=6")


def test_all_unknown_keys_in_one_line(tmp_path):
    (tmp_path / "base.yml").write_text("stepz: 3\nlog_period: 3\n")
    (tmp_path / "mine.yml").write_text("base_config: base.yml\nfoo: {bar: {baz: 1}, n: 2}\n")
    line = refusal("qqq=x", config=tmp_path / "mine.yml")
    assert line == (
        f"{tmp_path}/base.yml: stepz=3 (did you mean steps?), {tmp_path}/mine.yml: foo.bar.baz=1, "
        f"{tmp_path}/mine.yml: foo.n=2, qqq=x are not known keys; --help-keys lists every key"
    )


@pytest.mark.parametrize(
    "name, meant",
    [
        *(("stpes", "steps"), ("learningrate", "learning_rate"), ("Steps", "steps")),
        *(("per_device_batch", "per_device_batch_size"), ("add_boss", "add_bos")),
        *(("grain_train_file", "grain_train_files"), ("tokenizer_typ", "tokenizer_type")),
        *(("num_expert", "num_experts"), ("lr", "learning_rate")),
        # Of another trainer.
        ("per_device_train_batch_size", "per_device_batch_size"),
        *(("moe_router_topk", "num_experts_per_tok"), ("n_routed_experts", "num_experts")),
        # Names that share most of their letters with a key that means something else.
        *(("checkpoint_period_hours", None), ("adam_b3", None), ("num_hosts", None)),
        *(("ici_sensor_fusion", None), ("eval_epochs", None), ("hf_data", None)),
    ],
)
def test_a_suggestion_is_close(name, meant):
    line = refusal(f"{name}=3")
    assert line.startswith(f"{name}=3 is not a known key; ")
    assert ("did you mean" in line) == (meant is not None)
    assert meant is None or f"did you mean {meant}?" in line


def test_a_long_line_names_everything():
    line = refusal(*(f"qqq{i}={'x' * 500}" for i in range(40)))
    assert len(line) < 1500 and all(f"qqq{i}" in line for i in range(40))


def test_a_name_of_maxtexts_models_is_taken_with_a_line():
    values, notes = load("model_name=deepseek3-671b")
    assert (values["q_lora_rank"], values["n_routing_groups"]) == (1536, 8)
    assert "model_name=deepseek3-671b: taken as model_name=deepseek-v3-671b" in notes


def test_renamed_keys_are_taken_with_a_line():
    values, notes = load(
        *("cosine_learning_rate_final_fraction=0.25", "attention=flash", "trainer.max_steps=9"),
        *("eval_steps=-1", "model.rampup_batch_size=[16,16,96]", "++model.global_batch_size=32"),
        *("dtype=bf16", "model.micro_batch_size=2", "trainer.devices=8", "run.name=007"),
    )
    assert values == {
        **{"learning_rate_final_fraction": 0.25, "steps": 9, "eval_samples": -1},
        **{"rampup_batch_size": [16, 16, 96], "global_batch_size": 32, "micro_batch_size": 2},
        **{"devices_per_node": 8, "dtype": "bfloat16"},
        "run_name": "007",  # text, as written
        # What the notation that was chosen takes the place of.
        **{"enable_rampup_batch_size": False, "per_device_batch_size": -1.0},
    }
    assert "attention=flash: taken as attention=autoselected" in notes
    assert "trainer.max_steps=9: taken as steps=9" in notes
    assert "++model" not in " ".join(notes) and len(notes) == 9


def test_harmless_keys_are_ignored_with_a_line():
    values, (line,) = load(
        *("gcs_metrics=True", "logical_axis_rules=[['a', 'b']]"),
        *("hf_access_token=secret", "model.num_moe_experts=1", "use_ring_of_experts=True"),
        *("ici_context_parallelism=1", "weight_sparsity_n=", "exp_manager.x=1"),
    )
    assert values == {}
    for name in ("gcs_metrics", "logical_axis_rules", "num_moe_experts", "weight_sparsity_n", "x"):
        assert name in line
    assert "secret" not in line


@pytest.mark.parametrize(
    "argument, says",
    [
        ("model.num_moe_experts=8", "decoder_block=mixtral"),
        ("model.moe_router_topk=4", "docs/experts.md"),
        *((f"{k}=64", "leave") for k in ("moe_expert_input_dim", "interleave_moe_layer_step")),
        ("dcn_tensor_transpose_parallelism=-1", "fsdp, expert, context and tensor"),
        ("ici_autoregressive_parallelism=2", "fsdp, expert, context and tensor"),
        ("model.optim.sched.min_lr=0", "learning_rate_final_fraction"),
        *(("reuse_example_batch=1", "dataset_type=synthetic"), ("dropout_rate=0.1", "dropped")),
        *(("attention_type=local_sliding", "not built here"), ("weight_sparsity_n=2", "dtype")),
        ("rope_use_scale=False", "use rope_type=default"),
        ("ragged_buffer_factor=1.5", "capacity_factor"),
        ("distill_beta=0.5", "not from another model"),
        *(("use_qlora=True", "not quantized (QLoRA)"), ("elastic_enabled=True", "continues a run")),
        *(("model.data.eod_mask_loss=True", "target"), ("mhc_expansion_rate=4", "not built here")),
        ("hf_data_files=data", "maxramp.prepare"),
        # They would be of other rows on other devices.
        *(("eval_steps=8", "eval_samples"), ("train.eval_iters=8", "counts batches")),
        *((f"{key}=x", "LoRA's base") for key in ("load_in_4bit", "bnb_4bit_quant_type")),
    ],
)
def test_what_would_train_otherwise_is_refused(argument, says):
    owner = "NeMo's" if "." in argument.partition("=")[0] else "MaxText's"
    owner = "PEFT's" if "4bit" in argument else owner
    line = refusal(argument, "steps=9")
    assert line.startswith(f"{argument} ({owner}): ") and says in line
    assert "did you mean" not in line


def test_a_nested_file_of_nemo(tmp_path):
    path = tmp_path / "nemo.yml"
    path.write_text(
        "trainer: {max_steps: 50, num_nodes: 2, devices: 8, max_epochs: null}\n"
        "exp_manager: {exp_dir: null, checkpoint_callback_params: {monitor: loss}}\n"
        "model:\n  global_batch_size: 64\n  micro_batch_size: 4\n  rampup_batch_size: null\n"
        "  encoder_seq_length: 64\n  data: {seq_length: 64}\n  pipeline_model_parallel_size: 1\n"
        "  optim: {name: fused_adam, lr: 1.6e-4}\n"
    )
    values, notes = load(config=path)
    assert "base_output_directory" not in values  # null = not given
    assert (values["steps"], values["num_nodes"], values["devices_per_node"]) == (50, 2, 8)
    assert (values["global_batch_size"], values["max_target_length"]) == (64, 64)
    assert values["learning_rate"] == 1.6e-4
    assert "trainer.max_epochs, exp_manager.exp_dir, exp_manager.checkpoint_" in notes[-1]
    # In a file no key is the later one.
    path.write_text(path.read_text().replace("seq_length: 64}", "seq_length: 32}"))
    assert "both give max_target_length" in refusal(config=path)


def test_a_model_of_nemos_leaves_nothing_to_our_defaults(tmp_path):
    """Left out or null, its heads are others than those of base.yml."""
    path = tmp_path / "nemo.yml"
    path.write_text("model: {hidden_size: 2048, num_attention_heads: 16, kv_channels: null}\n")
    line = refusal(config=path)
    assert "model.kv_channels=None (NeMo's): is model.hidden_size / model.num_attention" in line
    assert "model.num_query_groups (NeMo's): is not given, and is model.num_attention_heads" in line
    values, _ = load("base_num_kv_heads=16", "model.kv_channels=128", config=path)
    assert (values["base_num_kv_heads"], values["head_dim"]) == (16, 128)


# What MaxText's base.yml says where it asks for nothing that is not built here.
MAXTEXTS = """
checkpoint_period: 10_000; vocab_size: 32_000; learning_rate: 3.e-5; dataset_name: 'c4/en:3.0.1'
eval_dataset_name: 'c4/en:3.0.1'; train_split: 'train'; eval_split: 'validation'; hf_path: ''
hf_data_dir: ''; hf_data_files: ''; normalize_embedding_logits: True
logits_via_embedding: False; max_num_checkpoints_to_keep: None; collect_stack_trace: False
stack_trace_interval_seconds: 600; enable_checkpoint_cloud_logger: False; num_experts_per_tok: 1
base_moe_mlp_dim: -1; routed_scaling_factor: 1.0; routed_score_func: ''
dataset_type: tfds; tokenizer_type: sentencepiece; shardy: True; pure_nnx: True
num_moe_token_chunks: 1; hf_lora_adapter_path: ''; attention_output_dim: -1
mlp_activations_limit: -1.0; num_moe_emb_chunks: 0; first_num_hash_layers: 0; engram: 'remat'
v_norm_with_scale: True; hidden_size_per_layer_input: 0; compress_ratios: []; olmo_index_path: ''
block_diffusion_mask_id: -1; xprof_tpu_power_trace_level: 0; local_sa_block_q: None
experimental_sa_quant_q_fp8: False; cost_estimate_flops_fwd: -1; enable_prefix_caching: False
nope_layer_interval: -1; use_audio: False; image_size_for_vit: 896; d_model_for_audio: 256
video_max_grid_t: null; gdn_conv_kernel_dim: 4; gdn_chunk_size: 64; use_qk_norm_in_gdn: True
partial_rotary_factor: 1.0; inhomogeneous_layer_cycle_interval: 1; vllm_hf_overrides: {}
mhc_expansion_rate: 1; sinkhorn_iterations: 20; engram_layers: []; engram_seed: 0
distill_alpha: 0.5; distill_temperature: 1.0; distill_beta: 0.0; distill_beta_end: None
distill_beta_schedule: "constant"; elastic_enabled: False; elastic_max_retries: 10
ragged_buffer_factor: -1.0; moe_mlpwi_0: 'remat'; muon_beta: 0.95; muon_weight_decay: 0
muon_consistent_rms: None; rope_use_scale: True; rope_factor: 40; mscale: 1.0
""".replace("; ", "\n")


# What a run depends on, as MaxText's base.yml has it, where ours has something else.
MAXTEXTS_OWN = parse("""
{steps: 150001, log_period: 100, checkpoint_period: 10000, eval_interval: -1, eval_samples: -1,
per_device_batch_size: 12.0, enable_rampup_batch_size: false, max_target_length: 2048,
base_emb_dim: 2048, base_num_query_heads: 16, base_num_kv_heads: 16, head_dim: 128,
base_mlp_dim: 7168, base_num_decoder_layers: 16, vocab_size: 32000, dtype: bfloat16,
learning_rate: 3.0e-5, warmup_steps_fraction: 0.1, remat_policy: full,
num_layers_per_pipeline_stage: 1, per_device_batch_size_start: 4.0,
per_device_batch_size_increment: 2.0, global_rampup_samples: 500}
""")


def test_a_maxtext_file_leaves_keys_to_maxtexts_base(tmp_path):
    """Its base_config or a key marks it, unless that is ours or beside it; notes name values."""
    path = tmp_path / "theirs.yml"
    for mark in ("base_config: base.yml", "base_config: src/maxtext/configs/base.yml", "sa_x: 1"):
        path.write_text(f"{mark}\nlearning_rate: 2.0e-4\n")
        values, notes = load(config=path)
        assert values == MAXTEXTS_OWN | {"learning_rate": 2e-4}
        assert notes[-1].startswith("left out, and as in MaxText's base.yml: steps=150001, ")
        assert "warmup_steps_fraction=0.1" in notes[-1] and "learning_rate" not in notes[-1]
        assert notes[-1].endswith("; dataset_type=text, as its tfds is not read here")
    path.write_text("base_config: base.yml\nmodel_name: qwen3-8b\nremat_policy: custom\n")
    assert refusal(config=path).startswith(f"{path}: remat_policy=custom is not one of full, ")
    values, notes = load("enable_rampup_batch_size=True", "remat_policy=full", config=path)
    names = "base_emb_dim", "per_device_batch_size_start", "per_device_batch_size_increment"
    assert [values[name] for name in (*names, "global_rampup_samples")] == [4096, 4, 2, 500]
    assert "base_emb_dim" not in notes[0] and "global_rampup_samples=500" in notes[0]
    path.write_text(
        "base_config: base.yml\nmodel_name: qwen3-8b\nbase_emb_dim: 96\nhead_dim: 128\n"
    )
    values, (note, *_) = load(config=path)
    assert values["base_emb_dim"] == 4096 and note.startswith("model_name=qwen3-8b overrides base_")
    assert "base_emb_dim=96; give" in note and load("base_emb_dim=96", config=path)[1][0] != note
    values, notes = load("override_model_config=True", config=path)
    assert (values["base_emb_dim"], values["base_mlp_dim"], len(notes)) == (96, 12288, 1)
    line = refusal("remat_policy=minimal_flash", "weight_sparsity_n=2", config=path)
    assert "weight_sparsity_n=2 (MaxText's)" in line and line.endswith("is minimal_with_context")
    path.write_text("base_config: base.yml\nper_device_batch_size: 4\neval_steps: 20\n")
    assert refusal(config=path).endswith("(-1 = all): 20 batches are 80 on every device")
    assert refusal("devices_per_node=4", config=path).endswith("are 320 on every node")
    assert refusal("devices_per_node=4", "num_nodes=2", config=path).endswith("batches are 640")
    values, (note, *_) = load("eval_samples=640", config=path)
    assert values["eval_samples"] == 640 and note.endswith("left out for eval_samples=640")
    (tmp_path / "base.yml").write_text("log_period: 7\n")
    for base, own in (("base.yml", {"log_period": 7}), ("configs/base.yml", {})):
        path.write_text(f"base_config: {base}\nsa_x: 1\nsteps: 9\n")
        assert load(config=path)[0] == own | {"steps": 9}


def test_a_whole_file_of_maxtexts(tmp_path):
    path = tmp_path / "maxtext.yml"
    path.write_text(MAXTEXTS)
    values, notes = load(config=path)
    path.write_text(MAXTEXTS.replace("c4/en:3.0.1", "c4/en:3.1.0"))  # of late 2026
    assert load(config=path) == (values, notes)
    assert values == MAXTEXTS_OWN  # rope_factor, which nothing reads here, is not the user's own
    assert len(notes) == 4 and "routed_score_func=: taken as routed_score_func=softmax" in notes[0]
    assert "are the product alone" in refusal("logits_via_embedding=True", config=path)
    assert refusal("eval_split=tiny", config=path).startswith("eval_split=tiny (MaxText's): data")


NORM, QWEN = "use_post_attn_norm=False", "model_name=qwen3.5-2b"
GEMMA3 = ("decoder_block=gemma3", "use_qk_norm=True", "sliding_window_size=8")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((*GEMMA3, "use_post_attn_norm=True"), ""),
        *(((QWEN, f"partial_rotary_factor={x}"), s) for x, s in ((0.25, ""), (1, "means 0.25"))),
        ((QWEN, "inhomogeneous_layer_cycle_interval=3"), "qwen3_5 means 4"),
        ((*GEMMA3, "use_post_ffw_norm=False"), "gemma3 means True"),
        (("model_name=gemma3-1b", NORM), "gemma3 means True"),
        *((("model_name=olmo2-7b", NORM), ""), ((NORM,), ""), (("context_sharding=context",), "")),
        (("use_post_attn_norm=True",), "llama2 means False"),
        (("context_sharding=expert",), "give ici_context_parallelism=N"),
    ],
)
def test_what_follows_from_the_family_may_agree(arguments, says):
    assert says in (refusal(*arguments) if says else str(load(*arguments)))


def test_a_models_file_decides_over_norms_in_another(tmp_path):
    """As in MaxText, whose base.yml switches off what the files of Gemma switch on."""
    path = tmp_path / "maxtext.yml"
    path.write_text(MAXTEXTS + "use_post_attn_norm: false\n")
    load("model_name=gemma3-1b", config=path)
    load(*GEMMA3, "use_post_attn_norm=True", config=path)
    with pytest.raises(ConfigError, match="gemma3 means True"):
        load(*GEMMA3, config=path)


def test_layers_have_what_maxtexts_files_leave_out(tmp_path):
    path = tmp_path / "maxtext.yml"
    path.write_text("sa_x: 1\ndecoder_block: qwen3_5\nnum_experts: 8\nnorm_topk_prob: true\n")
    values, notes = load("gdn_num_key_heads=2", config=path)
    assert values["decoder_block"] == "qwen3_5_moe" and values["shared_experts"] == 1
    assert "taken with decoder_block=qwen3_5_moe, use_qk_norm=True, shared_experts=1" in notes[1]


# Of MaxText's files of models: keys that its layers compute as ours do.
RELEASED = {
    "gpt-oss": "decoder_block: gpt_oss; mlp_activations: [sigmoid, linear]; mlp_bias: true; "
    "attention_bias: true; routed_bias: true; num_experts: 4; sliding_window_size: 128; "
    "mlp_activations_limit: 7.0; rope_interleave: false; max_position_embeddings: 131072",
    "deepseek": "decoder_block: deepseek; attention_type: mla; routed_score_func: sigmoid; "
    "routed_bias: true; num_experts: 4; max_position_embeddings: 163840; rope_interleave: true",
    "olmo3": "decoder_block: olmo3; rope_type: yarn; rope_interleave: false; use_qk_norm: true; "
    "rope_attention_scaling: true; max_position_embeddings: 65536; sliding_window_size: 128",
    "qwen3.5": "decoder_block: qwen3_5; use_mrope: true; mrope_section: [11, 11, 10]; "
    "vision_encoder_block: qwen3_5; gdn_num_key_heads: 2",
}


@pytest.mark.parametrize("name", RELEASED)
def test_maxtexts_files_of_models_open(tmp_path, name):
    path = tmp_path / "maxtext.yml"
    path.write_text("sa_x: 1\n" + RELEASED[name].replace("; ", "\n"))
    values, _ = load(config=path)
    assert "mlp_activations" not in values  # as in base.yml
    with pytest.raises(ConfigError, match="use_mrope=True .*: decoder_block=llama2 means False"):
        load("decoder_block=llama2", "use_mrope=True")


def test_maxtext_counts_pairs_of_layers_of_gemma2(tmp_path):
    path = tmp_path / "gemma2.yml"
    layers = "decoder_block: gemma2\nsliding_window_size: 8\nbase_num_decoder_layers: 13\n"
    path.write_text(layers)
    assert not load(config=path)[1]
    path.write_text(layers + "use_post_attn_norm: true\n")
    note, _ = load(config=path)[1]
    assert note.endswith("if this is MaxText's number, give base_num_decoder_layers=26")
    assert len(load("base_num_decoder_layers=26", config=path)[1]) == 1


def test_the_table_fits_the_keys():
    """A new key of base.yml must not be one that the table takes for another's."""
    for name in BASE_VALUES:
        assert peers.translate(name, BASE_VALUES[name]) == (name, BASE_VALUES[name])
    for name, key in peers.RENAMED.items():
        assert name not in BASE_VALUES and key in BASE_VALUES, name
    for name, key in other_names().items():
        assert name not in BASE_VALUES and key in BASE_VALUES and peers.refusal(name, 1) is None
    for key, values in peers.VALUES.items():
        for theirs, ours in values.items():
            *_, command_line = loading.read(BASE, [f"{key}={theirs}"], str)
            assert command_line.values == {key: ours}


def test_the_commands_print_the_lines():
    """On stderr, and once: what a command prints for programs is on stdout."""
    done = complete(BASE, "trainer.max_steps=100", "gcs_metrics=True", "--json", module="plan")
    assert done.stderr.splitlines() == [
        "note: trainer.max_steps=100: taken as steps=100",
        "note: ignored, as nothing here depends on them: gcs_metrics",
    ]
    plan = yaml.safe_load(done.stdout)
    assert plan["total_steps"] == 100
    (warning,) = plan["warnings"]  # of the default job's ramp, whose last batch begins after 275
    assert warning.startswith("steps=100 ends the run inside the ramp: after 100 steps")


def test_every_key_that_is_a_path_expands_variables_and_refuses_unset_ones(monkeypatch):
    monkeypatch.setenv("SET", "/somewhere")
    monkeypatch.delenv("NOPE", raising=False)
    named = re.compile("_(path|files?|dir|directory|image|mounts|sets)$|^chat_template$")
    per_node = {"local_checkpoint_directory"}
    assert {name for name in BASE_VALUES if named.search(name)} == {*PATHS} | per_node
    for name in PATHS:
        is_mapping = isinstance(BASE_VALUES[name], dict)
        for variable in ("$SET", "${SET}"):
            value = f'{{all: "{variable}/x"}}' if is_mapping else f"{variable}/x"
            line = loading.read(BASE, [f"{name}={value}"], print)[-1]
            assert line.values[name] == ({"all": "/somewhere/x"} if is_mapping else "/somewhere/x")
        value = '{all: "a/${NOPE}/x"}' if is_mapping else "a/${NOPE}/x"
        error = refusal(f"{name}={value}")
        assert "the environment has no NOPE; set it" in error or "is read only with" in error
        assert name in error
    mixture = "grain_train_files=$SET/a,0.7;$SET/b,0.3"
    line = loading.read(BASE, [mixture], print)[-1]
    assert line.values["grain_train_files"] == "/somewhere/a,0.7;/somewhere/b,0.3"


def test_the_folder_of_snapshots_has_the_variables_of_its_node(monkeypatch, tmp_path):
    monkeypatch.setenv("SET", str(tmp_path))
    assert local_folder("$SET/x", tmp_path).parent == tmp_path / "x"
    monkeypatch.delenv("SET")
    with pytest.raises(ConfigError, match="local_checkpoint_directory=.SET/x: the environment has"):
        local_folder("$SET/x", tmp_path)
