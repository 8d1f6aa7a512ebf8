"""Relations between keys, and the errors if they are broken.

A section holds the bound of a single key; `choices` holds keys that need a choice. `resolve`
checks what depends on devices, `rampup.notations` the notations of ramps.
"""

from collections.abc import Mapping
from typing import Any

from maxramp.checkpoints.folder import why_not_maxtext
from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.data.keys import DataKeys, EvalKeys
from maxramp.files.place import place
from maxramp.keys.base import base
from maxramp.keys.section import Relations, is_object_storage
from maxramp.model.families.table import FAMILIES, check_family
from maxramp.model.keys import ModelKeys
from maxramp.objectives.chats import CHATS
from maxramp.objectives.objective import measured_noise
from maxramp.objectives.text import TEXT
from maxramp.parallel.keys import MeshKeys
from maxramp.rampup.keys import BatchKeys
from maxramp.rl.keys import RolloutKeys
from maxramp.run.keys import RunKeys
from maxramp.training.keys import OptimizerKeys, half_lives

# Keys of the data that a dataset_type needs, and what to give.
_NEEDED = {
    "grain_train_files": ("grain", "a prepared folder, or glob,weight;glob,weight"),
    "hf_path": ("hf", "the name of a data set, such as allenai/c4"),
    "train_split": ("hf", "a split of the data set, such as train"),
}


def _check_batch(keys: BatchKeys) -> Relations:
    decay = keys.wsd_decay_steps_fraction if keys.lr_schedule_type == "wsd" else 0
    yield (
        keys.warmup_steps_fraction + decay > 1,
        f"warmup_steps_fraction={keys.warmup_steps_fraction} and wsd_decay_steps_fraction={decay} "
        "add up to more than 1; lower one",
    )
    yield (
        keys.open_pipeline and keys.nodes > 1 and keys.node_schedule != "fixed",
        f"{keys.open_pipeline} makes other stages on other numbers of nodes, and "
        f"node_schedule={keys.node_schedule} takes any up to num_nodes={keys.nodes}; give the "
        "number of stages, or use node_schedule=fixed",
    )


def _check_mesh(keys: MeshKeys) -> Relations:
    for group in ("ici", "dcn"):
        names = [f"{n}=-1" for n, x in vars(keys).items() if n.startswith(group) and x == -1]
        yield (
            len(names) > 1,
            f"{' and '.join(names[::-1])}: one -1 per group can be filled in; give the others",
        )


def _check_model(keys: ModelKeys) -> Relations:
    yield (
        keys.rope_high_freq_factor <= keys.rope_low_freq_factor,
        f"rope_high_freq_factor={keys.rope_high_freq_factor} must be above "
        f"rope_low_freq_factor={keys.rope_low_freq_factor}: between them scaling sets in",
    )
    yield (
        keys.rope_type == "yarn" and keys.beta_fast < keys.beta_slow,
        f"beta_fast={keys.beta_fast} must not be below beta_slow={keys.beta_slow}: between them "
        "scaling sets in",
    )
    yield (
        keys.rope_type == "yarn" and keys.rope_max_timescale <= 1,
        f"rope_type=yarn with rope_max_timescale={keys.rope_max_timescale:g}: it scales by how "
        "often pairs turn, which then slow down by it; give more than 1",
    )
    yield (
        keys.rope_type == "dynamic"
        and keys.max_target_length > keys.original_max_position_embeddings,
        f"rope_type=dynamic with max_target_length={keys.max_target_length} above "
        f"original_max_position_embeddings={keys.original_max_position_embeddings}: longer "
        "rows would turn by their length; use shorter ones, or rope_type=yarn",
    )
    yield from check_family(keys)
    yield (
        keys.base_num_query_heads % keys.base_num_kv_heads,
        f"base_num_kv_heads={keys.base_num_kv_heads} does not divide "
        f"base_num_query_heads={keys.base_num_query_heads}: every key and value head serves "
        "equally many query heads; use a divisor",
    )


