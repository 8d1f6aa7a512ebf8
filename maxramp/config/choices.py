"""The table of choices: keys that are read only if others have certain values (`keys.choices`).

It leaves out keys of a service that is switched off, such as eval_samples with eval_interval=-1:
they do not change training, and nobody waits for their output.
"""

from maxramp.keys.choices import Choices
from maxramp.model.families.table import family_choices
from maxramp.objectives.chats import CHATS
from maxramp.objectives.pairs import PAIRS
from maxramp.rampup.keys import CHOICES as RAMPS
from maxramp.training.keys import CHOICES as TRAINING

_CHATS = f"{CHATS.asked_by} or {PAIRS.asked_by}"
CHOICES: Choices = {
    **RAMPS,
    **TRAINING,
    "node_schedule=best": ("node_time_tolerance",),
    "node_schedule=best or elastic=True": ("min_nodes",),
    "elastic=True": ("node_rest_seconds", "max_node_failures"),
    "profiler": ("skip_first_n_steps_for_profiler", "profiler_steps"),
    # data
    "without program=grpo": ("grain_train_files",),
    "dataset_type=text": ("text_files",),
    "dataset_type=grain": ("grain_train_files", "grain_eval_files", "grain_file_type"),
    "dataset_type=hf": ("hf_path", "hf_name", "train_split", "hf_eval_split"),
    "dataset_type=grain|hf": (
        *("eval_sets", "train_data_columns", "tokenize_train_data", "add_bos", "add_eos"),
        *("packing", "separate_documents", "grain_packing_type", CHATS.key, PAIRS.key),
    ),
    "dataset_type=grain|hf|synthetic": ("tokenizer_path", "split_special_tokens"),
    "enable_data_shuffling=True": ("data_shuffle_seed",),
    _CHATS: (
        *("sft_train_on_last_answer_only", "chat_template", "chat_template_date"),
        *("chat_template_switches", "chats_with_marks"),
    ),
    CHATS.asked_by: ("sft_train_on_completion_only", "long_chats"),
    "sft_train_on_completion_only=True": ("sft_train_on_last_answer_only",),
    f"without {_CHATS}": ("tokenize_train_data",),
    # evaluations and checkpoints
    "evaluate_tasks": ("evaluate_tasks_interval", "evaluate_tasks_include_path"),
    "enable_checkpointing=True": (
        *("checkpoint_best", "export_huggingface", "stop_at_stage_end", "stop_at_node_change"),
        "enable_emergency_checkpoint",
    ),
    "enable_emergency_checkpoint=True": ("local_checkpoint_directory", "local_checkpoint_period"),
    "max_num_checkpoints_to_keep": ("checkpoint_keep_period",),
    # the model
    **family_choices(),
    "rope_type=llama3.1|yarn|dynamic": ("rope_factor", "original_max_position_embeddings"),
    "rope_type=llama3.1": ("rope_low_freq_factor", "rope_high_freq_factor"),
    "rope_type=yarn": (
        "beta_fast",
        "beta_slow",
        "rope_truncate",
        "rope_attention_factor",
        "mscale",
    ),
    "rope_type=default": ("rope_linear_scaling_factor",),
    "lora_rank": ("lora_alpha", "use_rslora", "lora_dropout", "lora_targets"),
    # other commands
    "container_image": ("container_runtime", "container_mounts"),
    "gke_bucket or gke_volume_claim": ("gke_mount_path",),
    "compile_topology": ("compile_topology_num_slices",),
    "without prompt_file": ("sums_below",),
}
