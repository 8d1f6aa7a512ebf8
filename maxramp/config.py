"""YAML files and key=value -> one checked, frozen configuration.

`load` reads and checks everything that needs no devices; `resolve` adds what the devices decide.
All relations between keys are checked here (those of the batch keys in `rampup`, which `load`
calls), and nothing is built before they hold. What is wrong is a `ConfigError`: one line.
"""

import difflib
import functools
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import ml_collections
import yaml

from maxramp import layout, notations
from maxramp.errors import ConfigError
from maxramp.yamlfile import dump, parse, read_yaml

Config = ml_collections.FrozenConfigDict

_HERE = pathlib.Path(__file__).resolve().parent
# In a checkout the files stand beside the package, in an installed wheel inside it.
CONFIGS = next((d for d in (_HERE / "configs", _HERE.parent / "configs") if d.is_dir()), _HERE)

# Keys that may be unset, and their type where they are set.
_OPTIONAL_TEXT = ("jax_cache_dir",)  # and every text whose default is ""
_OPTIONAL = {"max_num_checkpoints_to_keep": int, "rampup_batch_size": list, "learning_rate": float}

# Groups of alternatives: family -> (keys that choose it, keys that only it uses). A file or command
# line that chooses a family takes the place of what stood below it: the keys that choose the others
# are unset, and the keys that only they use go back to their defaults.
_ALTERNATIVES = (
    {
        "maxtext": (
            ("enable_rampup_batch_size",),
            (
                *("per_device_batch_size_start", "per_device_batch_size_increment"),
                *("global_rampup_samples", "gradient_accumulation_steps"),
            ),
        ),
        "nemo": (("rampup_batch_size", "global_batch_size"), ()),
        "megatron": (("step_batch_size_schedule",), ("step_batch_size_unit",)),
    },
    {name: ((name,), ()) for name in ("steps", "total_samples", "total_tokens")},
    {name: ((name,), ()) for name in ("per_device_batch_size", "micro_batch_size")},
)

_DTYPES = ("float32", "bfloat16")
_CHOICES = {
    "hardware": ("auto", "cpu", "gpu", "tpu"),
    "dataset_type": ("text", "synthetic", "grain"),
    "grain_file_type": ("", "prepared", "arrayrecord", "parquet", "jsonl", "text", "megatron"),
    "tokenizer_type": ("bytes", "huggingface", "sentencepiece", "tiktoken"),
    "grain_packing_type": ("concat_then_split", "best_fit"),
    "decoder_block": ("llama2",),
    "dtype": _DTYPES,
    "weight_dtype": _DTYPES,
    "mu_dtype": ("", *_DTYPES),
    "opt_type": ("adamw", "sgd"),
    "lr_schedule_type": ("cosine", "wsd"),
    "wsd_decay_style": ("linear", "cosine"),
    "attention": ("autoselected", "dot_product", "cudnn_flash", "splash"),
    "profiler": ("", "xplane"),
    "remat_policy": ("full", "minimal", "none"),
    "step_batch_size_unit": ("tokens", "samples"),
    "node_schedule": ("best", "nemo", "fixed"),
    "learning_rate_by": ("samples", "steps"),
    "batch_size_lr_scaling": ("none", "sqrt", "linear"),
    "container_runtime": ("pyxis", "apptainer"),
}
_ACTIVATIONS = ("silu", "gelu", "relu", "linear")