def _check_data(keys: DataKeys) -> Relations:
    kind = keys.dataset_type
    yield (
        kind == "text" and keys.vocab_size < 258,
        f"vocab_size={keys.vocab_size} is too small for dataset_type=text: 256 bytes and 2 tokens "
        "for begin and end make 258; use 320 (a multiple of 64) or more",
    )
    for name, (reader, value) in _NEEDED.items():
        is_missing = kind == reader and not getattr(keys, name)
        yield is_missing, f"dataset_type={kind} needs {name}: {value}"
    other = keys.grain_eval_files or keys.hf_eval_split
    yield (
        keys.eval_sets and other,
        f"eval_sets={dict(keys.eval_sets)}: {other} is held out too and has no name there; give it "
        "one in eval_sets, and leave out grain_eval_files and hf_eval_split",
    )
    held_out = kind == "synthetic" or other or keys.eval_sets
    yield (
        keys.eval_interval != -1 and not held_out and keys.eval_fraction == 0,
        f"eval_interval={keys.eval_interval} asks for evaluation, but eval_fraction=0 holds no "
        "text out; give a larger one, or eval_interval=-1",
    )
    for name in ("tokenizer_path", "tokenizer_type"):
        yield (
            kind == "text" and getattr(keys, name) not in ("", "bytes"),
            f"{name}={getattr(keys, name)}: dataset_type=text trains on bytes, without a "
            "tokenizer; use dataset_type=grain grain_train_files=FILES, or leave it out",
        )
    yield (
        keys.tokenizer_type == "bytes" and keys.tokenizer_path and kind != "synthetic",
        f"tokenizer_type=bytes has no file, but tokenizer_path={keys.tokenizer_path}; leave one "
        "out",
    )
    if keys.tokenizer_path:
        _ = keys.type_of_tokenizer  # raises if the name does not tell


def _check_optimizer(keys: OptimizerKeys) -> Relations:
    allowed = half_lives(keys.opt_type)
    for name in keys.half_lives_in_samples:
        use = f"use some of {', '.join(allowed)}" if allowed else "optax counts steps: leave it out"
        yield (
            name not in allowed,
            f"half_lives_in_samples={keys.half_lives_in_samples}: {name} is not a half-life of "
            f"opt_type={keys.opt_type}; {use}",
        )
    if keys.opt_type.startswith("optax."):
        from maxramp.training.optimizers import optax  # only where it is used: it imports JAX

        optax.check(keys)


def _check_checkpoints(
    keys: CheckpointKeys, evaluation: EvalKeys, sets: Mapping[str, str]
) -> Relations:
    for name in keys.allow_changed:
        yield (
            str(name) not in (*base(), "corpus"),
            f"allow_changed={list(keys.allow_changed)}: {name} is neither a key nor corpus",
        )
    how, name = f"checkpoint_best={keys.checkpoint_best}", keys.checkpoint_best.partition(" ")[2]
    yield (
        name and not name.startswith(("eval_", "task_")),
        f"{how}: {name} is not a number of evaluations, whose names begin with eval_ or task_",
    )
    yield (
        name.startswith("eval_") and evaluation.eval_interval == -1,
        f"{how} with eval_interval=-1, which never evaluates; give an interval",
    )
    yield (
        name.startswith("task_") and not evaluation.evaluate_tasks,
        f"{how} without a task; give evaluate_tasks",
    )
    set_name = name.removeprefix("eval_loss_") if name.startswith("eval_loss_") else ""
    yield (
        set_name and set_name not in sets,
        f"{how}: eval_sets has no {set_name}, but {', '.join(sorted(sets)) or 'none'}",
    )


def _check_run(keys: RunKeys) -> Relations:
    for name in ("base_output_directory", "run_name"):
        value = getattr(keys, name)
        globs = sorted(set("*?[") & set(value))
        yield (  # clients of an object storage would expand them
            globs and is_object_storage(keys.base_output_directory),
            f"{name}={value} has {' '.join(globs)} in it, which no address in an object storage "
            "may have; take another name",
        )


def _check_rollout(keys: RolloutKeys) -> Relations:
    rewards, weights = list(keys.rewards), list(keys.reward_weights)
    yield (
        weights and len(weights) != len(rewards),
        f"reward_weights={weights} has {len(weights)} numbers for {len(rewards)} rewards; give one "
        "for each, or none",
    )


def _first_true(reasons: Mapping[str, Any]) -> str:
    return next((reason for reason, holds in reasons.items() if holds), "")


