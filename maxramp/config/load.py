"""Loads YAML files and key=value arguments into one checked configuration, and writes it back."""

import contextlib
import dataclasses
import difflib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import yaml

from maxramp.checkpoints.folder import step_folders, why_not_maxtext
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
from maxramp.model.families.table import has_experts
from maxramp.objectives.table import find_objective
from maxramp.rampup import phases
from maxramp.rampup.keys import MAXTEXT_RAMP, RAMP_CHOICES
from maxramp.run.keys import PROGRAMS


@dataclasses.dataclass(frozen=True)
class Source:
    """The keys of one config file, or of the command line."""

    where: str  # begins an error about it: "FILE: ", "" for the command line
    values: dict[str, Any]  # by key of base.yml, each of the type of its default
    is_foreign: bool = False  # a file of another trainer, which lists all keys of that trainer
    # Another trainer's keys that nothing here has: as written, and their values.
    foreign: Mapping[str, tuple[str, Any]] = dataclasses.field(default_factory=dict)


Note = Callable[[str], None]  # shows a line about what became of another trainer's keys
MAXTEXT = CONFIGS / "maxtext.yml"  # the base of MaxText's files
_RAMP = "enable_rampup_batch_size"
# Alternatives that exclude each other, each with the keys that choose it.
_NOTATIONS = (
    (_RAMP,),  # MaxText's
    ("rampup_batch_size", "global_batch_size", "global_batch_tokens"),  # NeMo's
    ("step_batch_size_schedule",),  # Megatron's
    ("rampup_policy",),
)
_LENGTHS = (("steps",), ("total_samples",), ("total_tokens",))
_PASS_SIZES = (("per_device_batch_size",), ("micro_batch_size",))
_BATCHES = (("global_batch_size",), ("global_batch_tokens",))
_FIRST_WEIGHTS = (("load_parameters_path",), ("load_full_state_path",))


def merge_source(values: MutableMapping[str, Any], source: Source) -> None:
    """Merges a source into the `values` of all keys before it, in place. Alternatives to its keys
    are unset, and keys that no longer apply go back to their defaults. A ConfigError if it has two
    alternatives itself."""
    before = dict(values)
    values.update(source.values)
    # A state and the weights that it began from may both be needed.
    keeps_reference = values["lora_rank"] or find_objective(values).has_reference
    first_weights = () if keeps_reference else _FIRST_WEIGHTS
    for alternatives in (_NOTATIONS, _LENGTHS, _BATCHES, _PASS_SIZES, first_weights):
        chosen = {
            keys: f"{name}={values[name]}"
            for keys in alternatives
            for name in keys
            if name in source.values and values[name] != base.unset(name)
        }
        if len(chosen) > 1:
            raise ConfigError(
                f"{source.where}{' and '.join(chosen.values())} say the same thing in two ways; "
                "keep one of them"
            )
        if chosen:
            others = (name for keys in alternatives if keys not in chosen for name in keys)
            values |= {name: base.unset(name) for name in others if name not in source.values}
    changed = {name for name, value in before.items() if values[name] != value}
    defaults = find_unmade(CHOICES, changed, values)
    values |= {name: value for name, value in defaults.items() if name not in source.values}


def unset_batch() -> dict[str, Any]:
    """Returns the keys of batch and length without values, so that others can replace them."""
    options = itertools.chain(*RAMP_CHOICES.values())
    unset = {name: base.unset(name) for keys in (*_NOTATIONS, *_LENGTHS) for name in keys}
    return {name: base.base()[name] for name in options} | unset | {"phases": {}}