# Inclusive lower bounds.
_AT_LEAST = {
    1: (
        *("log_period", "max_target_length", "num_epoch", "grain_prefetch_buffer_size"),
        *("min_nodes", "grain_num_threads"),
        *("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "head_dim", "base_mlp_dim"),
        *("base_num_decoder_layers", "vocab_size", "max_num_checkpoints_to_keep"),
        *("max_failed_saves", "profiler_steps", "processes_per_node"),
        *("join_timeout_seconds", "grace_seconds", "compile_topology_num_slices"),
    ),
    0: (
        *("init_weights_seed", "data_shuffle_seed", "eval_per_device_batch_size", "learning_rate"),
        *("learning_rate_final_fraction", "adam_eps", "adam_weight_decay", "loss_block_tokens"),
        *("gradient_clipping_threshold", "z_loss_multiplier", "normalization_layer_epsilon"),
        *("planned_pass_overhead", "skip_first_n_steps_for_profiler", "skip_bad_steps"),
        *("max_restarts",),
        *("grain_worker_count", "grain_prefetch_buffer_gib"),
    ),
}
_POSITIVE_OR_MINUS_ONE = (
    *("num_nodes", "devices_per_node", "eval_interval", "eval_steps"),
    *("learning_rate_schedule_steps", "steps", "total_samples", "total_tokens"),
    *("checkpoint_period", "checkpoint_period_samples", "checkpoint_keep_period"),
)
_ABOVE_ZERO_OR_MINUS_ONE = (
    *("device_memory_gib", "planned_tflops_per_device"),
    *("checkpoint_period_minutes", "hang_timeout_seconds"),
)
_FRACTIONS = ("warmup_steps_fraction", "wsd_decay_steps_fraction")  # from 0 to 1
_BELOW_ONE = ("eval_fraction", "adam_b1", "adam_b2")  # from 0 to below 1

AXES = ("data", "fsdp", "tensor")

USAGE = """usage: python -m maxramp.{program} CONFIG.yml [key=value ...]
{more}
Values are YAML: steps=100, learning_rate=3e-4, enable_rampup_batch_size=False. Every key, with its
default:

{base}"""


def load(
    arguments: Sequence[str], program: str = "train", usage: str = ""
) -> ml_collections.ConfigDict:
    """Reads CONFIG.yml and key=value arguments.

    Args:
      arguments: the command line after the program's name.
      program: the module's name, for the usage text.
      usage: what the usage text says of that program alone.

    Returns:
      A locked, type-safe ConfigDict with exactly the keys of configs/base.yml, checked as far as it
      can be without devices.

    Raises:
      ConfigError: what is wrong, in one line.
      SystemExit: after printing the help that was asked for.
    """
    base_text = (CONFIGS / "base.yml").read_text()
    if {"-h", "--help", "help"} & set(arguments):
        print(USAGE.format(program=program, more=usage, base=base_text))
        raise SystemExit(0)
    if not arguments or ("=" in arguments[0] and not os.path.isfile(arguments[0])):
        raise ConfigError(
            f"no config file given: python -m maxramp.{program} CONFIG.yml [key=value ...]"
        )
    defaults = read_yaml(CONFIGS / "base.yml")
    config = ml_collections.ConfigDict(defaults, type_safe=True, convert_dict=False)
    config.lock()
    command_line = dict(_split_argument(argument, defaults) for argument in arguments[1:])
    if len(command_line) < len(arguments) - 1:
        names = [argument.partition("=")[0] for argument in arguments[1:]]
        name = next(name for name in names if names.count(name) > 1)
        twice = [argument for argument in arguments[1:] if argument.startswith(f"{name}=")]
        raise ConfigError(f"{' and '.join(twice)}: a key is given once; keep one of them")
    for path, values in _chain(pathlib.Path(arguments[0])):
        _update(config, defaults, values, path)
    model_name = command_line.get("model_name", config.model_name)
    if model_name != "default":
        path = CONFIGS / "models" / f"{model_name}.yml"
        if len(model_name) > 100 or not path.is_file():
            names = sorted(p.stem for p in path.parent.glob("*.yml"))
            raise ConfigError(
                f"model_name={model_name} has no file configs/models/{model_name}.yml; "
                f"there are default, {', '.join(names)}"
            )
        _update(config, defaults, read_yaml(path), path)
    _update(config, defaults, command_line, None)
    _check(config, defaults)
    return config


def _chain(path: pathlib.Path) -> list[tuple[pathlib.Path, dict[str, Any]]]:
    """The files of a base_config chain, the base first. Paths are relative to the naming file."""
    files: list[tuple[pathlib.Path, dict[str, Any]]] = []
    seen = []
    while True:
        if path.resolve() in seen:
            raise ConfigError(
                f"{files[-1][0]}: base_config={path} closes a circle; name another file"
            )
        seen.append(path.resolve())
        values = read_yaml(path)
        base = values.pop("base_config", None)
        files.append((path, values))
        if base in (None, "", "none"):
            return files[::-1]
        if not isinstance(base, str):
            raise ConfigError(f"{path}: base_config={base} must be the path of a config file")
        beside = path.parent / os.path.expanduser(base)
        named_by = path
        path = beside if beside.exists() or not (CONFIGS / base).exists() else CONFIGS / base
        if not path.exists():
            raise ConfigError(f"{named_by}: base_config={base}: no such config file as {path}")


def _split_argument(argument: str, defaults: dict[str, Any]) -> tuple[str, Any]:
    name, equals, text = argument.partition("=")
    if not equals or name.startswith("-"):
        raise ConfigError(f'"{argument}" is not of the form key=value (--help lists every key)')
    if isinstance(defaults.get(name), str):
        return name, text  # as written: run_name=007 or 1e5 is a name
    try:
        return name, parse(text)
    except yaml.YAMLError:
        raise ConfigError(f"{argument}: the value is not valid YAML; quote it?") from None


def _update(
    config: ml_collections.ConfigDict,
    defaults: dict[str, Any],
    values: dict[str, Any],
    path: pathlib.Path | None,
) -> None:
    where = f"{path}: " if path else ""
    for name, value in values.items():
        if name not in defaults:
            near = difflib.get_close_matches(name, defaults, 1, 0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"{where}{name}={value} is not a known key; {hint}--help lists every key"
            )
        value = _typed(f"{where}{name}={value}", name, value, defaults[name])
        with config.ignore_type():
            config[name] = value
    for group in _ALTERNATIVES:
        _choose(config, defaults, values, group, where)


def _choose(
    config: ml_collections.ConfigDict,
    defaults: dict[str, Any],
    given: dict[str, Any],
    group: dict[str, tuple[tuple[str, ...], tuple[str, ...]]],
    where: str,
) -> None:
    """Lets the family of alternatives that a file or command line gives take its place."""
    chosen = {
        family: name
        for family, (names, _) in group.items()
        for name in names
        if name in given and config[name] != _unset(config[name])
    }
    if len(chosen) > 1:
        shown = " and ".join(f"{name}={config[name]}" for name in chosen.values())
        raise ConfigError(f"{where}{shown} say the same thing in two ways; keep one of them")
    for family, (names, used_by_it) in group.items() if chosen else ():
        if family not in chosen:
            for name in names:
                with config.ignore_type():
                    config[name] = _unset(config[name])
            for name in used_by_it:
                if name not in given:
                    config[name] = defaults[name]


def _unset(value: Any) -> Any:
    """What a key of the type of `value` is where it is not given."""
    if isinstance(value, bool):
        return False
    if isinstance(value, str):
        return ""
    return type(value)(-1) if isinstance(value, int | float) else None


def _typed(shown: str, name: str, value: Any, default: Any) -> Any:
    """`value` as the type of the key's default; only lossless changes."""
    if name in _OPTIONAL:
        if value in (None, "none", "None"):
            return None
        default = _OPTIONAL[name]()
    elif (default == "" or name in _OPTIONAL_TEXT) and value in (None, "none", "None"):
        return ""
    kind = type(default)
    if kind is float and type(value) is int and abs(value) < 10**300:
        return float(value)
    if type(value) is kind:
        if kind is float and not math.isfinite(value):
            raise ConfigError(f"{shown} must be a finite number")
        if kind is int and abs(value) >= 2**63:
            raise ConfigError(f"{shown} must be below 2^63")
        return value
    wanted = {
        bool: "True or False",
        int: "an integer",
        float: "a number",
        str: "text (in a file, quote it)",
        list: "a list such as [a, b]",
    }[kind]
    raise ConfigError(f"{shown} must be {wanted}, not {_kind_of(value)}")


def _kind_of(value: Any) -> str:
    kinds = {bool: "a bool", int: "an integer", float: "a fraction", str: "text"}
    kinds |= {list: "a list", dict: "a mapping"}
    return "nothing" if value is None else kinds.get(type(value), type(value).__name__)


def _check(config: ml_collections.ConfigDict, defaults: dict[str, Any]) -> None:
    """All relations between keys that need no devices."""
    for name in ("dtype", "weight_dtype", "mu_dtype"):
        if config[name] == "float16":
            raise ConfigError(
                f"{name}=float16 ends at 65504, which a gradient's sum over the tokens of a pass "
                f"exceeds; use {name}=bfloat16"
            )
    for name, choices in _CHOICES.items():
        if config[name] not in choices:
            listed = ", ".join(choice or '""' for choice in choices)
            raise ConfigError(f"{name}={config[name]} is not one of {listed}")
    for bound, names in _AT_LEAST.items():
        for name in names:
            if config[name] is not None and config[name] < bound:
                raise ConfigError(f"{name}={config[name]} must be {bound} or more")
    for name in _POSITIVE_OR_MINUS_ONE:
        if config[name] < 1 and config[name] != -1:
            raise ConfigError(f"{name}={config[name]} must be 1 or more, or -1 (see --help)")
    for name in _ABOVE_ZERO_OR_MINUS_ONE:
        if config[name] <= 0 and config[name] != -1:
            raise ConfigError(f"{name}={config[name]} must be above 0, or -1 (see --help)")
    for name in _FRACTIONS:
        if not 0 <= config[name] <= 1:
            raise ConfigError(f"{name}={config[name]} must lie between 0 and 1")
    for name in _BELOW_ONE:
        if not 0 <= config[name] < 1:
            raise ConfigError(f"{name}={config[name]} must be at least 0 and below 1")
    keys = notations.BatchKeys.of(config)
    notations.check(keys)
    families = _ALTERNATIVES[0]
    active = [
        (family, f"{name}={config[name]}")
        for family, (names, _) in families.items()
        for name in names
        if config[name] != _unset(config[name])
    ]
    for family, (names, used_by_it) in families.items() if active else ():
        for name in used_by_it:
            if active[0][0] != family and config[name] != defaults[name]:
                raise ConfigError(
                    f"{name}={config[name]} goes with {names[0]}, but the batch is given by "
                    f"{active[0][1]}; leave one of them out"
                )
    if config.run_name in (".", "..") or "/" in config.run_name:
        raise ConfigError(
            f"run_name={config.run_name} must name one folder below base_output_directory; "
            "put the path into base_output_directory"
        )
    if config.load_parameters_path and config.load_full_state_path:
        raise ConfigError(
            f"load_parameters_path={config.load_parameters_path} and "
            f"load_full_state_path={config.load_full_state_path}: a run starts from one of them; "
            "the second brings the weights as well"
        )
    if config.checkpoint_keep_period != -1 and config.max_num_checkpoints_to_keep is None:
        raise ConfigError(
            f"checkpoint_keep_period={config.checkpoint_keep_period} says what stays besides the "
            "newest, but max_num_checkpoints_to_keep is not given, and so all stay; give it"
        )
    for name in config.allow_changed:
        if name not in defaults and name != "corpus":
            raise ConfigError(
                f"allow_changed={list(config.allow_changed)}: {name} is neither a key nor corpus"
            )
    if config.rope_max_timescale <= 0:
        raise ConfigError(f"rope_max_timescale={config.rope_max_timescale} must be above 0")
    if config.head_dim % 2:
        raise ConfigError(f"head_dim={config.head_dim} must be even: rotary positions turn pairs")
    if config.base_num_query_heads % config.base_num_kv_heads:
        raise ConfigError(
            f"base_num_kv_heads={config.base_num_kv_heads} does not divide "
            f"base_num_query_heads={config.base_num_query_heads}: every key and value head serves "
            "equally many query heads; use a divisor"
        )
    activations = config.mlp_activations
    if len(activations) != 2 or any(name not in _ACTIVATIONS for name in activations):
        raise ConfigError(
            f"mlp_activations={activations} must be two of {', '.join(_ACTIVATIONS)}: of the "
            "gate, and of what it gates"
        )
    if config.dataset_type == "text" and config.vocab_size < 258:
        raise ConfigError(
            f"vocab_size={config.vocab_size} is too small for dataset_type=text: 256 bytes and two "
            "marks make 258; use 320 (a multiple of 64) or more"
        )
    _check_files(config)
    if config.steps == config.total_samples == config.total_tokens == -1:
        raise ConfigError(
            "steps=-1, total_samples=-1 and total_tokens=-1 leave the length of the run open; give "
            "one of them"
        )
    schedule_steps = config.learning_rate_schedule_steps
    if config.steps != -1 and schedule_steps > config.steps:
        raise ConfigError(
            f"learning_rate_schedule_steps={schedule_steps} exceeds steps={config.steps}; the "
            "schedule would never end: lower it, or use -1 for all steps"
        )
    decay = config.wsd_decay_steps_fraction if config.lr_schedule_type == "wsd" else 0
    if config.warmup_steps_fraction + decay > 1:
        raise ConfigError(
            f"warmup_steps_fraction={config.warmup_steps_fraction} and "
            f"wsd_decay_steps_fraction={decay} add up to more than 1; lower one"
        )
    for name in ("stop_at_stage_end", "stop_at_node_change"):
        if config[name] and not config.enable_checkpointing:
            raise ConfigError(
                f"{name}=True with enable_checkpointing=False would lose every stage; enable "
                "checkpointing"
            )
    for name in ("init_weights_seed", "data_shuffle_seed", "num_epoch"):
        if config[name] >= 2**32:
            raise ConfigError(f"{name}={config[name]} must be below 2^32 = {2**32}")
    _check_expansion(config.expansion_factor_real_data)
    from_fraction = config.dataset_type != "synthetic" and not config.grain_eval_files
    if config.eval_interval > 0 and from_fraction and config.eval_fraction == 0:
        raise ConfigError(
            f"eval_interval={config.eval_interval} asks for evaluation, but eval_fraction=0 "
            "holds no text out; use eval_fraction=0.02, or eval_interval=-1"
        )
    for group in ("ici", "dcn"):
        sizes = {
            f"{group}_{axis}_parallelism": config[f"{group}_{axis}_parallelism"] for axis in AXES
        }
        for name, size in sizes.items():
            if size < 1 and size != -1:
                raise ConfigError(f"{name}={size} must be 1 or more, or -1 to be filled in")
        open_names = [name for name, size in sizes.items() if size == -1]
        if len(open_names) > 1:
            raise ConfigError(
                f"{open_names[1]}=-1 and {open_names[0]}=-1: one -1 per group can be filled in; "
                "give the others"
            )


def _check_files(config: ml_collections.ConfigDict) -> None:
    for name in ("grain_train_files", "grain_eval_files"):
        if config[name] and config.dataset_type != "grain":
            raise ConfigError(
                f"{name}={config[name]} goes with dataset_type=grain, not {config.dataset_type}"
            )
    if config.dataset_type == "grain" and not config.grain_train_files:
        raise ConfigError(
            "dataset_type=grain needs grain_train_files: a folder that maxramp.prepare made, or "
            "glob,weight;glob,weight"
        )
    columns = config.train_data_columns
    if len(columns) != 1 or not isinstance(columns[0], str):
        raise ConfigError(f"train_data_columns={columns} must be one name, such as [text]")


def _check_expansion(factor: float) -> None:
    name = f"expansion_factor_real_data={factor:g}"
    if factor <= 0 and factor != -1:
        raise ConfigError(
            f"{name} must be above 0, or -1 for 1: of so many processes one reads the data"
        )
    if factor > 1 and factor % 1:
        near = f"{math.floor(factor)} or {math.ceil(factor)}"
        raise ConfigError(f"{name} must be a whole number of processes; use {near}")
    if 0 < factor < 1 and abs(round(1 / factor) * factor - 1) > 1e-6:
        times = f"{1 / factor:.4g}"
        raise ConfigError(
            f"{name} stands for a checkpoint of 1/f = {times} times as many devices, which is no "
            f"whole number; use 1/{round(1 / factor)} as a decimal, or leave it out: any "
            "checkpoint reads on"
        )


def resolve(
    config: ml_collections.ConfigDict, num_devices: int, num_slices: int, num_processes: int
) -> Config:
    """Fills in what the devices decide and checks what depends on them.

    Args:
      config: from `load`.
      num_devices: devices of the whole job.
      num_slices: groups of devices joined by the slow network (TPU slices; 1 elsewhere).
      num_processes: processes of the job.

    Returns:
      A frozen config in which no key is left open: every -1 and "" that stands for something known
      is replaced by it.

    Raises:
      ConfigError: the job has other devices than the keys say, or a batch, a stage or a weight does
        not divide over them.
    """
    config = config.copy_and_resolve_references()
    if not config.run_name:
        config.run_name = config.model_name
    if config.expansion_factor_real_data == -1:
        config.expansion_factor_real_data = 1.0
    if not config.mu_dtype:
        config.mu_dtype = config.weight_dtype
    _resolve_nodes(config, num_devices, num_processes)
    _fill_group(
        config, "dcn", num_slices, f"this job has {num_slices} slice{'s'[: num_slices > 1]}"
    )
    dcn_size = math.prod(config[f"dcn_{axis}_parallelism"] for axis in AXES)
    _fill_group(
        config,
        "ici",
        num_devices // dcn_size,
        f"this job has {num_devices} device{'s'[: num_devices > 1]}",
    )
    if config.eval_per_device_batch_size == 0:
        config.eval_per_device_batch_size = float(layout.whole_rows_per_device(config))
    _check_divides(config, num_devices)
    return ml_collections.FrozenConfigDict(config)


def _resolve_nodes(config: ml_collections.ConfigDict, num_devices: int, num_processes: int) -> None:
    if config.num_nodes == -1:
        per_node = config.devices_per_node
        config.num_nodes = num_processes if per_node == -1 else max(1, num_devices // per_node)
    if config.devices_per_node == -1:
        config.devices_per_node = max(1, num_devices // config.num_nodes)


def _fill_group(config: ml_collections.ConfigDict, group: str, wanted: int, has: str) -> None:
    """Replaces the -1 of a group of axes so that its product is `wanted`."""
    names = [f"{group}_{axis}_parallelism" for axis in AXES]
    known = math.prod(config[name] for name in names if config[name] != -1)
    open_name = next((name for name in names if config[name] == -1), None)
    if open_name and wanted and wanted % known == 0:
        config[open_name] = wanted // known
    elif open_name or known != wanted:
        sizes = " x ".join(f"{name}={config[name]}" for name in names)
        if not open_name:
            remedy = "let one of them be -1"
        elif wanted == 1:
            remedy = "give 1 or -1"
        else:
            remedy = f"give sizes whose product divides {wanted}"
        raise ConfigError(f"{sizes} makes no mesh of {wanted}, and {has}; {remedy}")


def mesh_checker(config: ml_collections.ConfigDict) -> Callable[[int], bool]:
    """Whether a loaded config resolves for a number of devices: its mesh, and its weights on it."""
    slices = math.prod(max(1, config[f"dcn_{axis}_parallelism"]) for axis in AXES)

    @functools.cache
    def usable(num_devices: int) -> bool:
        try:
            resolve(config, num_devices, slices, 1)
        except ConfigError:
            return False
        return True

    return usable


def mesh_sizes(config: Config) -> dict[str, int]:
    """Size of every mesh axis of a resolved config."""
    return {
        axis: config[f"ici_{axis}_parallelism"] * config[f"dcn_{axis}_parallelism"] for axis in AXES
    }


def _check_divides(config: ml_collections.ConfigDict, num_devices: int) -> None:
    """Rows over data x fsdp, weights over fsdp and tensor: every shard is of equal size.

    The batches of the stages are checked when it is known which of them will run.
    """
    sizes = mesh_sizes(config)
    ranks = sizes["data"] * sizes["fsdp"]
    spread = f"data={sizes['data']} x fsdp={sizes['fsdp']} = {ranks} groups of devices"
    eval_rows = notations.exact(config.eval_per_device_batch_size) * num_devices
    if eval_rows % ranks:
        raise ConfigError(
            f"eval_per_device_batch_size={config.eval_per_device_batch_size:g} is "
            f"{notations.show(eval_rows)} rows on {num_devices} device{'s'[: num_devices > 1]}, "
            f"which do not divide over {spread}; use a multiple of "
            f"{notations.show(Fraction(ranks, num_devices))}"
        )
    for axis, names in {
        "fsdp": ("base_emb_dim",),
        "tensor": ("base_num_query_heads", "base_num_kv_heads", "base_mlp_dim", "vocab_size"),
    }.items():
        for name in names:
            if config[name] % sizes[axis]:
                raise ConfigError(
                    f"{name}={config[name]} does not divide over the {axis} axis of {sizes[axis]} "
                    f"devices; change it, or ici_{axis}_parallelism"
                )


def to_yaml(config: Config) -> str:
    """The configuration as a config file that gives it again, in the order of base.yml."""
    values = config.to_dict()
    ordered = {name: values[name] for name in read_yaml(CONFIGS / "base.yml")}
    # The sizes are written out: naming their file again would let it override them.
    ordered["model_name"] = "default"
    return f"# model_name: {config.model_name}\n{dump(ordered)}"
