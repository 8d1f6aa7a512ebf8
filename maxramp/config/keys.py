"""The configuration: every section, put together."""

import dataclasses
import itertools
import math
import re
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Self

from maxramp.checkpoints.keys import CheckpointKeys
from maxramp.config.chats import check_chats
from maxramp.config.checkpoints import check_best, check_checkpoints
from maxramp.data.keys import DataKeys, EvalKeys, ReadingKeys
from maxramp.huggingface import config_json
from maxramp.keys.base import base
from maxramp.keys.section import Keys, Relations, is_object_storage, refuse
from maxramp.launch.keys import LaunchKeys
from maxramp.model.families.table import check_family
from maxramp.model.keys import ACTIVATIONS, LORA_MODULES, ROLES, ModelKeys
from maxramp.parallel.keys import MeshKeys
from maxramp.planning.keys import PlanKeys
from maxramp.processes.keys import BackendKeys
from maxramp.rampup import notations
from maxramp.rampup.keys import BatchKeys
from maxramp.rampup.phases import MESH_KEYS, MIXTURE
from maxramp.rl.keys import RolloutKeys
from maxramp.run.keys import ProfilerKeys, RunKeys
from maxramp.stage import SIGHT_KEYS
from maxramp.training.keys import (
    HALF_LIVES,
    LearningRateKeys,
    ObjectiveKeys,
    OptimizerKeys,
    PolicyKeys,
    Recipe,
)

# Sections that one of the programs that train reads, and the other does not.
OF_ONE_PROGRAM = {
    "train": ("data", "reading", "objective", "evaluation"),
    "grpo": ("policy", "rollout"),
}


