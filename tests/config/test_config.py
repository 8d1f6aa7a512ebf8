"""Reading, checking, resolving and writing back the configuration."""

import ast
import dataclasses
import pathlib
import re
import typing

import pytest
import yaml
from conftest import BASE, ROOT

from maxramp.config.keys import PROGRAM_SECTIONS, Config
from maxramp.config.load import dump_config, load
from maxramp.config.resolve import resolve
from maxramp.errors import ConfigError
from maxramp.parallel.axes import AXES, NAME_IN_KEYS
from maxramp.rampup import RampupBatchManager

# Read by PyYAML itself: an answer that the loader under test has no part in.
BASE_VALUES = yaml.safe_load(pathlib.Path(BASE).read_text())
KEYS = set(BASE_VALUES)
MODELS = sorted(path.stem for path in (ROOT / "configs" / "models").glob("*.yml"))


def write(path: pathlib.Path, **values) -> str:
    path.write_text(yaml.safe_dump(values))
    return str(path)


def resolved(*arguments: str, devices: int = 8, slices: int = 1, processes: int = 1):
    return resolve(load([BASE, *arguments]), devices, slices, processes)


def test_defaults_are_base_yml(tmp_path):
    (tmp_path / "empty.yml").write_text("# nothing\n")
    for file in (BASE, str(tmp_path / "empty.yml")):
        assert dict(load([file]).values) == BASE_VALUES


def test_precedence(tmp_path):
    """base.yml < base_config chain < model file < command line, key by key."""
    write(tmp_path / "far.yml", steps=1, log_period=1, base_emb_dim=16, head_dim=16)
    mine = write(
        tmp_path / "mine.yml",
        **{"base_config": "far.yml", "log_period": 2, "model_name": "llama2-7b"},
        **{"base_mlp_dim": 16, "learning_rate": 0.5},
    )
    config = load([mine, "head_dim=32", "learning_rate=0.25"])
    assert config.evaluation.eval_samples == BASE_VALUES["eval_samples"]  # named nowhere
    assert config.batch.steps == 1  # only in the far file
    assert config.run.log_period == 2  # in both files
    assert config.model.base_mlp_dim == 11008  # the model file is above both
    assert config.model.head_dim == 32  # everywhere
    assert config.learning_rate.learning_rate == 0.25
    assert load([mine, "model_name=llama3-8b"]).model.vocab_size == 128256
    assert load([mine, "model_name=default"]).model.vocab_size == BASE_VALUES["vocab_size"]


def test_base_config_is_relative_to_the_file_that_names_it(tmp_path, monkeypatch):
    for folder in ("a/b", "elsewhere"):
        (tmp_path / folder).mkdir(parents=True)
    write(tmp_path / "a" / "base.yml", steps=7)
    write(tmp_path / "a" / "b" / "middle.yml", base_config="../base.yml", log_period=7)
    write(tmp_path / "top.yml", base_config="a/b/middle.yml")
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert [load(["../top.yml"]).values[name] for name in ("steps", "log_period")] == [7, 7]


def test_base_config_finds_the_shipped_files(tmp_path):
    """A file beside the naming one comes first, and configs/ after it."""
    mine = write(tmp_path / "mine.yml", base_config="configs/base.yml", steps=7)
    assert dict(load([mine]).values) == BASE_VALUES | {"steps": 7}
    (tmp_path / "configs").mkdir()
    write(tmp_path / "configs" / "base.yml", log_period=7)
    assert load([mine]).run.log_period == 7


@pytest.mark.parametrize("length", [1, 2, 3])
def test_circle_of_base_configs(tmp_path, length):
    for i in range(length):
        write(tmp_path / f"{i}.yml", base_config=f"{(i + 1) % length}.yml")
    with pytest.raises(ConfigError, match="circle"):
        load([str(tmp_path / "0.yml")])


