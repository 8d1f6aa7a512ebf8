"""YAML files and key=value -> one checked configuration, and back."""

import dataclasses
import difflib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import yaml

from maxramp.checkpoints.folder import step_folders
from maxramp.commandline import print_note
from maxramp.config.choices import CHOICES
from maxramp.config.keys import Config
from maxramp.errors import ConfigError
from maxramp.files.place import Place, place
from maxramp.huggingface import folder as released
from maxramp.keys import base, peers
from maxramp.keys.base import CONFIGS
from maxramp.keys.choices import find_unmade
from maxramp.keys.section import is_object_storage
from maxramp.keys.yamlfile import dump, parse, read_yaml
from maxramp.model.families.table import is_of_experts
from maxramp.objectives.table import find_objective
from maxramp.rampup import phases
from maxramp.rampup.keys import MAXTEXT_RAMP, RAMP_CHOICES
from maxramp.run.keys import PROGRAMS


@dataclasses.dataclass(frozen=True)
class Given:
    """What one config file or the command line gives."""

    where: str  # the beginning of an error about it: "FILE: ", "" for the command line
    values: dict[str, Any]  # by key of base.yml, each of the type of its default
    is_foreign: bool = False  # a file of another trainer, which lists all that it has
    # Keys of others that have to agree with the model's family, as given and with their values.
    of_family: Mapping[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)


Note = Callable[[str], None]  # takes a line about what became of another trainer's keys
_RAMP = "enable_rampup_batch_size"
# Ways to say something: of each, the keys that choose it.
_NOTATIONS = (
    (_RAMP,),  # MaxText's
    ("rampup_batch_size", "global_batch_size", "global_batch_tokens"),  # NeMo's
    ("step_batch_size_schedule",),  # Megatron's
    ("rampup_policy",),
)
_LENGTHS = (("steps",), ("total_samples",), ("total_tokens",))
_SIZES_OF_A_PASS = (("per_device_batch_size",), ("micro_batch_size",))
_BATCHES = (("global_batch_size",), ("global_batch_tokens",))
_BEGINNINGS = (("load_parameters_path",), ("load_full_state_path",))


def choose(values: MutableMapping[str, Any], given: Given) -> None:
    """Takes what a file or command line gives: keys of other ways to say the same are unset, and
    keys of choices that are unmade go back to their defaults.
    """
    before = dict(values)
    values.update(given.values)
    # Beside a state, some take the weights that it began with.
    stays_near = values["lora_rank"] or find_objective(values).has_reference
    beginnings = () if stays_near else _BEGINNINGS
    for ways in (_NOTATIONS, _LENGTHS, _BATCHES, _SIZES_OF_A_PASS, beginnings):
        chosen = {
            way: f"{name}={values[name]}"
            for way in ways
            for name in way
            if name in given.values and values[name] != base.unset(name)
        }
        if len(chosen) > 1:
            raise ConfigError(
                f"{given.where}{' and '.join(chosen.values())} say the same thing in two ways; "
                "keep one of them"
            )
        if chosen:
            others = (name for way in ways if way not in chosen for name in way)
            values.update({name: base.unset(name) for name in others if name not in given.values})
    changed = {name for name, value in before.items() if values[name] != value}
    left = find_unmade(CHOICES, changed, values)
    values.update({name: default for name, default in left.items() if name not in given.values})


def no_batch() -> dict[str, Any]:
    alone = itertools.chain(*RAMP_CHOICES.values())
    unset = {name: base.unset(name) for way in (*_NOTATIONS, *_LENGTHS) for name in way}
    return {name: base.base()[name] for name in alone} | unset | {"phases": {}}


def load(arguments: Sequence[str], program: str = "plan", note: Note = print_note) -> Config:
    """Reads CONFIG.yml and key=value arguments, checked as far as it can be without devices. A
    `program` that trains refuses a config for another, says what it does not read, and leaves that
    at its default.
    """
    *files, command_line = _read_layers(arguments, program, note)
    names = {name for given in (*files, command_line) for name in given.values}
    merged = dict(base.base())
    for given in (*files, command_line):
        choose(merged, given)
    if program in PROGRAMS:
        if (other := merged["program"]) not in ("", program):
            raise ConfigError(
                f"program={other}: this config is for maxramp.{other}; run that, or give "
                f"program={program}"
            )
        merged["program"] = program
    # A batch that is given without a ramp is constant: base.yml's ramp is the demo's alone.
    if "per_device_batch_size" in names and not {_RAMP, *MAXTEXT_RAMP} & names:
        merged[_RAMP] = False
    # A model's file decides over others, the command line over it.
    decide = (command_line,) if merged["model_name"] != "default" else (*files, command_line)
    for one in decide:
        peers.check_family(merged["decoder_block"], one.of_family)
    for one in files:
        _note_layers(one, merged, note)
    unread = Config.unread_by(merged["program"], merged)
    if unread:
        shown = ", ".join(base.shorten([f"{name}={merged[name]}" for name in unread]))
        note(f"maxramp.{merged['program']} does not read {shown}")
    merged |= unread
    own = {name for one in (*files, command_line) if not one.is_foreign for name in one.values}
    idle = find_unmade(CHOICES, merged, merged)
    merged |= {name: default for name, default in idle.items() if name in names - own}
    config = Config.from_values(merged)
    config.batch.refuse_unread(CHOICES, names & own, config.values)
    config.check()
    return config