@dataclasses.dataclass(frozen=True, eq=False)
class Config:
    """Every section, for the commands, which hand each room its own."""

    values: Mapping[str, Any]  # all keys by their name, in the order of base.yml
    batch: BatchKeys
    backend: BackendKeys
    mesh: MeshKeys
    model: ModelKeys
    data: DataKeys
    reading: ReadingKeys
    objective: ObjectiveKeys
    optimizer: OptimizerKeys
    learning_rate: LearningRateKeys
    policy: PolicyKeys
    checkpoints: CheckpointKeys
    run: RunKeys
    evaluation: EvalKeys
    profiling: ProfilerKeys
    planning: PlanKeys
    launch: LaunchKeys
    rollout: RolloutKeys

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> Self:
        """The sections of the values of all keys, each checked alone.

        Raises:
          ConfigError: names the key, its value, the bound it breaks and a remedy.
        """
        values = types.MappingProxyType(dict(values))
        sections = cls.sections()
        return cls(
            values, **{name: section.from_values(values) for name, section in sections.items()}
        )

    @classmethod
    def sections(cls) -> dict[str, type[Keys]]:
        """The class of every section by its name."""
        return {field.name: field.type for field in fields(cls) if field.name != "values"}

    @classmethod
    def unread_by(cls, program: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """The keys that are given for other programs that train, with their defaults.

        They change nothing in a run of this one; none of what is about a run of any of them.
        """
        sections = cls.sections()
        ours = OF_ONE_PROGRAM.get(program, sections)
        others = {*itertools.chain(*OF_ONE_PROGRAM.values())} - {*ours}
        read = {f.name for n, s in sections.items() if n not in others for f in fields(s)}
        return {
            name: default
            for name, default in base().items()
            if name not in read and values[name] != default
        }

    def check(self) -> None:
        """Checks the relations between keys that need no devices.

        Raises:
          ConfigError: names the key, its value, the relation it breaks and a remedy.
        """
        relations = (check(getattr(self, name)) for name, check in _RELATIONS.items())
        refuse(itertools.chain(*relations, _check_together(self)))
        notations.check(self.batch)
        for phase in self.batch.phase_list[1:]:
            with phase.name_errors():
                self.replace(**phase.values, phases={}).check()
        if self.run.export_huggingface:
            config_json.config_of(self.model, {}, "")

    @property
    def recipe(self) -> Recipe:
        """What a train state and its step are made from."""
        return Recipe(self.model, self.objective, self.optimizer)

    def replace(self, **values: Any) -> Self:
        """The same with other values of some keys."""
        return self.from_values({**self.values, **values})


# What keys must not be together. The bound of one key alone stands beside it, in its section;
# `resolve` checks what depends on the devices, `rampup.notations` what a ramp's notation asks for.
_GO_WITH = dict.fromkeys(("grain_train_files", "grain_eval_files"), "grain") | dict.fromkeys(
    ("hf_path", "hf_name", "hf_eval_split", "train_split"), "hf"
)
_NEEDED = {
    "grain_train_files": "a folder that maxramp.prepare made, or glob,weight;glob,weight",
    "hf_path": "the name of a data set, such as allenai/c4",
    "train_split": "a split of the data set, such as train",
}
_MOST_SECONDS = 2e6  # that the system can wait: 2^31 ms


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
    yield from check_family(keys)
    yield keys.head_dim % 2, f"head_dim={keys.head_dim} must be even: rotary positions turn pairs"
    yield (
        keys.base_num_query_heads % keys.base_num_kv_heads,
        f"base_num_kv_heads={keys.base_num_kv_heads} does not divide "
        f"base_num_query_heads={keys.base_num_query_heads}: every key and value head serves "
        "equally many query heads; use a divisor",
    )
    names = keys.mlp_activations
    yield (
        len(names) != 2 or any(name not in ACTIVATIONS for name in names),
        f"mlp_activations={names} must be two of {', '.join(ACTIVATIONS)}: of the gate, and of "
        "what it gates",
    )
    for name in keys.lora_targets:
        yield (
            name not in ("matrix", *LORA_MODULES),
            f"lora_targets={list(keys.lora_targets)}: {name} gets no adapter; use matrix for all, "
            f"or some of {', '.join(LORA_MODULES)}",
        )
    yield (
        keys.lora_rank and not keys.lora_targets,
        f"lora_targets=[] leaves lora_rank={keys.lora_rank} nothing to adapt; use [matrix] for all",
    )


def _check_data(keys: DataKeys) -> Relations:
    kind, columns = keys.dataset_type, keys.train_data_columns
    yield (
        kind == "text" and keys.vocab_size < 258,
        f"vocab_size={keys.vocab_size} is too small for dataset_type=text: 256 bytes and two marks "
        "make 258; use 320 (a multiple of 64) or more",
    )
    for name, goes_with in _GO_WITH.items():
        value = getattr(keys, name)
        yield (
            value != base()[name] and kind != goes_with,
            f"{name}={value} goes with dataset_type={goes_with}, not {kind}",
        )
    for name, what in _NEEDED.items():
        needed = kind == _GO_WITH[name] and not getattr(keys, name)
        yield needed, f"dataset_type={kind} needs {name}: {what}"
    yield (
        len(columns) != 1 or not isinstance(columns[0], str),
        f"train_data_columns={columns} must be one name, such as [text]",
    )
    other = keys.grain_eval_files or keys.hf_eval_split
    yield (
        keys.eval_sets and kind not in ("grain", "hf"),
        f"eval_sets={dict(keys.eval_sets)} goes with dataset_type=grain or hf, not {kind}",
    )
    yield (
        keys.eval_sets and other,
        f"eval_sets={dict(keys.eval_sets)}: {other} is held out too and has no name there; give it "
        "one in eval_sets, and leave out grain_eval_files and hf_eval_split",
    )
    held_out = kind == "synthetic" or other or keys.eval_sets
    yield (
        keys.eval_interval > 0 and not held_out and keys.eval_fraction == 0,
        f"eval_interval={keys.eval_interval} asks for evaluation, but eval_fraction=0 holds no "
        "text out; give a larger one, or eval_interval=-1",
    )
    factor = keys.expansion_factor_real_data
    yield (
        factor > 1 and factor % 1,
        f"expansion_factor_real_data={factor:g} must be a whole number of processes; use "
        f"{math.floor(factor)} or {math.ceil(factor)}",
    )
    for name, given in {
        "tokenizer_path": keys.tokenizer_path,
        "tokenizer_type": keys.tokenizer_type not in ("", "bytes"),
        "split_special_tokens": not keys.split_special_tokens,
    }.items():
        yield (
            kind == "text" and given,
            f"{name}={getattr(keys, name)}: dataset_type=text trains on bytes, without a "
            "tokenizer; use dataset_type=grain grain_train_files=FILES, or leave it out",
        )
    yield (
        keys.tokenizer_type == "bytes" and keys.tokenizer_path and kind != "synthetic",
        f"tokenizer_type=bytes has no file, but tokenizer_path={keys.tokenizer_path}; leave one "
        "out",
    )
    yield from check_chats(keys)
    if keys.tokenizer_path:
        _ = keys.type_of_tokenizer  # raises where the name says nothing


def _check_objective(keys: ObjectiveKeys) -> Relations:
    smoothing, loss = keys.dpo_label_smoothing, keys.dpo_loss_type
    yield (
        smoothing >= 0.5,
        f"dpo_label_smoothing={smoothing} must be below 0.5, or the chosen answers would count "
        "as the worse ones",
    )
    yield (
        keys.use_dpo and loss == "ipo" and smoothing,
        f"dpo_label_smoothing={smoothing}: dpo_loss_type=ipo has none; use 0, or sigmoid or robust",
    )
    yield (
        keys.use_dpo and keys.z_loss_multiplier,
        f"z_loss_multiplier={keys.z_loss_multiplier} is of next-token prediction, and use_dpo=True "
        "compares answers; use 0",
    )


def _check_optimizer(keys: OptimizerKeys) -> Relations:
    for role in keys.adamw_mask:
        yield (
            role not in ROLES,
            f"adamw_mask={keys.adamw_mask}: {role} is not a role of a weight; use some of "
            f"{', '.join(ROLES)}",
        )
    for name in keys.half_lives_in_samples:
        yield (
            name not in HALF_LIVES[keys.opt_type],
            f"half_lives_in_samples={keys.half_lives_in_samples}: {name} is not a half-life of "
            f"opt_type={keys.opt_type}; use some of {', '.join(HALF_LIVES[keys.opt_type])}",
        )
    for role in keys.trainable_parameters_mask:
        yield (
            role not in ROLES,
            f"trainable_parameters_mask={list(keys.trainable_parameters_mask)}: {role} is not a "
            f"role of a weight; use some of {', '.join(ROLES)}",
        )
    chosen = list(keys.trainable_layers)
    for number in chosen:
        yield (
            type(number) is not int or number < 0,
            f"trainable_layers={chosen}: {number} is not the number of a layer, from 0 up",
        )
    yield (
        chosen != sorted({*chosen}),
        f"trainable_layers={chosen} must rise, each once; use {sorted({*chosen})}",
    )


def _check_policy(keys: PolicyKeys) -> Relations:
    yield (
        keys.num_generations == 1,
        "num_generations=1: an answer's advantage is over the others to its prompt, and there are "
        "none; use 2 or more",
    )


def _check_run(keys: RunKeys) -> Relations:
    yield (
        keys.run_name in (".", "..") or "/" in keys.run_name,
        f"run_name={keys.run_name} must name one folder below base_output_directory; put the path "
        "into base_output_directory",
    )
    yield (
        keys.export_huggingface and not keys.enable_checkpointing,
        "export_huggingface=True hands over the last checkpoint and enable_checkpointing=False "
        "saves none; leave one of them out",
    )
    for name in ("base_output_directory", "run_name"):
        globs = sorted(set("*?[") & set(value := getattr(keys, name)))
        yield (  # which clients of an object storage take for a glob
            globs and is_object_storage(keys.base_output_directory),
            f"{name}={value} has {' '.join(globs)} in it, which no address in an object storage "
            "may have; take another name",
        )


def _check_rollout(keys: RolloutKeys) -> Relations:
    names, weights = list(map(str, keys.rewards)), list(keys.reward_weights)
    for name in names:
        yield not re.fullmatch("[^:]+:.+", name), f"rewards: {name} must be module:function"
    yield not names, "rewards=[] names no function; give module:function"
    yield len({*names}) < len(names), f"rewards={names} names a function twice; weigh it once"
    yield (
        weights and len(weights) != len(names),
        f"reward_weights={weights} has {len(weights)} numbers for {len(names)} rewards; give one "
        "for each, or none",
    )
    for weight in weights:
        finite = type(weight) in (int, float) and abs(weight) <= sys.float_info.max
        yield not finite, f"reward_weights: {weight} must be a finite number"
    yield (
        keys.reward_timeout_seconds > _MOST_SECONDS,
        f"reward_timeout_seconds={keys.reward_timeout_seconds:g} must be at most "
        f"{_MOST_SECONDS:g}, 23 days",
    )


def _check_together(config: "Config") -> Relations:
    rate, steps = config.learning_rate, config.batch.steps
    yield from check_best(config.checkpoints, config.evaluation, config.data.eval_sets)
    measured = ["rampup_policy=noise"] * (config.batch.rampup_policy == "noise")
    measured += ["log_gradient_noise_scale=True"] * config.optimizer.log_gradient_noise_scale
    yield (
        config.data.use_dpo and measured,
        f"{''.join(measured[:1])}: the noise scale is measured of a mean over tokens, and "
        "use_dpo=True takes one over pairs; leave it out, and give a ramp or rampup_policy=seesaw",
    )
    lora, mask = config.model.lora_rank, list(config.optimizer.trainable_parameters_mask)
    full, first = config.checkpoints.load_full_state_path, config.checkpoints.load_parameters_path
    begins = {f"lora_rank={lora}": lora, "use_dpo=True": config.data.use_dpo}
    begins = "".join([given for given, is_given in begins.items() if is_given][:1])
    yield (
        full and begins and not first,
        f"load_full_state_path={full} with {begins}: its checkpoint does not hold the weights that "
        "the run began with; give them too, load_parameters_path",
    )
    yield (
        config.batch.is_open and config.data.dataset_type == "synthetic",
        "steps=-1, total_samples=-1 and total_tokens=-1 leave the length of the run open: there is "
        "no end of synthetic data; give one of them",
    )
    yield (
        lora and mask not in ([], ["adapter"]),
        f"trainable_parameters_mask={mask} with lora_rank={lora}: only adapters train, and only "
        "they are in a checkpoint; leave one of them out",
    )
    chosen = list(config.optimizer.trainable_layers)
    yield (
        lora and "trainable_layers" in config.checkpoints.allow_changed,
        f"allow_changed=[trainable_layers] with lora_rank={lora}: what other layers have learned "
        "would not be handed over; leave it out, or give another run_name",
    )
    noise = config.optimizer.log_gradient_noise_scale or config.batch.rampup_policy == "noise"
    frozen = f"lora_rank={lora}" * bool(lora) or f"trainable_layers={chosen}" * bool(chosen)
    frozen = frozen or f"trainable_parameters_mask={mask}" * bool(mask and "scale" not in mask)
    yield (
        noise and frozen,
        "the noise scale is measured on the gradients of the norms' scales, which are frozen under "
        f"{frozen}; leave out log_gradient_noise_scale and rampup_policy=noise",
    )
    yield (
        rate.batch_size_lr_reference == "final" and config.batch.rampup_policy == "noise",
        "batch_size_lr_reference=final with rampup_policy=noise: the learning rate would depend on "
        "a batch that is not decided yet; use initial, or leave it out",
    )
    whole = {"use_sft=True": config.data.use_sft, "use_dpo=True": config.data.use_dpo}
    whole["grpo"] = config.run.program == "grpo"
    for reader, is_used in whole.items():
        yield (
            config.batch.row_length != -1 and is_used,
            f"row_length={config.batch.row_length} cuts samples into rows, and {reader} reads each "
            "as a whole; leave it out (-1)",
        )
    once = (*SIGHT_KEYS, MIXTURE)
    fixed = dict.fromkeys(once, "use_dpo=True") if config.data.use_dpo else {}
    fixed |= dict.fromkeys((*MESH_KEYS, *once), "grpo") if config.run.program == "grpo" else {}
    for name, reader in fixed.items():
        given = [f"{phase}.{name}" for phase in config.batch.changing(name)]
        yield given, f"{''.join(given[:1])}: {reader} takes one for the whole run; leave it out"
    yield (
        -1 != steps < rate.learning_rate_schedule_steps,
        f"learning_rate_schedule_steps={rate.learning_rate_schedule_steps} exceeds steps={steps}; "
        "the learning rate would never reach its end: lower it, or use -1 for all steps",
    )


_RELATIONS: dict[str, Callable[[Any], Relations]] = {
    "batch": _check_batch,
    "mesh": _check_mesh,
    "model": _check_model,
    "data": _check_data,
    "objective": _check_objective,
    "optimizer": _check_optimizer,
    "policy": _check_policy,
    "checkpoints": check_checkpoints,
    "run": _check_run,
    "rollout": _check_rollout,
}