VALUES = [
    ("learning_rate", {"3e-4": 0.0003, "3.E-4": 0.0003, ".5": 0.5, "1": 1.0}),
    ("per_device_batch_size", {"1e3": 1000.0}),
    ("global_rampup_samples", {"1e6": 10**6, "1E+6": 10**6, "1_000_000": 10**6, "1.5m": 1_500_000}),
    ("total_tokens", {"500B": 500_000_000_000}),
    ("steps", {"010": 10, "+10": 10}),
    ("eval_interval", {"-1": -1}),
    ("max_num_checkpoints_to_keep", {"3": 3, "none": None, "None": None, "null": None, "~": None}),
    *((name, {"none": ""}) for name in ("jax_cache_dir", "mu_dtype", "text_files", "run_name")),
    ("run_name", {x: x for x in ("007", "1e5", "true", "2024-01-01", "a=b", "a: b # c")}),
    ("remat_policy", {"none": "none"}),
    ("enable_tensorboard", {"False": False, "true": True}),
    ("mlp_activations", {x: ["gelu", "linear"] for x in ("[gelu,linear]", "[gelu, linear]")}),
]


@pytest.mark.parametrize(("key", "values"), VALUES)
def test_value_on_the_command_line_and_in_a_file(tmp_path, key, values):
    """In a file a name that YAML takes for another type is to be quoted."""
    path = tmp_path / "mine.yml"
    for text, expected in values.items():
        quote = "'" if key == "run_name" else ""
        path.write_text(f"{key}: {quote}{text}{quote}\n")
        for arguments in ([BASE, f"{key}={text}"], [str(path)]):
            value = load(arguments).values[key]
            assert value == expected and type(value) is type(expected)


@pytest.mark.parametrize(
    "argument, error",
    [
        *((f"steps={value}", "an integer, not text") for value in ("ten", "0x10", "1__000")),
        *(("steps=1.2345K", "an integer, not text"), ("steps=none", "an integer, not text")),
        *(("steps=true", "an integer, not a bool"), ("steps=1.5", "an integer, not a fraction")),
        *(("steps=[1]", "an integer, not a list"), ("steps=", "an integer, not nothing")),
        ("steps=1.0", "an integer without a point: 1"),
        ("learning_rate=true", "a number, not a bool"),
        ("learning_rate=fast", "a number, not text"),
        ("learning_rate=nan", "a number, not text"),  # as Python writes it
        ("learning_rate={a: 1}", "a number, not a mapping"),
        *((f"learning_rate={value}", "a finite number") for value in (".nan", "-.inf", "1e400")),
        *((f"scan_layers={value}", "True or False, not an integer") for value in (0, 1)),
        *((f"scan_layers={value}", "True or False, not text") for value in ("yes", "none")),
        ("mlp_activations=gelu,linear", "a list such as [a, b], not text"),
        ("mlp_activations={gelu: linear}", "a list such as [a, b], not a mapping"),
    ],
)
def test_only_lossless_changes_of_type(argument, error):
    name = argument.partition("=")[0]
    with pytest.raises(ConfigError, match=f"^{name}=.* must be {re.escape(error)}$"):
        load([BASE, argument])


OBJECTS = [
    *("!!python/object/apply:os.system ['touch {touched}']", "!!python/object:builtins.dict {{}}"),
    *("!!python/name:os.system", "!!binary aGk=", "!!timestamp 2001-01-01", "!mine 3", "!!int abc"),
    *("!!float abc", "!!bool abc"),
]


@pytest.mark.parametrize("text", OBJECTS)
@pytest.mark.parametrize("in_file", [False, True])
def test_no_objects_are_constructed(tmp_path, text, in_file):
    text = text.format(touched=tmp_path / "touched")
    (tmp_path / "mine.yml").write_text(f"steps: {text}\n")
    arguments = [str(tmp_path / "mine.yml")] if in_file else [BASE, f"steps={text}"]
    with pytest.raises(ConfigError, match="^.*$"):  # `.` is no newline: one line
        load(arguments)
    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 12, 96])
