"""YAML files and key=value -> one checked, frozen configuration.

`load` reads and checks everything that needs no devices; `resolve` adds what the devices decide.
All relations between keys are checked here (those of the batch keys in `rampup`, which `load`
calls), and nothing is built before they hold. What is wrong is a `ConfigError`: one line.
"""

import difflib
import glob
import math
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import ml_collections
import yaml

from maxramp import rampup
from maxramp.errors import ConfigError

Config = ml_collections.FrozenConfigDict

_HERE = pathlib.Path(__file__).resolve().parent
# In a checkout the files stand beside the package, in an installed wheel inside it.
CONFIGS = next((d for d in (_HERE / "configs", _HERE.parent / "configs") if d.is_dir()), _HERE)

# Keys that may be unset, and their type where they are set.
_OPTIONAL = {"max_num_checkpoints_to_keep": int}

_DTYPES = ("float32", "bfloat16", "float16")
_CHOICES = {
    "hardware": ("auto", "cpu", "gpu", "tpu"),
    "dataset_type": ("text", "synthetic"),
    "decoder_block": ("llama2",),
    "dtype": _DTYPES,
    "weight_dtype": _DTYPES,
    "mu_dtype": ("", *_DTYPES),
    "opt_type": ("adamw", "sgd"),
    "lr_schedule_type": ("cosine", "wsd"),
    "wsd_decay_style": ("linear", "cosine"),
    "remat_policy": ("full", "minimal", "none"),
}
_ACTIVATIONS = ("silu", "gelu", "relu", "linear")

# Inclusive lower bounds.
_AT_LEAST = {
    1: (
        *("steps", "log_period", "max_target_length", "num_epoch", "grain_prefetch_buffer_size"),
        *("base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "head_dim", "base_mlp_dim"),
        *("base_num_decoder_layers", "vocab_size", "checkpoint_period"),
        *("max_num_checkpoints_to_keep",),
    ),
    0: (
        *("init_weights_seed", "data_shuffle_seed", "eval_per_device_batch_size", "learning_rate"),
        *("learning_rate_final_fraction", "adam_eps", "adam_weight_decay"),
        *("gradient_clipping_threshold", "z_loss_multiplier", "normalization_layer_epsilon"),
    ),
}
_POSITIVE_OR_MINUS_ONE = (
    *("num_nodes", "devices_per_node", "eval_interval", "eval_steps"),
    *("learning_rate_schedule_steps",),
)
_FRACTIONS = ("warmup_steps_fraction", "wsd_decay_steps_fraction")  # from 0 to 1
_BELOW_ONE = ("eval_fraction", "adam_b1", "adam_b2")  # from 0 to below 1

AXES = ("data", "fsdp", "tensor")

USAGE = """usage: python -m maxramp.{program} CONFIG.yml [key=value ...]

Values are YAML: steps=100, learning_rate=3e-4, enable_rampup_batch_size=False. Every key, with its
default:

{base}"""


class _Loader(yaml.SafeLoader):
    """Safe YAML (no object construction) with the numbers of YAML 1.2, refusing duplicate keys.

    3e-4 is a number, 1e6 an integer, 010 is ten; dates and 1:30 are text.
    """


_Loader.yaml_implicit_resolvers = {}
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("int", r"[-+]?[0-9]+(?:[eE]\+?[0-9]+)?", "-+0123456789"),
    (
        "float",
        r"[-+]?(?:[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))(?:[eE][-+]?[0-9]+)?",
        "-+.0123456789",
    ),
    ("float", r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)", "-+."),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(rf"^(?:{_pattern})$"), list(_first)
    )


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
    text = loader.construct_scalar(node)
    mantissa, _, exponent = text.lower().partition("e")
    return int(mantissa) * 10 ** int(exponent or 0) if int(exponent or 0) <= 30 else float(text)


def _construct_mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str):
            raise yaml.constructor.ConstructorError(
                problem=f"key {key!r} is not a name", problem_mark=key_node.start_mark
            )
        if key in seen:
            raise yaml.constructor.ConstructorError(
                problem=f'the key "{key}" stands twice; keep one', problem_mark=key_node.start_mark
            )
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)