def load(arguments: Sequence[str], program: str = "plan", note: Note = print_note) -> Config:
    """Loads CONFIG.yml and key=value arguments, and checks what can be checked without devices. A
    `program` that trains refuses a config for another one; it names the keys that it does not read,
    and leaves them at their defaults.
    """
    sources = _read_sources(arguments, program, note)
    *files, command_line = sources
    names = {name for source in sources for name in source.values}
    merged = dict(base.base())
    for source in sources:
        merge_source(merged, source)
    if program in PROGRAMS:
        if (other := merged["program"]) not in ("", program):
            raise ConfigError(
                f"program={other}: this config is for maxramp.{other}; run that, or give "
                f"program={program}"
            )
        merged["program"] = program
    # A batch without a ramp is constant: base.yml's ramp is the demo's alone.
    if "per_device_batch_size" in names and not {_RAMP, *MAXTEXT_RAMP} & names:
        merged[_RAMP] = False
    if any(source.where == f"{MAXTEXT}: " for source in sources):
        if implied := peers.implied_by_block(merged, names):
            shown = ", ".join(f"{name}={value}" for name, value in implied.items())
            note(f"decoder_block={merged['decoder_block']} (MaxText's): taken with {shown}")
        merged |= implied
    # A model's file overrides other files, the command line overrides it.
    checked = [command_line] if merged["model_name"] != "default" else sources
    foreign = {name: key for source in checked for name, key in source.foreign.items()}
    peers.check_family(merged["decoder_block"], foreign)
    for source in files:
        _note_layers(source, merged, note)
    unread = Config.unread_by(merged["program"], merged)
    if unread:
        shown = ", ".join(base.shorten([f"{name}={merged[name]}" for name in unread]))
        note(f"maxramp.{merged['program']} does not read {shown}")
    merged |= unread
    # Another trainer's file lists keys that nothing reads; in ours they are mistakes.
    own = {name for source in sources if not source.is_foreign for name in source.values}
    idle = find_unmade(CHOICES, merged, merged)
    merged |= {name: default for name, default in idle.items() if name in names - own}
    if merged["dataset_type"] == "text" and "tokenizer_type" not in own:
        merged["tokenizer_type"] = base.base()["tokenizer_type"]  # text is bytes
    with _name_files(sources):
        config = Config.from_values(merged)
        config.batch.refuse_unread_by_phase(CHOICES, own, config.values)
        config.check()
    _note_base(sources, merged, note)
    return config


@contextlib.contextmanager
def _name_files(sources: Sequence[Source]) -> Iterator[None]:
    """Begins the error about a key that a file gives with that file."""
    try:
        yield
    except ConfigError as error:
        name = str(error).partition("=")[0]
        where = [source.where for source in sources if name in source.values]
        raise ConfigError(f"{''.join(where[-1:])}{error}") from None


def _note_base(sources: Sequence[Source], values: Mapping[str, Any], note: Note) -> None:
    """Names the values that a MaxText file leaves to MaxText's base.yml."""
    base_file = next((source for source in sources if source.where == f"{MAXTEXT}: "), None)
    others = {name for source in sources if source is not base_file for name in source.values}
    others |= set() if values[_RAMP] else {*MAXTEXT_RAMP}
    left_out = {} if base_file is None else base_file.values
    shown = [f"{k}={v}" for k, v in left_out.items() if k not in others and values[k] == v]
    data = "" if "dataset_type" in others else "; dataset_type=text, as its tfds is not read here"
    if shown:
        note(f"left out, and as in MaxText's base.yml: {', '.join(shown)}{data}")


def _note_layers(source: Source, values: Mapping[str, Any], note: Note) -> None:
    """Warns about MaxText's files of Gemma 2, which count pairs of layers."""
    name = "base_num_decoder_layers"
    layers = source.values.get(name)
    if source.is_foreign and layers == values[name] and values["decoder_block"] == "gemma2":
        note(
            f"{source.where}{name}={layers}: MaxText counts pairs of layers of gemma2, maxramp "
            f"layers; if this is MaxText's number, give {name}={2 * layers}"
        )


def find_sources(arguments: Sequence[str]) -> dict[str, str]:
    """Returns the config file that sets each key, "" for the command line; without keys that none
    sets."""
    sources = _read_sources(arguments, "plan", lambda line: None)
    return {name: source.where.removesuffix(": ") for source in sources for name in source.values}


def _read_sources(arguments: Sequence[str], program: str, note: Note) -> list[Source]:
    """Reads the config's files, that of its model, and last the command line. `program` is the
    module that reads it, such as train. A ConfigError without a file."""
    if not arguments or ("=" in arguments[0] and not os.path.isfile(arguments[0])):
        raise ConfigError("no config file given: CONFIG.yml comes first, then key=value")
    *files, command_line = read(arguments[0], arguments[1:], note)
    model, overrides = "default", ("", False)
    for source in (*files, command_line):
        model = source.values.get("model_name", model)
        overrides = source.foreign.get(peers.OVERRIDES_MODEL, overrides)
    if model == "hf":
        if program != "grpo":  # it takes sizes and tokenizer from its first weights, of any kind
            files.append(_read_folder(files, command_line))
    elif model != "default":
        path = CONFIGS / "models" / f"{model}.yml"
        if len(model) > 100 or not path.is_file():
            models = sorted(p.stem for p in path.parent.glob("*.yml"))
            near = ", ".join(difflib.get_close_matches(model, models, 8, 0.4) or models[:8])
            raise ConfigError(
                f"model_name={model} has no file configs/models/{model}.yml; there are "
                f"default, hf (the sizes of load_parameters_path), and {len(models)} files there: "
                f"{near}, ..."
            )
        models = read(str(path), (), note)[:-1]
        if overrides[1] is True:
            return [*files[:-1], *models, *files[-1:], command_line]
        _note_overridden(model, files, models, command_line, note)
        files += models
    return [*files, command_line]


