"""Keys of MaxText and NeMo that users bring along, and what becomes of each.

Keys that MaxText and base.yml share stand in base.yml alone. Of the others a key is renamed,
ignored where training does not depend on it, or refused with what to do in its place. NeMo's keys
are those with a dot in them, of NeMo's launcher and of Megatron-Bridge; MaxText's rl. has one too.
"""

import collections
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from maxramp.errors import ConfigError
from maxramp.keys.base import base, may_be_unset, shortened, unknown_keys

# Their name -> ours, for keys that take the same values.
RENAMED = {
    "cosine_learning_rate_final_fraction": "learning_rate_final_fraction",
    "jax_distributed_initialization_timeout": "join_timeout_seconds",
    # Reinforcement learning, in prompts.
    "batch_size": "global_batch_size",
    "num_batches": "steps",
    "hf_data_dir": "hf_name",
    "rl.num_generations": "num_generations",
    "rl.num_iterations": "num_iterations",
    "rl.grpo_beta": "grpo_beta",
    "rl.grpo_epsilon": "grpo_epsilon",
    # NeMo's launcher.
    "run.name": "run_name",
    "exp_manager.exp_dir": "base_output_directory",
    "trainer.max_steps": "steps",
    "trainer.num_nodes": "num_nodes",
    "trainer.devices": "devices_per_node",
    "trainer.precision": "dtype",
    "trainer.log_every_n_steps": "log_period",
    "trainer.val_check_interval": "eval_interval",
    "trainer.limit_val_batches": "eval_steps",
    "trainer.gradient_clip_val": "gradient_clipping_threshold",
    "model.global_batch_size": "global_batch_size",
    "model.micro_batch_size": "micro_batch_size",
    "model.rampup_batch_size": "rampup_batch_size",
    "model.tensor_model_parallel_size": "ici_tensor_parallelism",
    "model.pipeline_model_parallel_size": "ici_pipeline_parallelism",
    "model.encoder_seq_length": "max_target_length",
    "model.seq_length": "max_target_length",
    "model.data.seq_length": "max_target_length",
    "model.num_layers": "base_num_decoder_layers",
    "model.hidden_size": "base_emb_dim",
    "model.ffn_hidden_size": "base_mlp_dim",
    "model.num_attention_heads": "base_num_query_heads",
    "model.num_query_groups": "base_num_kv_heads",
    "model.kv_channels": "head_dim",
    "model.vocab_size": "vocab_size",
    "model.layernorm_epsilon": "normalization_layer_epsilon",
    "model.rotary_base": "rope_max_timescale",
    "model.share_embeddings_and_output_weights": "logits_via_embedding",
    "model.seed": "init_weights_seed",
    "model.data.reset_attention_mask": "separate_documents",
    "model.tokenizer.library": "tokenizer_type",
    "model.tokenizer.model": "tokenizer_path",
    "model.optim.name": "opt_type",
    "model.optim.lr": "learning_rate",
    "model.optim.weight_decay": "adam_weight_decay",
    "model.optim.eps": "adam_eps",
    "model.optim.sched.name": "lr_schedule_type",
    # Megatron-Bridge.
    "train.train_iters": "steps",
    "train.train_samples": "total_samples",
    "train.global_batch_size": "global_batch_size",
    "train.micro_batch_size": "micro_batch_size",
    "train.rampup_batch_size": "rampup_batch_size",
    "train.eval_interval": "eval_interval",
    "train.eval_iters": "eval_steps",
    "dataset.sequence_length": "max_target_length",
    "dataset.seq_length": "max_target_length",
    "optimizer.optimizer": "opt_type",
    "optimizer.lr": "learning_rate",
    "optimizer.weight_decay": "adam_weight_decay",
    "optimizer.adam_beta1": "adam_b1",
    "optimizer.adam_beta2": "adam_b2",
    "optimizer.adam_eps": "adam_eps",
    "optimizer.clip_grad": "gradient_clipping_threshold",
    "checkpoint.save_interval": "checkpoint_period",
    "logger.log_interval": "log_period",
    "rng.seed": "init_weights_seed",
}

# What NeMo makes of a model's keys that are left out or null, where ours have other defaults.
DERIVED = {
    "model.num_query_groups": "model.num_attention_heads",
    "model.kv_channels": "model.hidden_size / model.num_attention_heads",
}