@pytest.mark.parametrize("axis", AXES)
def test_open_axis_is_filled_in(devices, axis):
    """Whichever axis is open takes all devices; sizes that every axis divides."""
    keys = {a: f"ici_{NAME_IN_KEYS[a]}_parallelism" for a in AXES}
    sizes = [f"{keys[a]}={-1 if a == axis else 1}" for a in AXES]
    model = ["base_emb_dim=96", "base_num_query_heads=96", "base_num_kv_heads=96"]
    model += ["base_mlp_dim=96", "vocab_size=288", "base_num_decoder_layers=96"]
    model += ["max_target_length=96"] if axis == "context" else []
    if axis == "expert":
        model += ["decoder_block=mixtral", "num_experts=96", "num_experts_per_tok=2"]
    config = resolved(*sizes, *model, devices=devices)
    sizes = {name: config.values[key] for name, key in keys.items()}
    assert sizes == dict.fromkeys(AXES, 1) | {axis: devices}
    assert config.mesh.sizes[axis] == devices


@pytest.mark.parametrize(
    "devices, slices, arguments, expected",
    [
        (8, 1, ["ici_tensor_parallelism=2"], (1, 1, 4, 1, 1, 2)),
        (8, 1, ["ici_fsdp_parallelism=2", "ici_data_parallelism=-1"], (4, 1, 2, 1, 1, 1)),
        (8, 2, [], (2, 1, 4, 1, 1, 1)),
        (16, 4, ["dcn_data_parallelism=2", "dcn_fsdp_parallelism=-1"], (2, 1, 8, 1, 1, 1)),
        (16, 4, ["ici_tensor_parallelism=2"], (4, 1, 2, 1, 1, 2)),
        (16, 2, ["dcn_pipeline_parallelism=2", "dcn_data_parallelism=1"], (1, 2, 8, 1, 1, 1)),
    ],
)
def test_mesh_sizes(devices, slices, arguments, expected):
    """Each group multiplies to its own number: dcn to the slices, ici to a slice's devices."""
    config = resolved(*arguments, devices=devices, slices=slices)
    assert tuple(config.mesh.sizes[axis] for axis in AXES) == expected


@pytest.mark.parametrize(
    "arguments, processes, expected",
    [
        ([], 1, (1, 8)),
        ([], 4, (4, 2)),
        (["num_nodes=2"], 1, (2, 4)),
        (["devices_per_node=2"], 1, (4, 2)),
    ],
)
def test_nodes(arguments, processes, expected):
    config = resolved(*arguments, processes=processes)
    assert (config.batch.num_nodes, config.batch.devices_per_node) == expected


def test_nothing_is_left_open():
    config = resolved("steps=123", "weight_dtype=bfloat16", "per_device_batch_size=16")
    nodes = config.batch.num_nodes, config.batch.devices_per_node
    assert (config.run.run_name, *nodes) == ("default", 1, 8)
    assert config.optimizer.mu_dtype == "bfloat16"
    assert config.evaluation.eval_per_device_batch_size == 16
    # Alternatives that are not used, and figures that a plan does not know.
    assert {key for key in KEYS if config.values[key] == -1} == {
        *("total_samples", "total_tokens", "base_moe_mlp_dim", "query_pre_attn_scalar"),
        *("rope_attention_factor", "local_rope_max_timescale", "capacity_factor"),
        *("n_routing_groups", "topk_routing_group", "global_batch_size", "global_batch_tokens"),
        *("micro_batch_size", "row_length", "rampup_decision_samples"),
        *("learning_rate_schedule_steps", "planned_tflops_per_device", "price_per_device_hour"),
        *("device_memory_gib", "evaluate_tasks_interval", "checkpoint_period_samples"),
        *("checkpoint_period_minutes", "checkpoint_keep_period"),
    }


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        [*("learning_rate=1e-9", "adam_eps=3e-20"), *("init_weights_seed=1e9", "log_period=7")],
        ["mlp_activations=[gelu,linear]", "max_num_checkpoints_to_keep=3", "eval_interval=-1"],
        ["text_files=~/a: b # c", "base_output_directory=", "jax_cache_dir="],
        ["model_name=llama3.2-1b", "dataset_type=synthetic"],
        # The command line overrides the model file, also when config.yml is read back.
        ["model_name=llama3.2-1b", "base_num_decoder_layers=2", "run_name=small"],
        *([f"run_name={name}"] for name in ("007", "089", "1e5", "3e-4", "true", "~")),
        *([f"run_name={name}"] for name in ("2024-01-01", "1:30", "- a", "é", " a ", "'", "[")),
    ],
)
def test_written_config_gives_itself_again(tmp_path, arguments):
    config = resolved(*arguments)
    path = tmp_path / "config.yml"
    path.write_text(dump_config(config), encoding="utf-8")
    assert list(yaml.safe_load(dump_config(config))) == list(BASE_VALUES)  # the order of base.yml
    again = resolve(load([str(path)]), 8, 1, 1)
    # The sizes are written out in place of the name of their file.
    assert again.values == dict(config.values) | {"model_name": "default"}