def load(arguments: Sequence[str], program: str = "train") -> ml_collections.ConfigDict:
    """Reads CONFIG.yml and key=value arguments.

    Args:
      arguments: the command line after the program's name.
      program: the module's name, for the usage text.

    Returns:
      A locked, type-safe ConfigDict with exactly the keys of configs/base.yml, checked as far as it
      can be without devices.

    Raises:
      ConfigError: what is wrong, in one line.
      SystemExit: after printing the help that was asked for.
    """
    base_text = (CONFIGS / "base.yml").read_text()
    if {"-h", "--help", "help"} & set(arguments):
        print(USAGE.format(program=program, base=base_text))
        raise SystemExit(0)
    if not arguments or "=" in os.path.basename(arguments[0]):
        raise ConfigError(
            f"no config file given: python -m maxramp.{program} CONFIG.yml [key=value ...]"
        )
    defaults = _read_yaml(CONFIGS / "base.yml")
    config = ml_collections.ConfigDict(defaults, type_safe=True, convert_dict=False)
    config.lock()
    command_line = dict(_split_argument(argument, defaults) for argument in arguments[1:])
    if len(command_line) < len(arguments) - 1:
        names = [argument.partition("=")[0] for argument in arguments[1:]]
        name = next(name for name in names if names.count(name) > 1)
        raise ConfigError(f"{name} is given twice on the command line; give it once")
    for path, values in _chain(pathlib.Path(arguments[0])):
        _update(config, defaults, values, path)
    model_name = command_line.get("model_name", config.model_name)
    if model_name != "default":
        path = CONFIGS / "models" / f"{model_name}.yml"
        if not path.is_file():
            names = sorted(p.stem for p in path.parent.glob("*.yml"))
            raise ConfigError(
                f"model_name={model_name} has no file configs/models/{model_name}.yml; "
                f"there are default, {', '.join(names)}"
            )
        _update(config, defaults, _read_yaml(path), path)
    _update(config, defaults, command_line, None)
    _check(config)
    return config


def _read_yaml(path: pathlib.Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(str(path), glob.glob(f"{path.parent}/*.yml"), 1)
        raise ConfigError(
            f"{path}: no such config file" + (f"; did you mean {near[0]}?" if near else "")
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a config file: {error}") from None
    try:
        values = yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"{where}: not valid YAML: {' '.join(problem.split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a config file is a list of `key: value` lines")
    return values


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
        values = _read_yaml(path)
        base = values.pop("base_config", None)
        files.append((path, values))
        if base in (None, "", "none"):
            return files[::-1]
        if not isinstance(base, str):
            raise ConfigError(f"{path}: base_config={base} must be the path of a config file")
        beside = path.parent / os.path.expanduser(base)
        path = beside if beside.exists() or not (CONFIGS / base).exists() else CONFIGS / base


def _split_argument(argument: str, defaults: dict[str, Any]) -> tuple[str, Any]:
    name, equals, text = argument.partition("=")
    if not equals or name.startswith("-"):
        raise ConfigError(f'"{argument}" is not of the form key=value (--help lists every key)')
    if isinstance(defaults.get(name), str):
        return name, text  # as written: run_name=007 or 1e5 is a name
    try:
        return name, yaml.load(text, _Loader)
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
                f"{where}{name}={value} is not a known key; {hint}(--help lists every key)"
            )
        value = _typed(f"{where}{name}={value}", name, value, defaults[name])
        with config.ignore_type():
            config[name] = value


def _typed(shown: str, name: str, value: Any, default: Any) -> Any:
    """`value` as the type of the key's default; only lossless changes."""
    if name in _OPTIONAL:
        if value in (None, "none", "None"):
            return None
        default = _OPTIONAL[name]()
    elif default == "" and value in (None, "none", "None"):
        return ""
    kind = type(default)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is kind and (kind is not float or math.isfinite(value)):
        return value
    wanted = {
        bool: "True or False",
        int: "an integer",
        float: "a finite number",
        str: "text (in a file, quote it)",
        list: "a list such as [a, b]",
    }[kind]
    raise ConfigError(f"{shown} must be {wanted}, not {_kind_of(value)}")


def _kind_of(value: Any) -> str:
    kinds = {bool: "a bool", int: "an integer", str: "text", list: "a list", dict: "a mapping"}
    return "nothing" if value is None else kinds.get(type(value), f"a {type(value).__name__}")