# Values of our keys as others write them: the same thing but for speed and memory.
VALUES: dict[str, dict[str, Any]] = {
    "attention": {"flash": "autoselected", "cudnn_flash_te": "cudnn_flash"},
    "hardware": {"gpu_multiprocess": "gpu"},
    "compile_topology_num_slices": {"-1": 1},
    "dtype": {
        **dict.fromkeys(("bf16", "bf16-mixed", "bf16-true"), "bfloat16"),
        **dict.fromkeys(("16", "16-mixed", "16-true"), "float16"),
        **dict.fromkeys(("32", "32-true"), "float32"),
    },
    "lr_schedule_type": {"CosineAnnealing": "cosine"},
    "opt_type": dict.fromkeys(("adam", "fused_adam", "distributed_fused_adam"), "adamw"),
}

_NO_DATA = (
    "data that is not read here; prepare its files with maxramp.prepare and use "
    "dataset_type=grain grain_train_files=FOLDER"
)
_NO_PAIR = "use tokenizer_path=tokenizer.json, which holds both"
_NO_EXPERTS = "not supported: every layer has one MLP and no experts; leave it out"
_NO_MUON = "not supported: opt_type is adamw or sgd; leave it out"
_NO_VARIANT = "a model that is not built here; only Llama's decoder is"