@pytest.mark.parametrize(
    "name", ["base_output_directory", "load_parameters_path", "load_full_state_path"]
)
@pytest.mark.parametrize("address", ["gs:/bucket/x", "gs://", "file:///x"])
def test_the_address_of_a_storage_is_no_path(name, address):
    with pytest.raises(ConfigError, match=f"^{name}={address} .*such as gs://bucket/folder"):
        load([BASE, f"{name}={address}"])


def test_config_is_frozen():
    config = resolved()
    for change in (
        lambda: setattr(config, "batch", None),
        lambda: setattr(config.batch, "steps", 1),
        lambda: setattr(config.batch, "stepz", 1),
        lambda: config.values.update({"steps": 1}),
    ):
        with pytest.raises((AttributeError, TypeError)):
            change()
    assert config.replace(steps=1).batch.steps == 1 != config.batch.steps
    with pytest.raises(AttributeError):
        _ = config.batch.stepz


@pytest.mark.parametrize("name", MODELS)
def test_model_file(name):
    """It loads, and sets only what the model is: sizes, and what its family leaves open."""
    resolved(f"model_name={name}", "dataset_type=synthetic")
    values = yaml.safe_load((ROOT / "configs" / "models" / f"{name}.yml").read_text())
    required = {
        *("head_dim", "vocab_size", "logits_via_embedding", "normalization_layer_epsilon"),
        *("rope_max_timescale", "dtype"),
    }
    open_to_families = {
        *("decoder_block", "rope_type", "rope_factor", "sliding_window_size", "attention_bias"),
        *("use_qk_norm", "num_experts", "shared_experts", "num_experts_per_tok", "norm_topk_prob"),
        *("first_num_dense_layers", "routed_bias", "routed_score_func", "routed_scaling_factor"),
        *("n_routing_groups", "topk_routing_group", "mlp_activations", "query_pre_attn_scalar"),
        *("attn_logits_soft_cap", "final_logits_soft_cap", "local_rope_max_timescale"),
        *("rope_linear_scaling_factor", "beta_fast", "beta_slow", "rope_truncate"),
        *("original_max_position_embeddings", "gdn_num_key_heads", "gdn_num_value_heads"),
        *("gdn_key_head_dim", "gdn_value_head_dim", "q_lora_rank", "kv_lora_rank", "mscale"),
        *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_attention_factor"),
        "rope_truncate",
    }
    if "kv_lora_rank" in values:  # which has widths of its own
        required.remove("head_dim")
    others = {key for key in values if not key.startswith("base_")}
    assert others - open_to_families == required


SECTIONS = {f.name: f.type for f in dataclasses.fields(Config) if f.name != "values"}


def test_base_yml_has_every_field_its_type_and_the_only_defaults():
    fields = [field for section in SECTIONS.values() for field in dataclasses.fields(section)]
    assert {field.name for field in fields} == KEYS
    for field in fields:
        assert field.default is field.default_factory is dataclasses.MISSING, field.name
        kinds = typing.get_args(field.type) if "|" in str(field.type) else (field.type,)
        kinds = tuple(typing.get_origin(kind) or kind for kind in kinds)
        assert isinstance(BASE_VALUES[field.name], kinds), field.name


def test_base_yml_gives_a_reason_for_every_key():
    lines = (ROOT / "configs" / "base.yml").read_text(encoding="utf-8").splitlines()
    keys = [line for line in lines if re.match(r"\w", line)]
    assert [key for key in keys if not re.fullmatch(r"\w+: (\S.*?) +# .+", key)] == []
    assert len(keys) == len(BASE_VALUES)


