"""Which keys of a run its branches have: every key of base.yml is in `KEPT`, in `DROPPED`, or among
those that `branch_keys` gives."""

import math
from typing import Any

from maxramp.checkpoints.folder import Checkpoint
from maxramp.config.keys import Config
from maxramp.config.load import no_batch
from maxramp.keys.base import base
from maxramp.rampup.phases import MIXTURE
from maxramp.training.learning_rate import LearningRate

# As the run has them, at the phase of the checkpoint.
KEPT = (
    # where and how passes are computed
    *("hardware", "jax_cache_dir", "num_nodes", "devices_per_node", "node_schedule", "min_nodes"),
    *("node_time_tolerance", "restart_minutes", "planned_pass_overhead", "device_memory_gib"),
    *("planned_tflops_per_device", "join_timeout_seconds", "hang_timeout_seconds"),
    *("ici_data_parallelism", "ici_pipeline_parallelism", "ici_fsdp_parallelism"),
    *("ici_tensor_parallelism", "dcn_data_parallelism", "dcn_pipeline_parallelism"),
    *("dcn_fsdp_parallelism", "dcn_tensor_parallelism", "num_pipeline_microbatches"),
    *("num_layers_per_pipeline_stage", "num_pipeline_repeats", "pipeline_fsdp_ag_once"),
    *("scan_layers", "attention", "loss_block_tokens", "remat_policy", "dtype", "weight_dtype"),
    *("per_device_batch_size", "micro_batch_size", "eval_per_device_batch_size"),
    # rows, those that are held out too
    *("dataset_type", "text_files", MIXTURE, "grain_eval_files", "eval_sets", "grain_file_type"),
    *("hf_path", "hf_name", "train_split", "hf_eval_split", "train_data_columns", "eval_fraction"),
    *("tokenizer_type", "tokenizer_path", "tokenize_train_data", "add_bos", "add_eos"),
    *("split_special_tokens", "max_target_length", "row_length", "packing", "separate_documents"),
    *("grain_packing_type", "num_epoch", "enable_data_shuffling", "data_shuffle_seed"),
    *("expansion_factor_real_data", "grain_worker_count", "grain_num_threads"),
    *("grain_prefetch_buffer_size", "grain_prefetch_buffer_gib", "phases_unit"),
    *("use_sft", "sft_train_on_completion_only", "sft_train_on_last_answer_only"),
    *("chat_template", "chat_template_date", "chat_template_switches", "long_chats"),
    *("chats_with_marks", "use_dpo", "dpo_beta", "dpo_loss_type", "dpo_label_smoothing"),
    # model
    *(
        "model_name",
        "decoder_block",
        "base_emb_dim",
        "base_num_query_heads",
        "base_num_kv_heads",
        "head_dim",
    ),
    *("base_mlp_dim", "base_num_decoder_layers", "vocab_size", "mlp_activations"),
    *("logits_via_embedding", "attention_bias", "use_qk_norm", "normalization_layer_epsilon"),
    *("rope_max_timescale", "rope_type", "rope_factor", "rope_low_freq_factor"),
    *("rope_high_freq_factor", "original_max_position_embeddings", "sliding_window_size"),
    *("lora_rank", "lora_alpha", "use_rslora", "lora_dropout", "lora_targets"),
    "init_weights_seed",
    # optimizer
    *("opt_type", "trainable_parameters_mask", "trainable_layers", "adam_b1", "adam_b2"),
    *("adam_eps", "adam_weight_decay", "adamw_mask", "mu_dtype", "sgd_momentum", "muon_beta"),
    *("muon_weight_decay", "muon_consistent_rms", "half_lives_in_samples"),
    *("gradient_clipping_threshold", "z_loss_multiplier", "skip_bad_steps"),
    *("abort_on_nan_loss", "abort_on_inf_loss"),
    # when it saves, and what it shows
    *("async_checkpointing", "checkpoint_period", "checkpoint_period_samples"),
    *("checkpoint_period_minutes", "checkpoint_stage_ends", "max_failed_saves"),
    *("log_period", "enable_tensorboard"),
)