# What would train otherwise than it says, with MaxText's defaults, which a whole copy of its
# base.yml holds: (names or patterns, the values with which such a key asks
# for nothing, what is wrong and what to do).
_REFUSED: tuple[tuple[str, tuple, str], ...] = (
    (
        "ici_*_parallelism dcn_*_parallelism model.context_parallel_size "
        "model.expert_model_parallel_size",
        (1,),
        "not supported: the mesh has the axes data, pipeline, fsdp and tensor; leave it out or use "
        "1",
    ),
    (
        "num_experts num_moe_experts model.num_moe_experts num_experts_per_tok shared_experts",
        (0, 1),
        _NO_EXPERTS,
    ),
    ("base_moe_mlp_dim", (-1, 7168), _NO_EXPERTS),
    (
        "moe_expert_input_dim capacity_factor n_routing_groups topk_routing_group",
        (-1,),
        _NO_EXPERTS,
    ),
    ("routed_scaling_factor", (1,), _NO_EXPERTS),
    (
        "first_num_* routed_* load_balance_loss_weight norm_topk_prob use_random_routing",
        (False,),
        _NO_EXPERTS,
    ),
    ("muon_beta", (0.95,), _NO_MUON),
    ("muon_*", (0,), _NO_MUON),
    (
        "quantization use_qwix_quantization model.fp8 weight_sparsity_n weight_sparsity_m",
        (False,),
        "not supported: products are in dtype (float32 or bfloat16); leave it out",
    ),
    (
        "dropout_rate model.hidden_dropout model.attention_dropout model.ffn_dropout "
        "model.embedding_dropout",
        (0,),
        "not supported: nothing is dropped; leave it out or use 0",
    ),
    ("dataset_path dataset_name eval_dataset_name", ("c4/en:3.0.1",), _NO_DATA),
    ("eval_split", ("validation",), _NO_DATA),
    ("hf_data_files hf_train_files hf_eval_files", (), _NO_DATA),
    (
        "grain_train_mixture_config_path model.data.data_prefix",
        (),
        'is not read here; use grain_train_files="glob,weight;glob,weight" (Megatron\'s .bin and '
        ".idx too)",
    ),
    ("model.data.splits_string", (), "not supported; use eval_fraction"),
    ("eval_data_columns", (["text"],), "not supported; train_data_columns holds for both"),
    ("reuse_example_batch", (0,), "not supported; use dataset_type=synthetic"),
    ("global_parameter_scale", (1,), "not supported; give the sizes (base_emb_dim, ...)"),
    ("dense_init_scale", (1,), "not supported: initial weights have one scale; leave it out"),
    (
        "model.init_method_std model.use_scaled_init_method",
        (False,),
        "not supported: initial weights have one scale; leave it out",
    ),
    (
        "model.data.eod_mask_loss",
        (False,),
        "not supported: every token of a document is a target; leave it out or use False",
    ),
    (
        "model.do_layer_norm_weight_decay",
        (True,),
        "not supported; adamw_mask=[scale, bias] keeps norms and biases from decaying",
    ),
    ("model.tokenizer.vocab_file model.tokenizer.merge_file", (), "not supported; " + _NO_PAIR),
    ("attention_type", ("global", "full"), _NO_VARIANT),
    ("rope_use_scale", (True,), "not supported; use rope_type=default"),
    ("rope_interleave rope_truncate local_rope_proportion", (True,), _NO_VARIANT),
    ("rope_attention_scaling rope_pairwise", (False,), _NO_VARIANT),
    ("local_rope_max_timescale global_rope_max_timescale", (-1,), _NO_VARIANT),
    ("global_rope_proportion", (0.25,), _NO_VARIANT),
    ("max_position_embeddings", (163840,), _NO_VARIANT),
    ("beta_fast", (32,), _NO_VARIANT),
    ("beta_slow mscale", (1,), _NO_VARIANT),
    ("q_lora_rank", (0,), _NO_VARIANT),
    ("kv_lora_rank", (512,), _NO_VARIANT),
    ("qk_nope_head_dim v_head_dim", (128,), _NO_VARIANT),
    ("qk_rope_head_dim", (64,), _NO_VARIANT),
    ("rope_min_timescale rope_linear_scaling_factor model.rotary_percentage", (1,), _NO_VARIANT),
    ("trainable_position_size", (-1,), _NO_VARIANT),
    ("model.position_embedding_type", ("rope",), _NO_VARIANT),
    ("model.normalization", ("rmsnorm",), _NO_VARIANT),
    ("model.activation", ("fast-swiglu", "swiglu"), _NO_VARIANT),
    ("model.headscale model.openai_gelu model.use_emha", (False,), _NO_VARIANT),
    ("model.transformer_block_type", ("pre_ln",), _NO_VARIANT),
    ("model.attention_type", ("multihead",), _NO_VARIANT),
    ("model.normalize_attention_scores", (True,), _NO_VARIANT),
    ("training_objective", ("causal_lm",), _NO_VARIANT),
    (
        "chunk_attn_window_size attn_logits_soft_cap final_logits_soft_cap "
        "attention_bias mlp_bias attention_sink share_kv_projections use_post_attn_norm "
        "use_post_ffw_norm use_qk_norm use_qk_clip use_indexer moba mtp_num_layers use_multimodal "
        "use_untrainable_positional_embedding global_head_dim global_num_kv_heads model.bias",
        (False,),
        _NO_VARIANT,
    ),
    (
        "use_dpo use_sft lora_input_adapters_path trainable_parameters_mask enable_diloco",
        (False, []),
        "not supported: all weights are trained on text, in every step; leave it out",
    ),
    ("rl.loss_algo", ("grpo",), "not supported: the ratio is of tokens, not of answers; use grpo"),
    (
        "decode_sampling_top_k decode_sampling_nucleus_p",
        (0, 1, -1),
        "not supported: answers are drawn from all tokens, as their probabilities say; leave it "
        "out",
    ),
    ("adam_eps_root", (0,), "not supported; leave it out"),
    ("skip_step_on_spikes", (False,), "not supported; skip_bad_steps leaves out bad gradients"),
    ("grad_dtype", ("float32",), "not supported: gradients are in weight_dtype; leave it out"),
    ("eval_start_step target_eval_loss", (0,), "not supported; leave it out"),
    (
        "optimizer_memory_host_offload parameter_memory_host_offload",
        (False,),
        "not supported; remat_policy and more fsdp devices save memory",
    ),
    (
        "enable_emergency_checkpoint enable_multi_tier_checkpointing "
        "enable_continuous_checkpointing enable_autocheckpoint",
        (False,),
        "not supported; use checkpoint_period, checkpoint_period_samples or "
        "checkpoint_period_minutes (a stopped run always saves)",
    ),
    ("trainer.accumulate_grad_batches", (1,), "not supported: it follows from the batch sizes"),
    ("trainer.max_time", (), "not supported; use slurm_time"),
    ("model.activations_checkpoint_granularity", (), "not supported; use remat_policy"),
    (
        "model.resume_from_checkpoint model.restore_from_path checkpoint.load",
        (),
        "not supported; use load_full_state_path or load_parameters_path",
    ),
    ("model.optim.betas", (), "not supported; use adam_b1 and adam_b2"),
    (
        "model.optim.sched.warmup_steps scheduler.lr_warmup_iters",
        (),
        "not supported; use warmup_steps_fraction (of the samples)",
    ),
    (
        "model.optim.sched.min_lr optimizer.min_lr",
        (),
        "not supported; use learning_rate_final_fraction (of the peak)",
    ),
    ("model.optim.sched.constant_steps", (0,), "not supported; use lr_schedule_type=wsd"),
)