def _note_layers(given: Given, values: Mapping[str, Any], note: Note) -> None:
    """MaxText's files of Gemma 2 count pairs of layers."""
    name = "base_num_decoder_layers"
    layers = given.values.get(name)
    if given.is_foreign and layers == values[name] and values["decoder_block"] == "gemma2":
        note(
            f"{given.where}{name}={layers}: MaxText counts pairs of layers of gemma2, maxramp "
            f"layers; if this is MaxText's number, give {name}={2 * layers}"
        )


def find_sources(arguments: Sequence[str]) -> dict[str, str]:
    """The config file that gives a key, "" for the command line; without keys that none gives."""
    layers = _read_layers(arguments, "plan", lambda line: None)
    return {name: given.where.removesuffix(": ") for given in layers for name in given.values}


def _read_layers(arguments: Sequence[str], program: str, note: Note) -> list[Given]:
    """The config's files, that of its model, and last the command line."""
    if not arguments or ("=" in arguments[0] and not os.path.isfile(arguments[0])):
        raise ConfigError("no config file given: CONFIG.yml comes first, then key=value")
    *files, command_line = read(arguments[0], arguments[1:], note)
    chosen = [g.values["model_name"] for g in (*files, command_line) if "model_name" in g.values]
    if chosen and chosen[-1] == "hf":
        if program != "grpo":  # which takes sizes and tokenizer from its first weights of any kind
            files.append(_read_folder(files, command_line))
    elif chosen and chosen[-1] != "default":
        path = CONFIGS / "models" / f"{chosen[-1]}.yml"
        if len(chosen[-1]) > 100 or not path.is_file():
            there = sorted(p.stem for p in path.parent.glob("*.yml"))
            near = ", ".join(difflib.get_close_matches(chosen[-1], there, 8, 0.4) or there[:8])
            raise ConfigError(
                f"model_name={chosen[-1]} has no file configs/models/{chosen[-1]}.yml; there are "
                f"default, hf (the sizes of load_parameters_path), and {len(there)} files there: "
                f"{near}, ..."
            )
        files += read(str(path), (), note)[:-1]
    return [*files, command_line]


def _read_folder(files: Sequence[Given], command_line: Given) -> Given:
    """A released model's sizes, and its tokenizer where text is encoded. A run has a copy."""
    given = {name: one for one in (*files, command_line) for name in one.values}
    value = {name: one.values[name] for name, one in given.items()}
    path = value.get("load_parameters_path")
    if not path:
        raise ConfigError("model_name=hf takes a model's sizes from load_parameters_path; give it")
    output = value.get("base_output_directory", base.base()["base_output_directory"])
    own = "/".join((output, value.get("run_name") or "hf", released.RUN_COPY))
    path = base.expand_path("load_parameters_path", path)
    folder = released.find_or_copy("load_parameters_path", path, own)
    if not folder:
        exported = filter(released.is_whole, step_folders(place(path) / "exported"))
        newest = max(exported, key=lambda export: int(export.name), default="")
        write = f"python -m maxramp.convert {path} --to FOLDER"
        raise ConfigError(
            f"load_parameters_path={path}: no config.json there, which model_name=hf takes the "
            f"sizes from; give a model's folder, of a run {newest or f'the one that {write} makes'}"
        )
    sizes, wanted = folder.keys, value.get("decoder_block", "")
    if is_of_experts(wanted) and not is_of_experts(sizes["decoder_block"]):
        del sizes["decoder_block"]  # every expert begins as the folder's MLP
    for name, size in sizes.items():
        said = value.get(name, size)
        is_ours = given.get(name) is not command_line and said == base.base()[name]
        grows = name == "vocab_size" and said > size
        if said != size and not (is_ours or grows):
            raise ConfigError(
                f"{given[name].where}{name}={said}: {folder.source_file(name)} makes it {size}; "
                "give that, or leave it out"
            )
    kind = value.get("dataset_type", base.base()["dataset_type"])
    if kind == "text":
        raise ConfigError(
            f"dataset_type=text trains on bytes, and the model of {folder.path} reads the tokens "
            "of its tokenizer; use dataset_type=grain grain_train_files=FILES"
        )
    keys = {}
    if kind != "synthetic" and "tokenizer_path" not in given:
        try:
            keys = folder.data_keys
        except ConfigError:
            if value.get("tokenize_train_data", True):  # token ids need no tokenizer
                raise
    keys = {name: value for name, value in keys.items() if name not in given}
    return Given(f"{folder.path}/config.json: ", sizes | keys)