# As base.yml has them.
DROPPED = (
    # what is measured or handed over beside the loss on held-out rows
    *("export_huggingface", "evaluate_tasks", "evaluate_tasks_interval"),
    *("evaluate_tasks_include_path", "checkpoint_best", "log_gradient_noise_scale"),
    *("log_token_statistics", "wandb_project", "profiler", "skip_first_n_steps_for_profiler"),
    "profiler_steps",
    # what changed in the run's rows or weights: a branch continues from a checkpoint after that
    "allow_changed",
    # of a curve that a branch does not follow
    *("learning_rate_final_fraction", "wsd_decay_style", "learning_rate_by"),
    # of plans, launches, and of reinforcement learning
    *("price_per_device_hour", "planned_flops_share", "planned_memory_share"),
    *("planned_link_share", "compile_topology", "compile_topology_num_slices"),
    *("processes_per_node", "grace_seconds", "max_restarts", "setup_lines", "container_image"),
    *("container_runtime", "container_mounts", "slurm_account", "slurm_partition", "slurm_qos"),
    *("slurm_time", "slurm_options", "gke_accelerator", "gke_topology", "gke_namespace"),
    *("gke_queue", "gke_service_account", "gke_bucket", "gke_volume_claim", "gke_mount_path"),
    *("num_generations", "max_completion_length", "decode_sampling_temperature", "rollout_seed"),
    *("grpo_normalize_advantages", "grpo_epsilon", "grpo_epsilon_high", "grpo_beta"),
    *("grpo_normalization", "num_iterations", "prompt_file", "eval_prompt_file", "log_answers"),
    *("sums_below", "rewards", "reward_weights", "reward_workers", "reward_timeout_seconds"),
)


def inherited_keys(config: Config, sample: int) -> dict[str, Any]:
    """The keys that a branch has from its run, or in their place from base.yml.

    Args:
      config: of the run, resolved.
      sample: where the branch begins.
    """
    of_phase = {**config.batch.phase_at(sample).values, MIXTURE: config.values[MIXTURE]}
    kept = {name: of_phase.get(name, config.values[name]) for name in KEPT}
    return kept | {name: base()[name] for name in DROPPED}


def branch_keys(
    config: Config, position: Checkpoint, rate: LearningRate, size: int, samples: int
) -> dict[str, Any]:
    """The keys that a branch has for itself, but for the folder it runs in.

    It trains at the rate that the run had at the checkpoint, times the root of the batches, and so
    do weights decay whose half-life is in samples; what is remembered counts from the reference
    batch of the run: a first threshold gives it, which lies before the checkpoint.

    Args:
      config: of the run, resolved.
      position: where the branch begins.
      rate: the run's.
      size: the branch's global batch size.
      samples: that it trains on.
    """
    first, keys = position.consumed_samples, config.optimizer
    batch = position.stage()["global_batch_size"]
    follows = math.sqrt(size / batch)
    by_batch = rate.pace(batch).rate * follows
    decays = {
        name: config.values[name] / by_batch
        for name in ("adam_weight_decay", "muon_weight_decay")
        if name in keys.half_lives_in_samples
    }
    has_base = config.model.lora_rank or config.data.use_dpo
    mixtures = {p.name: {MIXTURE: p.given[MIXTURE]} for p in config.batch.changing(MIXTURE)}
    return (
        decays
        | no_batch()
        | {
            "step_batch_size_schedule": f"0:{rate.reference} {first}:{size}",
            "step_batch_size_unit": "samples",
            "phases": mixtures,  # the rows of a mixture depend on where those before it begin
            "total_samples": first + samples,
            "learning_rate": float(rate(first, batch)) * follows,
            "lr_schedule_type": "wsd",  # constant: no warm-up, and no decay
            "warmup_steps_fraction": 0.0,
            "wsd_decay_steps_fraction": 0.0,
            "learning_rate_schedule_steps": -1,
            "batch_size_lr_scaling": "none",
            "batch_size_lr_reference": "initial",
            "program": "train",
            "load_full_state_path": str(position.path),
            "load_parameters_path": config.checkpoints.load_parameters_path if has_base else "",
            "eval_interval": 10**12,  # at the end alone
            "eval_samples": -1,
            "log_eval_batches": True,
            "enable_checkpointing": True,
            "max_num_checkpoints_to_keep": 1,
            "checkpoint_keep_period": -1,
            "stop_at_stage_end": False,
            "stop_at_node_change": False,
        }
    )