# Names and patterns of what training does not depend on.
_IGNORED = (
    # Sharding, which the ici_ and dcn_ keys decide here.
    "mesh_axes logical_axis_rules* data_sharding input_data_sharding_logical_axes "
    "sharding_tolerance custom_mesh* shard_mode shard_optimizer_over_data "
    "allow_split_physical_axes num_slices *context_sharding context_parallel_* check_vma "
    "*_two_stage_all_gather pipeline_delay_* pipeline_parallel_layers "
    "scan_pipeline_* scan_layers_per_stage set_remat_policy_on_* "
    "inhomogeneous_layer_cycle_interval diloco_* "
    # Services, logs and profiles.
    "enable_goodput_recording monitor_goodput goodput_* enable_pathways_goodput enable_gcp_* "
    "monitor_step_time_deviation step_deviation_* report_* heartbeat_* managed_mldiagnostics* "
    "vertex_* use_vertex_tensorboard gcs_metrics metrics_file save_config_to_gcs enable_wandb "
    "wandb_* log_config record_internal_nn_metrics upload_all_profiler_results profile_* "
    "hide_profiler_step_metric enable_tpu_profiling_options tpu_num_* dump_* max_checkify "
    "write_estimator_result jax_debug_log_modules collect_stack_trace stack_trace_* "
    "enable_checkpoint_*_logger "
    # How programs and checkpoints are made.
    "override_* skip_jax_distributed_system max_inflight_computations dcn_bandwidth_* "
    "compiled_trainstep_file compile_xla_flags internal_compile* enable_single_controller "
    "checkpoint_storage_* checkpoint_todelete_* checkpoint_conversion_fn checkpoint_is_quantized "
    "source_checkpoint_layout enable_orbax_v1 save_checkpoint_on_* colocated_python_* "
    "enable_single_replica_ckpt_restoring force_unroll local_checkpoint_* "
    "multi_tier_checkpointing_* mtc_data_parallelism param_scan_axis "
    # Kernels and precision inside a step.
    "fused_qkv fused_mlp use_iota_embed sa_* num_vocab_tiling matmul_precision "
    "activations_in_float32 float32_* logits_dot_in_fp32 cast_logits_to_fp32 decoder_layer_input "
    "context mlpw* *_proj attention_out "
    # Reading ahead, and what goes with data of other kinds.
    "hf_access_token max_corpus_chars max_segments_per_seq tokenize_eval_data use_truncation "
    "use_chat_template chat_template* train_image_column eval_image_column "
    "generate_padding_batch_* grain_per_worker_buffer_size* grain_*_eval grain_ram_budget_mb "
    "grain_data_source_max_workers grain_shuffle_buffer_size grain_use_elastic_iterator "
    # What only goes with a key or value that is refused, or is about the speed of it.
    "normalize_embedding_logits enable_dropout skip_step_interval skip_step_scaling_factor "
    "megablox sparse_matmul ragged_* moe_mlpw* moe_fsdp_* moe_chunk_* moe_dispatch_* "
    "use_custom_sort_vjp use_ring_of_experts use_ragged_sort wi_tile_* wo_tile_* use_tokamax_* "
    "use_gmm_v2 shard_exp_on_fsdp use_2d_fsdp_sharding merge_gating_gmm use_batch_split_schedule "
    "batch_split_factor mtp_* mla_* indexer_* moba_* qk_clip_threshold constant_bound_config "
    "quant_cfg_path quantize_kvcache kv_quant_* save_quantized_params_path "
    "*_quantization_calibration_method quantization_local_shard_count replicate_quant_scale "
    "use_manual_quantization weight_sparsity_* te_comm_gemm_overlap "
    # Inference.
    "prompt max_prefill_predict_length load_from_prefill_dir prefill_* "
    "autoregressive_decode_assert decode_* inference_* model_call_mode enable_model_warmup "
    "enable_llm_inference_pool generate_slice multi_sampling return_log_prob "
    "stack_prefill_result_cache *_axis_order "
    # NeMo's, of all these kinds.
    "hydra.* run.* exp_manager.* trainer.logger trainer.accelerator trainer.strategy "
    "trainer.enable_checkpointing trainer.use_distributed_sampler trainer.replace_sampler_ddp "
    "trainer.max_epochs trainer.limit_test_batches trainer.benchmark trainer.enable_model_summary "
    "trainer.num_sanity_val_steps model.mcore_gpt model.megatron_amp_O2 model.transformer_engine "
    "model.pre_process model.post_process model.persist_layer_norm model.gradient_as_bucket_view "
    "model.*_fusion model.activations_checkpoint_* model.num_micro_batches_with_* model.fsdp* "
    "model.sequence_parallel model.virtual_pipeline_model_parallel_size model.overlap_p2p_comm "
    "model.batch_p2p_comm model.native_amp_* model.hysteresis model.fp32_residual_connection "
    "model.fp16_lm_cross_entropy model.grad_allreduce_chunk_size_mb model.sharp model.fp8_* "
    "model.ub_* model.sync_batch_comm model.use_cpu_initialization model.onnx_safe model.apex_* "
    "model.nsys_profile.* model.make_vocab_size_divisible_by model.max_position_embeddings "
    "model.apply_query_key_layer_scaling model.tokenizer.type model.tokenizer.delimiter "
    "model.optim.bucket_cap_mb model.optim.overlap_* model.optim.contiguous_* "
    "model.optim.grad_sync_dtype model.data.data_impl model.data.skip_warmup "
    "model.data.num_workers model.data.dataloader_type model.data.reset_position_ids "
    "model.data.index_mapping_dir "
)