def names_in(source: str) -> set[str]:
    """Attributes that a source reads, and its texts: keys that a loop goes over."""
    nodes = list(ast.walk(ast.parse(source)))
    attributes = {n.attr for n in nodes if isinstance(n, ast.Attribute)}
    return attributes | {n.value for n in nodes if isinstance(n, ast.Constant)}


def test_every_key_is_used():
    """Read outside of the sections, for a key that is only checked does nothing."""
    apart = {"keys", "config"}  # what declares, lists and checks them
    used = set()
    for path in (ROOT / "maxramp").rglob("*.py"):
        if path.stem != "keys" and path.parent.name not in apart:
            used |= names_in(path.read_text())
    used |= {name for name in KEYS if re.match("(ici|dcn)_", name)}  # MeshKeys.group reads them
    used |= {name for name in KEYS if name.startswith("slurm_")}  # as sbatch's options
    used |= {"eval_interval", "eval_per_device_batch_size"}  # EvalKeys.due, EvalKeys.rows
    used |= {"evaluate_tasks_interval"}  # EvalKeys.tasks_are_due
    assert KEYS - used == set()


@pytest.mark.parametrize("program, other", [("train", "grpo"), ("grpo", "train")])
def test_keys_that_a_program_does_not_read_are_named_and_unset(program, other):
    """Wherever they are set; a default needs no note."""
    lines, tried = [], {"grpo_beta": 0.5, "prompt_file": "p", "eval_samples": 3}
    tried |= {"z_loss_multiplier": 0.1, "eval_interval": 7, "num_epoch": 3, "steps": 9}
    arguments = [f"{name}={value}" for name, value in tried.items()]
    values = load([BASE, *arguments, "log_eval_batches=False"], program, note=lines.append).values
    only = {"train": ("z_loss_multiplier", "eval_samples"), "grpo": ("grpo_beta", "prompt_file")}
    (line,) = lines
    assert line.startswith(f"maxramp.{program} does not read ")
    for name, value in tried.items():
        assert (f"{name}={value}" in line) == (name in only[other])
        assert values[name] == (BASE_VALUES[name] if name in only[other] else value)
    load([BASE, *arguments], "plan", note=lines.append)
    load([BASE], program, note=lines.append)
    assert len(lines) == 1


@pytest.mark.parametrize("program", ["train", "grpo"])
def test_programs_use_the_sections_that_they_read(program):
    source = (ROOT / "maxramp" / f"{program}.py").read_text()
    used = set(re.findall(r"config\.(\w+)", source)) & {f.name for f in dataclasses.fields(Config)}
    ours = PROGRAM_SECTIONS[program]
    others = {name for names in PROGRAM_SECTIONS.values() for name in names if names != ours}
    assert used and not used & others


@pytest.mark.parametrize("rows", [4, 12, 16])
@pytest.mark.parametrize("through", ["command line", "file", "model file"])
def test_a_batch_without_a_ramp_is_constant(tmp_path, rows, through):
    """base.yml's ramp is the demo's: what a MaxText user's file does not ask for is not trained."""
    arguments = {
        "command line": [BASE, f"per_device_batch_size={rows}"],
        "file": [write(tmp_path / "mine.yml", base_config="base.yml", per_device_batch_size=rows)],
        "model file": [write(tmp_path / "mine.yml", per_device_batch_size=rows, steps=50)],
    }[through]
    config = resolve(load([*arguments, "gradient_accumulation_steps=2"]), 4, 1, 1)
    stages = RampupBatchManager(config.batch).stages
    assert [stage.global_batch_size for stage in stages] == [rows * 4 * 2]
    written = tmp_path / "config.yml"
    written.write_text(dump_config(config))
    assert load([str(written)]).batch == config.batch


@pytest.mark.parametrize("key", ["enable_rampup_batch_size=True", "global_rampup_samples=3600"])
def test_a_batch_with_one_key_of_a_ramp_ramps(tmp_path, key):
    mine = write(tmp_path / "mine.yml", base_config=BASE, per_device_batch_size=16)
    config = resolve(load([mine, key]), 4, 1, 1)
    stages = RampupBatchManager(config.batch).stages
    assert [stage.global_batch_size for stage in stages] == [32, 64]