def _note_overridden(
    model: str, files: Sequence[Source], models: Sequence[Source], last: Source, note: Note
) -> None:
    """Names the values of a user's files that those of the model override."""
    sizes = {name: size for source in models for name, size in source.values.items()}
    packaged = [file for file in files if file.where.startswith(str(CONFIGS))]
    defaults = [base.base(), *(file.values for file in packaged)]  # a copy of these asks for none
    lost = {
        name: f"{name}={value}"
        for file in files
        for name, value in file.values.items()
        if name in sizes.keys() - last.values.keys() and file not in packaged
        if value != sizes[name] and all(value != values.get(name) for values in defaults)
    }
    if lost:
        note(
            f"model_name={model} overrides {', '.join(lost.values())}; give them on the command "
            f"line, or {peers.OVERRIDES_MODEL}=True"
        )


def _read_folder(files: Sequence[Source], command_line: Source) -> Source:
    """Reads a released model's sizes, and its tokenizer unless the data is synthetic, from its
    folder, the hub or the copy that a run keeps; refuses keys that contradict them. The result goes
    behind the files, whose keys it overrides, but for a vocabulary that they enlarge."""
    sources = {name: source for source in (*files, command_line) for name in source.values}
    values = {name: source.values[name] for name, source in sources.items()}
    path = values.get("load_parameters_path")
    if not path:
        raise ConfigError("model_name=hf takes a model's sizes from load_parameters_path; give it")
    output = values.get("base_output_directory", base.base()["base_output_directory"])
    output = base.expand_path("base_output_directory", output)
    own = "/".join((output, values.get("run_name") or "hf", released.RUN_COPY))
    path = base.expand_path("load_parameters_path", path)
    if why := why_not_maxtext(place(path)):
        raise ConfigError(f"load_parameters_path={path}: {why}")
    folder = released.find_or_copy("load_parameters_path", path, own)
    if not folder:
        exported = filter(released.is_whole, step_folders(place(path) / "exported"))
        newest = max(exported, key=lambda export: int(export.name), default="")
        write = f"python -m maxramp.convert {path} --to FOLDER"
        raise ConfigError(
            f"load_parameters_path={path}: no config.json there, which model_name=hf takes the "
            f"sizes from; give a model's folder, of a run {newest or f'the one that {write} makes'}"
        )
    sizes, block = folder.keys, values.get("decoder_block", "")
    if has_experts(block) and not has_experts(sizes["decoder_block"]):
        del sizes["decoder_block"]  # every expert begins as the folder's MLP
    for name, size in list(sizes.items()):
        value = values.get(name, size)
        is_default = sources.get(name) is not command_line and value == base.base()[name]
        if name == "vocab_size" and value > size and not is_default:
            del sizes[name]  # the folder's embedding grows
        elif value != size and not is_default:
            raise ConfigError(
                f"{sources[name].where}{name}={value}: {folder.source_file(name)} makes it {size}; "
                "give that, or leave it out"
            )
    kind = values.get("dataset_type", base.base()["dataset_type"])
    if kind == "text":
        raise ConfigError(
            f"dataset_type=text trains on bytes, and the model of {folder.path} reads the tokens "
            "of its tokenizer; use dataset_type=grain grain_train_files=FILES"
        )
    keys = {}
    if kind != "synthetic" and "tokenizer_path" not in sources:
        try:
            keys = folder.data_keys
        except ConfigError:
            if values.get("tokenize_train_data", True):  # token ids need no tokenizer
                raise
    keys = {name: value for name, value in keys.items() if name not in sources}
    return Source(f"{folder.path}/config.json: ", sizes | keys)