_NOT_GIVEN = (None, "", "none", "None")


def ours(name: str, value: Any) -> tuple[str, Any] | None:
    """The key of base.yml that a name stands for, and the value as that takes it, if there is one.

    None of a name that is none of ours, and of a renamed one whose null leaves it out.
    """
    key = RENAMED.get(name, name)
    if key not in base() or (key != name and value is None and not may_be_unset(key)):
        return None
    return key, VALUES.get(key, {}).get(str(value), value)


def refusal(name: str, value: Any) -> str | None:
    """What is wrong with a key that is none of `ours`.

    Returns:
      "" where training does not depend on it; None where no trainer that we know has it.
    """
    why = f"is {DERIVED[name]} there; give that number" if name in DERIVED else None
    for names, asks_for_nothing, wrong in () if why else _REFUSED:
        if _matches(name, names):
            why = "" if value in (*_NOT_GIVEN, *asks_for_nothing) else wrong
            break
    if why is None and (name in RENAMED or _matches(name, _IGNORED)):
        return ""
    owner = "NeMo" if "." in name and not name.startswith("rl.") else "MaxText"
    return f"({owner}'s): {why}" if why else why


def check(foreign: Mapping[str, tuple[str, Any]], layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of other keys than ours on which training does not depend.

    Args:
      foreign: (as given, value) of all keys that are none of `ours`.
      layers: all keys that each file and the command line give, the base first.

    Raises:
      ConfigError: there are others; all of them, in one line.
    """
    refused, unknown, ignored = collections.defaultdict(list), [], []
    for name, (given, value) in foreign.items():
        if why := refusal(name, value):
            refused[why].append(given)
        elif why is None:
            unknown.append((given, name))
        else:
            ignored.append(name)
    for together, why in _refused_together(layers):
        refused[why].append(together)
    wrong = [f"{', '.join(shortened(given))} {why}" for why, given in refused.items()]
    if unknown:
        wrong.append(unknown_keys(unknown))
    if wrong:
        raise ConfigError(". ".join(wrong))
    return ignored


def _refused_together(layers: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """(as given, why) of what several keys of another trainer refuse together."""
    last: dict[str, Any] = {}
    beside: set[str] = set()  # the keys that go with the newest heads
    for given in layers:
        last |= given
        beside = {*given} | (set() if "model.num_attention_heads" in given else beside)
    for name, default in DERIVED.items():
        if "model.num_attention_heads" in last and name not in last and RENAMED[name] not in beside:
            yield name, f"(NeMo's): is not given, and is {default} there; give that number"
    if last.get("normalize_embedding_logits") and last.get("logits_via_embedding"):
        yield (
            "normalize_embedding_logits=True with logits_via_embedding=True",
            "(MaxText's): not supported: logits are the product alone; use False",
        )


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split())