def read(path: str, arguments: Sequence[str], note: Note) -> list[Given]:
    """The files that give something else than base.yml, the base first, and the command line last.
    Keys of other trainers (`peers`) become ours, are left out or are refused.
    """
    layers = [
        *((f"{file}: ", list(flatten(values.items()))) for file, values in _chain(path)),
        ("", list(flatten(map(_split, arguments)))),
    ]
    found: list[Given] = []
    foreign: dict[str, tuple[str, Any]] = {}  # as given last, on the command line or further up
    notes: list[str] = []
    in_phases = base.base()["phases"]
    for where, pairs in layers:
        taken: dict[str, tuple[str, Any]] = {}
        for name, given_value in phases.flat(pairs, in_phases):
            given = f"{where}{base.show_key(name, given_value)}"
            ours = peers.translate(name, given_value)
            if not ours:
                foreign[name] = given, given_value
                continue
            foreign.pop(name, None)
            key, value = ours
            if where and key in taken and taken[key][1] != value:
                raise ConfigError(
                    f"{taken[key][0]} and {name}={value} both give {key}; keep one of them"
                )
            if value != base.unset(key) and ours != (name, given_value):
                notes.append(f"{given}: taken as {key}={value}")
            taken[key] = given, value
        values = {key: base.cast_value(*given, key) for key, given in taken.items()}
        is_foreign = bool(where) and any(name in foreign for name, _ in pairs)
        of_family = {name: foreign[name] for name, _ in pairs if name in peers.OF_FAMILY}
        found.append(Given(where, values, is_foreign, of_family))
        in_phases = values.get("phases", in_phases)
    ignored = peers.check(foreign, [dict(pairs) for _, pairs in layers])
    if ignored:
        notes.append(f"ignored, as nothing here depends on them: {', '.join(ignored)}")
    for line in notes:
        note(line)
    return [one for one in found[:-1] if one.of_family or one.values != base.base()] + found[-1:]


def flatten(pairs: Any) -> Iterator[tuple[str, Any]]:
    """NeMo nests its keys: trainer: {max_steps: 100} is trainer.max_steps=100."""
    for name, value in pairs:
        if isinstance(value, dict) and value and name not in base.base():
            yield from flatten((f"{name}.{inner}", part) for inner, part in value.items())
        else:
            yield name, value


def _split(argument: str) -> tuple[str, Any]:
    name, equals, text = argument.partition("=")
    if not equals or name.startswith("-"):
        raise ConfigError(f'"{argument}" is not of the form key=value (--help-keys lists them)')
    name = name.lstrip("+")  # as Hydra's users write a key that a file does not have
    if isinstance(base.base().get(peers.RENAMED.get(name, name)), str):
        return name, text  # as written: run_name=007 or 1e5 is a name
    try:
        return name, parse(text)
    except yaml.YAMLError:
        raise ConfigError(f"{argument}: the value is not valid YAML; quote it?") from None


def _chain(named: str, above: tuple[Place, ...] = ()) -> list[tuple[Place, dict[str, Any]]]:
    """The base first. Paths are relative to the naming file."""
    path = place(named)
    if above and not is_object_storage(named):
        path = above[-1].parent / os.path.expanduser(named)
    ours = CONFIGS / named.removeprefix("configs/")
    if (above or named.startswith("configs/")) and not path.exists() and ours.is_file():
        path = ours
    if above and not path.exists():
        raise ConfigError(f"{above[-1]}: base_config={named}: no such config file as {path}")
    if path.resolve() in (file.resolve() for file in above):
        raise ConfigError(f"{above[-1]}: base_config={path} closes a circle; name another file")
    values = read_yaml(path)
    base_config = values.pop("base_config", None)
    if base_config in (None, "", "none"):
        return [(path, values)]
    if not isinstance(base_config, str):
        raise ConfigError(f"{path}: base_config={base_config} must be the path of a config file")
    return [*_chain(base_config, (*above, path)), (path, values)]


def dump_config(config: Config) -> str:
    ordered = {name: config.values[name] for name in base.base()}
    # The sizes are written out: naming their file again would let it override them.
    ordered["model_name"] = "default"
    return f"# model_name: {config.run.model_name}\n{dump(ordered)}"