def _check(config: ml_collections.ConfigDict) -> None:
    """All relations between keys that need no devices."""
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
    for name in _FRACTIONS:
        if not 0 <= config[name] <= 1:
            raise ConfigError(f"{name}={config[name]} must lie between 0 and 1")
    for name in _BELOW_ONE:
        if not 0 <= config[name] < 1:
            raise ConfigError(f"{name}={config[name]} must be at least 0 and below 1")
    rampup.check_keys(config)
    if config.run_name in (".", "..") or "/" in config.run_name:
        raise ConfigError(
            f"run_name={config.run_name} must name one folder below base_output_directory; "
            "put the path into base_output_directory"
        )
    if config.rope_max_timescale <= 0:
        raise ConfigError(f"rope_max_timescale={config.rope_max_timescale} must be above 0")
    if config.head_dim % 2:
        raise ConfigError(f"head_dim={config.head_dim} must be even: rotary positions turn pairs")
    if config.base_num_query_heads % config.base_num_kv_heads:
        raise ConfigError(
            f"base_num_kv_heads={config.base_num_kv_heads} does not divide "
            f"base_num_query_heads={config.base_num_query_heads}"
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
    schedule_steps = config.learning_rate_schedule_steps
    if schedule_steps > config.steps:
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
    if config.eval_interval > 0 and config.dataset_type == "text" and config.eval_fraction == 0:
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
    if config.learning_rate_schedule_steps == -1:
        config.learning_rate_schedule_steps = config.steps
    if config.eval_per_device_batch_size == 0:
        config.eval_per_device_batch_size = config.per_device_batch_size
    if not config.mu_dtype:
        config.mu_dtype = config.weight_dtype
    _resolve_nodes(config, num_devices, num_processes)
    _fill_group(
        config, "dcn", num_slices, f"this job has {num_slices} slice{'s'[: num_slices > 1]}"
    )
    dcn_size = math.prod(config[f"dcn_{axis}_parallelism"] for axis in AXES)
    _fill_group(config, "ici", num_devices // dcn_size, f"this job has {num_devices} devices")
    _check_divides(config)
    return ml_collections.FrozenConfigDict(config)


def _resolve_nodes(config: ml_collections.ConfigDict, num_devices: int, num_processes: int) -> None:
    if config.num_nodes == -1:
        per_node = config.devices_per_node
        config.num_nodes = num_processes if per_node == -1 else max(1, num_devices // per_node)
    if config.devices_per_node == -1:
        config.devices_per_node = max(1, num_devices // config.num_nodes)
    if config.num_nodes * config.devices_per_node != num_devices:
        raise ConfigError(
            f"num_nodes={config.num_nodes} x devices_per_node={config.devices_per_node} is "
            f"{config.num_nodes * config.devices_per_node} devices, but this job has "
            f"{num_devices}; leave both at -1 to take what there is"
        )


def _fill_group(config: ml_collections.ConfigDict, group: str, wanted: int, has: str) -> None:
    """Replaces the -1 of a group of axes so that its product is `wanted`."""
    names = [f"{group}_{axis}_parallelism" for axis in AXES]
    known = math.prod(config[name] for name in names if config[name] != -1)
    sizes = " x ".join(f"{name}={config[name]}" for name in names)
    open_name = next((name for name in names if config[name] == -1), None)
    if open_name and wanted % known == 0 and wanted:
        config[open_name] = wanted // known
    elif open_name or known != wanted:
        remedy = f"numbers whose product divides {wanted}" if open_name else "one of them as -1"
        raise ConfigError(
            f"{sizes} does not make a mesh of {wanted} per {group} group: {has}; use {remedy}"
        )


def mesh_sizes(config: Config) -> dict[str, int]:
    """Size of every mesh axis of a resolved config."""
    return {
        axis: config[f"ici_{axis}_parallelism"] * config[f"dcn_{axis}_parallelism"] for axis in AXES
    }


def _check_divides(config: ml_collections.ConfigDict) -> None:
    """Rows over data x fsdp, weights over fsdp and tensor: every shard is of equal size."""
    sizes = mesh_sizes(config)
    ranks = sizes["data"] * sizes["fsdp"]
    spread = f"data={sizes['data']} x fsdp={sizes['fsdp']} = {ranks} groups of devices"
    for stage in rampup.RampupBatchManager(config).stages:
        if stage.micro_batch_size % ranks:
            size = rampup.plain_number(stage.per_device_batch_size)
            raise ConfigError(
                f"per_device_batch_size {size} (stage {stage.index}) on {stage.devices} devices is "
                f"{stage.micro_batch_size} rows, which do not divide over {spread}; use a "
                f"multiple of {ranks / stage.devices:g}, or more ici_tensor_parallelism"
            )
    eval_rows = rampup.exact(config.eval_per_device_batch_size) * config.num_nodes
    eval_rows *= config.devices_per_node
    if eval_rows % ranks:
        raise ConfigError(
            f"eval_per_device_batch_size={config.eval_per_device_batch_size:g} is {eval_rows} "
            f"rows, which do not divide over {spread}"
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
    ordered = {name: values[name] for name in _read_yaml(CONFIGS / "base.yml")}
    return yaml.safe_dump(ordered, sort_keys=False, width=100)