def _check_frozen(config: Any) -> Relations:
    optimizer, lora, measured = config.optimizer, config.model.lora_rank, measured_noise(config)
    mask = list(optimizer.trainable_parameters_mask)
    yield (
        lora and mask not in ([], ["adapter"]),
        f"trainable_parameters_mask={mask} with lora_rank={lora}: only adapters train, and only "
        "they are in a checkpoint; leave one of them out",
    )
    chosen = list(optimizer.trainable_layers)
    yield (
        lora and "trainable_layers" in config.checkpoints.allow_changed,
        f"allow_changed=[trainable_layers] with lora_rank={lora}: what other layers have learned "
        "would not be handed over; leave it out, or give another run_name",
    )
    freezes_all = {f"lora_rank={lora}": lora}
    roles = f"trainable_parameters_mask={mask}"
    routers = _first_true(freezes_all | {roles: mask and "router" not in mask})
    yield (
        optimizer.routed_bias_update_rate and routers,
        f"routed_bias_update_rate={optimizer.routed_bias_update_rate:g} moves biases of routers, "
        f"which are frozen under {routers}; use 0",
    )
    layers = {f"trainable_layers={chosen}": chosen}
    scales = _first_true(freezes_all | layers | {roles: mask and "scale" not in mask})
    yield (
        measured and scales,
        "the noise scale is measured on the gradients of the norms' scales, which are frozen under "
        f"{scales}; leave out log_gradient_noise_scale and rampup_policy=noise",
    )


def _check_quantization(config: Any) -> Relations:
    model, optimizer, objective = config.model, config.optimizer, config.objective
    if not model.quantization:
        return
    layers = FAMILIES[model.decoder_block].pattern(model)
    mask = list(optimizer.trainable_parameters_mask)
    unsupported = {
        f"num_experts={model.num_experts}": model.num_experts > 1,
        f"mtp_num_layers={model.mtp_num_layers}": model.mtp_num_layers,
        f"decoder_block={model.decoder_block} (latent attention)": any(
            layer.mixer == "latent_attention" for layer in layers
        ),
        f"lora_rank={model.lora_rank}": model.lora_rank,
        f"trainable_parameters_mask={mask}": mask,
        f"trainable_layers={list(optimizer.trainable_layers)}": optimizer.trainable_layers,
        objective.asked_by: objective not in (TEXT, CHATS),
        measured_noise(config): measured_noise(config),
    }
    if reader := _first_true(unsupported):
        yield (
            True,
            f"quantization={model.quantization} with {reader}: scales of 8 bits are not built for "
            "that; leave one of them out",
        )


def _check_together(config: Any) -> Relations:
    rate, steps = config.learning_rate, config.batch.steps
    lora = config.model.lora_rank
    full, first = config.checkpoints.load_full_state_path, config.checkpoints.load_parameters_path
    for name, path in {"load_full_state_path": full, "load_parameters_path": first}.items():
        why = path and why_not_maxtext(place(path))
        yield why, f"{name}={path}: {why}"
    objective = config.objective
    reader = _first_true({f"lora_rank={lora}": lora, objective.asked_by: objective.has_reference})
    yield (
        full and reader and not first,
        f"load_full_state_path={full} with {reader}: its checkpoint does not hold the weights that "
        "the run began with; give them too, load_parameters_path",
    )
    yield (
        config.batch.is_open and config.data.dataset_type == "synthetic",
        "steps=-1, total_samples=-1 and total_tokens=-1 leave the length of the run open: there is "
        "no end of synthetic data; give one of them",
    )
    yield from _check_frozen(config)
    yield from _check_quantization(config)
    yield from config.objective.refuses(config)
    yield (
        rate.batch_size_lr_reference == "final" and config.batch.rampup_policy == "noise",
        "batch_size_lr_reference=final with rampup_policy=noise: the learning rate would depend on "
        "a batch that is not decided yet; use initial, or leave it out",
    )
    yield (
        -1 != steps < rate.learning_rate_schedule_steps,
        f"learning_rate_schedule_steps={rate.learning_rate_schedule_steps} exceeds steps={steps}; "
        "the learning rate would never reach its end: lower it, or use -1 for all steps",
    )


def all_relations(config: Any) -> Relations:
    yield from _check_batch(config.batch)
    yield from _check_mesh(config.mesh)
    yield from _check_model(config.model)
    yield from _check_data(config.data)
    yield from _check_optimizer(config.optimizer)
    yield from _check_checkpoints(config.checkpoints, config.evaluation, config.data.eval_sets)
    yield from _check_run(config.run)
    yield from _check_rollout(config.rollout)
    yield from _check_together(config)