def read(path: str, arguments: Sequence[str], note: Note) -> list[Source]:
    """Returns the files (all but those equal to base.yml), a file's base before it, and last the
    command line, even an empty one. Other trainers' keys (`peers`) become ours, are left out, or
    are refused.
    """
    layers = [
        *((f"{file}: ", list(flatten(values.items()))) for file, values in _chain(path)),
        ("", list(flatten(map(_split, arguments)))),
    ]
    sources: list[Source] = []
    foreign: dict[str, tuple[str, Any]] = {}  # as last written, and the value
    notes: list[str] = []
    phases_before = base.base()["phases"]
    for where, pairs in layers:
        written: dict[str, tuple[str, Any]] = {}  # by our key, as written, and our value
        for name, their_value in phases.flat(pairs, phases_before):
            text = f"{where}{base.show_key(name, their_value)}"
            translated = peers.translate(name, their_value)
            if not translated:
                foreign[name] = text, their_value
                continue
            foreign.pop(name, None)
            key, value = translated
            if where and key in written and written[key][1] != value:
                raise ConfigError(
                    f"{written[key][0]} and {name}={value} both give {key}; keep one of them"
                )
            if value != base.unset(key) and translated != (name, their_value):
                notes.append(f"{text}: taken as {key}={value}")
            written[key] = text, value
        values = {key: base.cast_value(*pair, key) for key, pair in written.items()}
        others = {name: foreign[name] for name, _ in pairs if name in foreign}
        is_foreign = bool(where and others) or where == f"{MAXTEXT}: "
        sources.append(Source(where, values, is_foreign, others))
        phases_before = values.get("phases", phases_before)
    for line in (*notes, *peers.check(foreign, [dict(pairs) for _, pairs in layers])):
        note(line)
    *files, command_line = sources
    changing = [file for file in files if file.foreign or file.values != base.base()]
    return [*changing, command_line]


def flatten(pairs: Any) -> Iterator[tuple[str, Any]]:
    """Flattens NeMo's nested keys: trainer: {max_steps: 100} is trainer.max_steps=100."""
    for name, value in pairs:
        if isinstance(value, dict) and value and name not in base.base():
            yield from flatten((f"{name}.{inner}", part) for inner, part in value.items())
        else:
            yield name, value


def _split(argument: str) -> tuple[str, Any]:
    """Splits key=value, by our name's type: texts stay as written, other values are YAML; a
    ConfigError for another form."""
    name, equals, text = argument.partition("=")
    if not equals or name.startswith("-"):
        raise ConfigError(f'"{argument}" is not of the form key=value (--help-keys lists them)')
    name = name.lstrip("+")  # Hydra's notation for a key that a file does not have
    if isinstance(base.base().get(peers.RENAMED.get(name, name)), str):
        return name, text  # as written: run_name=007 or 1e5 is a name
    try:
        return name, parse(text)
    except yaml.YAMLError:
        raise ConfigError(f"{argument}: the value is not valid YAML; quote it?") from None


def _chain(named: str, above: tuple[Place, ...] = ()) -> list[tuple[Place, dict[str, Any]]]:
    """Reads a config file and its bases, the base first; paths are relative to the naming file. A
    MaxText file without its base.yml has MAXTEXT as its base. A ConfigError if a file is missing,
    or names itself or one `above`, those that led to it."""
    path = place(named)
    if above and not is_object_storage(named):
        path = above[-1].parent / os.path.expanduser(named)
    packaged = CONFIGS / named.removeprefix("configs/")
    if above and not named.startswith("configs/") and place(named).name == "base.yml":
        packaged = MAXTEXT
    if (above or named.startswith("configs/")) and not path.exists() and packaged.is_file():
        path = packaged
    if above and not path.exists():
        raise ConfigError(f"{above[-1]}: base_config={named}: no such config file as {path}")
    if path.resolve() in (file.resolve() for file in above):
        raise ConfigError(f"{above[-1]}: base_config={path} closes a circle; name another file")
    values = read_yaml(path)
    base_config = values.pop("base_config", None)
    if base_config in (None, "", "none"):
        if not any(map(peers.is_of_maxtext, values)):
            return [(path, values)]
        base_config = str(MAXTEXT)
    if not isinstance(base_config, str):
        raise ConfigError(f"{path}: base_config={base_config} must be the path of a config file")
    return [*_chain(base_config, (*above, path)), (path, values)]


def dump_config(config: Config) -> str:
    """Returns the text of config.yml: every key with its value, in the order of base.yml; it loads
    as any file."""
    ordered = {name: config.values[name] for name in base.base()}
    # The sizes are written out: naming their file again would let it override them.
    ordered["model_name"] = "default"
    return f"# model_name: {config.run.model_name}\n{dump(ordered)}"
