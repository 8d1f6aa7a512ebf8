"""Resolves what a job's devices decide about a configuration."""

import dataclasses
import functools
import math
import os
from fractions import Fraction
from typing import Any

from maxramp.commandline import count
from maxramp.config.keys import Config
from maxramp.data.keys import LOCAL_CACHE
from maxramp.errors import ConfigError
from maxramp.files.place import can_make
from maxramp.keys.numbers import exact, nearest_multiples, show
from maxramp.keys.section import Relations, is_object_storage, refuse
from maxramp.model.families.table import FAMILIES
from maxramp.model.keys import ModelKeys
from maxramp.model.mixers.table import MIXER_FACTS, balances_order
from maxramp.model.size import sharded_widths
from maxramp.parallel.axes import NAME_IN_KEYS, ROW_AXES
from maxramp.parallel.keys import MeshKeys
from maxramp.rampup import ladder, layout
from maxramp.rampup.keys import BatchKeys, Meshes
from maxramp.training.keys import optimizer_names


def resolve(
    config: Config, num_devices: int, num_slices: int | None = None, num_processes: int = 1
) -> Config:
    """Fills in every open key of a loaded config, by the devices, by other keys, and
    `data_cache_dir` by the disk; a ConfigError if the keys do not fit the devices. `num_slices` are
    groups of devices joined by the slow network (TPU slices; 1 elsewhere); None uses those of the
    keys, for a job in the future. `num_processes` counts as the nodes where no key gives them."""
    mesh = config.mesh.resolve(num_devices, num_slices)
    phases = _phases(config.batch, mesh, num_devices, num_slices)
    values = values_on_any_mesh(config, num_devices, num_processes)
    config = config.replace(**values, **dataclasses.asdict(mesh), phases=phases)
    config = config.replace(**_pipeline(config))
    if config.evaluation.eval_per_device_batch_size == 0:
        rows = _eval_rows_per_device(config.batch)
        config = config.replace(eval_per_device_batch_size=float(rows))
    for phase in config.batch.phase_list:
        with phase.name_errors():
            mesh = phase.keys.resolve(num_devices, num_slices)
            _check_divides(config, mesh, num_devices)
            keys = phase.keys
            check_context(config.model, mesh, keys.max_target_length // keys.rows_of_sample)
    return config


def meshes_of(config: Config) -> Meshes:
    """Returns a function from a number of devices and a sample of the run to the mesh there, None
    if the loaded config does not resolve for that number."""

    @functools.cache
    def batch_keys(num_devices: int) -> BatchKeys | None:
        try:
            return resolve(config, num_devices).batch
        except ConfigError:
            return None

    def mesh(num_devices: int, sample: int) -> MeshKeys | None:
        batch = batch_keys(num_devices)
        return batch and batch.mesh_at(num_devices, sample)

    return mesh


def values_on_any_mesh(config: Config, num_devices: int, num_processes: int) -> dict[str, Any]:
    """Returns the keys that `resolve` fills in whatever the mesh, of a loaded config; a ConfigError
    as `data_values`."""
    factor = config.data.expansion_factor_real_data
    return {
        "run_name": config.run.run_name or config.run.model_name,
        "expansion_factor_real_data": 1.0 if factor == -1 else factor,
        "mu_dtype": _mu_dtype(config),
        **data_values(config),
        **_policy_keys(config),
        **_nodes(config.batch, num_devices, num_processes),
    }


def data_values(config: Config) -> dict[str, str]:
    """Returns tokenizer_type and data_cache_dir, filled in by other keys where the loaded config
    leaves them open; a ConfigError if no key tells the tokenizer's type."""
    cache = os.path.join(config.run.base_output_directory, ".prepared")
    if not (is_object_storage(cache) or can_make(config.run.folder.parent / ".prepared")):
        cache = LOCAL_CACHE
    return {
        "tokenizer_type": config.data.type_of_tokenizer,
        "data_cache_dir": config.data.data_cache_dir or cache,
    }


def _mu_dtype(config: Config) -> str:
    """Returns mu_dtype, where it is open the dtype of what AdamW trains; "" stays without AdamW."""
    optimizer = config.optimizer
    if optimizer.mu_dtype or "adamw" not in optimizer_names(optimizer.opt_type).values():
        return optimizer.mu_dtype
    return "float32" if config.model.lora_rank else config.model.weight_dtype


def _policy_keys(config: Config) -> dict[str, Any]:
    """Returns the keys that rampup_policy decides, of a loaded config. The learning rate follows
    the batch, where its keys are "auto": with a policy by the square root from the initial batch,
    without one not at all. The policy "noise" also measures, whatever log_gradient_noise_scale
    says."""
    policy, rate = config.batch.rampup_policy, config.learning_rate
    scaling, reference = ("sqrt", "initial") if policy else ("none", "final")
    keys = {"batch_size_lr_scaling": scaling, "batch_size_lr_reference": reference}
    keys = {name: value for name, value in keys.items() if getattr(rate, name) == "auto"}
    if policy == "noise":
        keys |= {"log_gradient_noise_scale": True}
        keys |= {"rampup_decision_samples": ladder.period(config.batch)}
    return keys


def _nodes(keys: BatchKeys, num_devices: int, num_processes: int) -> dict[str, Any]:
    """Returns num_nodes and devices_per_node; an open one follows from the other, or from the
    processes."""
    nodes, per_node = keys.num_nodes, keys.devices_per_node
    if nodes == -1:
        nodes = num_processes if per_node == -1 else max(1, num_devices // per_node)
    if per_node == -1:
        per_node = max(1, num_devices // nodes)
    return {"num_nodes": nodes, "devices_per_node": per_node}


def _pipeline(config: Config) -> dict[str, int]:
    """Returns the keys of the pipeline, none open, of a config with its mesh; a ConfigError if its
    layers make no equal stages."""
    batch, model = config.batch, config.model
    stages, layers = batch.pipeline_stages, model.base_num_decoder_layers
    per_stage, repeats = model.num_layers_per_pipeline_stage, model.num_pipeline_repeats
    if stages == 1:  # a configuration may hold MaxText's defaults for pipelines
        per_stage, repeats = layers, 1
    elif repeats == -1:
        repeats = 1 if per_stage == -1 else max(1, layers // (stages * per_stage))
    if stages > 1:
        refuse(_check_pipeline(config))
        _check_equal_parts(model, stages * repeats, batch.command_line("stage"))
    if per_stage == -1:
        per_stage = layers // (stages * repeats)
    if stages * per_stage * repeats != layers:
        raise ConfigError(
            f"base_num_decoder_layers={layers} is not {count(stages, 'stage')} "
            f"({batch.command_line('stage')}) x "
            f"num_pipeline_repeats={model.num_pipeline_repeats} x "
            f"num_layers_per_pipeline_stage={model.num_layers_per_pipeline_stage}; use "
            "stages whose product with one of the two divides it, and -1 for the other"
        )
    return {
        "num_pipeline_microbatches": stages * batch.rows_multiple,
        "num_layers_per_pipeline_stage": per_stage,
        "num_pipeline_repeats": repeats,
    }


def _check_pipeline(config: Config) -> Relations:
    batch, model = config.batch, config.model
    stages, axis = batch.pipeline_stages, batch.command_line("stage")
    yield (
        model.lora_rank and model.lora_dropout,
        f"lora_dropout={model.lora_dropout:g} drops by row, and the {stages} stages of a pipeline "
        "work on other rows at once; use lora_dropout=0, or no pipeline",
    )
    yield (
        model.first_num_dense_layers,
        f"first_num_dense_layers={model.first_num_dense_layers}: the {stages} stages of a pipeline "
        f"({axis}) hold layers of one kind; use 0, or no pipeline",
    )
    reader = "log_gradient_noise_scale=True"
    if batch.rampup_policy == "noise":
        reader = "rampup_policy=noise measures the noise scale, which"
    yield (
        config.optimizer.log_gradient_noise_scale,
        f"{reader} takes gradients by rows, which a pipeline ({axis}) cuts into micro batches; "
        "leave one of them out",
    )


def _check_equal_parts(model: ModelKeys, parts: int, stages: str) -> None:
    """Refuses layers of several kinds that a pipeline (`stages` in the error) cannot cut into equal
    parts."""
    pattern = FAMILIES[model.decoder_block].pattern(model)
    period, is_whole = len(pattern.period), not (pattern.prefix or pattern.remainder)
    if period > 1 and (not is_whole or pattern.repeats % parts):
        fits = [n for n in range(2, pattern.repeats + 1) if is_whole and pattern.repeats % n == 0]
        remedy = f"use {' or '.join(map(str, fits))} parts" if fits else "use no pipeline"
        raise ConfigError(
            f"{stages}: layers of decoder_block={model.decoder_block} repeat after {period}, so "
            f"the base_num_decoder_layers={model.base_num_decoder_layers} make no {parts} parts "
            f"that are alike; {remedy}"
        )


def _phases(
    keys: BatchKeys, first: MeshKeys, num_devices: int, num_slices: int | None
) -> dict[str, dict[str, Any]]:
    """Returns `phases` with the mesh that each makes filled in; a ConfigError if the state could
    not move there. `first` is the mesh of phase 0."""
    values, before = {}, first.group("ici")
    # Only the outermost axis between slices, data, leaves the devices in order.
    between = [f"{n}={x}" for n, x in [*first.group("dcn").items()][1:] if x > 1]
    for phase in keys.phase_list[1:]:
        with phase.name_errors():
            sizes = phase.keys.resolve(num_devices, num_slices).group("ici")
            changed = {name: size for name, size in sizes.items() if size != before[name]}
            if changed and between:
                raise ConfigError(
                    f"{' '.join(f'{n}={x}' for n, x in changed.items())}: the state moves to a "
                    "mesh of the same devices in the same order, which would be another one with "
                    f"{' '.join(between)}; use dcn_data_parallelism for the slices"
                )
        resolved = {name: sizes.get(name, value) for name, value in phase.changes.items()}
        values[phase.name], before = resolved | changed, sizes
    return values


def _eval_rows_per_device(keys: BatchKeys) -> Fraction:
    """Returns as many rows as a pass has, in multiples that fit the meshes of all phases, which
    are resolved."""
    phases = [phase.keys for phase in keys.phase_list]
    multiples = [Fraction(x.rows_multiple, x.model_parallel_size) for x in phases]
    denominator = math.lcm(*(multiple.denominator for multiple in multiples))
    multiple = Fraction(math.lcm(*(int(m * denominator) for m in multiples)), denominator)
    return max(1, layout.rows_per_device_limit(keys) // multiple) * multiple


def _check_divides(config: Config, mesh: MeshKeys, num_devices: int) -> None:
    """Refuses a resolved mesh on which not all shards have equal sizes; `config` is resolved but
    for that. The ramp's stages are checked when they are known."""
    sizes, ranks = mesh.sizes, mesh.ranks
    eval_size = config.evaluation.eval_per_device_batch_size
    eval_rows, multiple = exact(eval_size) * num_devices, config.batch.rows_multiple
    if eval_rows % (ranks * multiple):
        over = " x ".join(f"{axis}={sizes[axis]}" for axis in ROW_AXES)
        shares = f" in multiples of {multiple} (a pipeline's)" if multiple > 1 else ""
        raise ConfigError(
            f"eval_per_device_batch_size={eval_size:g} is {show(eval_rows)} rows on "
            f"{count(num_devices, 'device')}, which do not divide over {over} = {ranks} groups of "
            f"devices{shares}; use a multiple of {show(Fraction(ranks * multiple, num_devices))}"
        )
    if sizes["expert"] > 1 and config.model.num_experts == 1:
        raise ConfigError(
            f"{mesh.command_line('expert')}: decoder_block={config.model.decoder_block} has no "
            "experts to put there; use ici_fsdp_parallelism, which shards all weights as well"
        )
    for axes, widths in sharded_widths(config.model).items():
        over = [axis for axis in axes if sizes[axis] > 1]
        size = math.prod(sizes[axis] for axis in over)
        for name, width in widths.items():
            if width % size:
                remedy = " or ".join(f"ici_{NAME_IN_KEYS[axis]}_parallelism" for axis in over)
                raise ConfigError(
                    f"{name}={width} does not divide over the {' and '.join(over)} axis of {size} "
                    f"devices; change it, or {remedy}"
                )


def check_context(model: ModelKeys, mesh: MeshKeys, row_length: int) -> None:
    """Raises a ConfigError if devices along `context` cannot share out the tokens of a row, or the
    heads. `mesh` is resolved."""
    size, tensor = mesh.sizes["context"], mesh.sizes["tensor"]
    axis = f"{mesh.command_line('context')} = {size}"
    if row_length % size:
        raise ConfigError(
            f"{axis} parts of a row: they do not divide its {row_length} tokens "
            f"(max_target_length or row_length); use {nearest_multiples(row_length, size)} tokens, "
            "or another size"
        )
    pattern = FAMILIES[model.decoder_block].pattern(model)
    if balances_order(pattern, model, tensor, size):
        ordered = {"lora_dropout": model.lora_rank and model.lora_dropout}
        ordered["capacity_factor"] = model.num_experts > 1 and max(0, model.capacity_factor)
        for name, value in ordered.items():
            if value:
                raise ConfigError(
                    f"{name}={value:g} depends on the order of a row's tokens, which "
                    "context_parallel_load_balance=True changes; use "
                    "context_parallel_load_balance=False"
                )
    if size > 1:
        for mixer in dict.fromkeys(layer.mixer for layer in pattern):
            refuse(MIXER_FACTS[mixer].check_context(model, mesh, row_length))
