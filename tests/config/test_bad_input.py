"""What a person can get wrong: one line that says what, and nothing else.

Most cases run in this process; `STARTED` are processes, of every way to a refusal.
"""

import dataclasses
import glob
import pathlib
import resource

import pytest
from conftest import BASE, TINY, command, environment
from forked import run_forked
from in_process import run_here

CPU_SECONDS = 5  # of processor time after the imports; other work does not lengthen it

# Eight rows a step, of data that needs no files: a case adds what it is about.
PLAIN = dict(
    argument.split("=", 1)
    for argument in (
        *TINY,
        "enable_rampup_batch_size=False",
        "per_device_batch_size=8",
        "steps=2",
        "dataset_type=synthetic",
        "eval_interval=-1",
        "jax_cache_dir=",
    )
)
# 8, 16, 24, 32 rows per device.
RAMP = ["enable_rampup_batch_size=True", "per_device_batch_size=32"]
RAMP += ["per_device_batch_size_start=8", "per_device_batch_size_increment=8"]

FILES = {
    "tabs.yml": "steps: 3\n\tlog_period: 3\n",
    "bracket.yml": "steps: 3\nmlp_activations: [silu, linear\n",
    "list.yml": "- steps: 3\n- log_period: 3\n",
    "word.yml": "steps\n",
    "duplicate.yml": "steps: 3\nlog_period: 3\nsteps: 4\n",
    "type.yml": "steps: three\n",
    "number_name.yml": "run_name: 007\n",
    "number_key.yml": "3: steps\n",
    "documents.yml": "steps: 3\n---\nsteps: 4\n",
    "latin.yml": b"run_name: caf\xe9\n",
    "binary.yml": b"\x00\x01\x02",
    "far_base.yml": "base_config: nowhere/far.yml\n",
    "base_number.yml": "base_config: 3\n",
    "base_folder.yml": "base_config: empty_folder\n",
    "a_file": "in the way of a folder",
    "empty/a.txt": "",
    "empty/b.txt": "",
    "binary/model.bin": b"text\x00",
    "short.txt": "x" * 14,  # with its marks 16 tokens, and a row takes 17
    "some.txt": "x" * 9998,  # 10000 tokens, 200 of them held out: (9800 - 1) // 16 = 612 rows
    "hidden/.only": "x" * 9998,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line, and what its line must name. {files} is the folder that holds FILES."""

    arguments: list[str]
    names: tuple[str, ...]
    devices: int = 1
    module: str = "train"
    environment: dict[str, str] = dataclasses.field(default_factory=dict)


def file(name: str, *names: str) -> Case:
    """A config file alone; without `names` the line names it."""
    return Case([f"{{files}}/{name}"], names or (name,))


def keys(arguments: str, *names: str, **more) -> Case:
    """PLAIN with some keys changed; without `names` the line names every one of them as written."""
    changes = arguments.split()
    changed = {argument.partition("=")[0] for argument in changes}
    kept = [f"{key}={value}" for key, value in PLAIN.items() if key not in changed]
    return Case([BASE, *kept, *changes], names or tuple(changes), **more)


def ramp(arguments: str, *names: str, **more) -> Case:
    """PLAIN and RAMP with some keys changed."""
    changed = {argument.partition("=")[0] for argument in arguments.split()}
    kept = [argument for argument in RAMP if argument.partition("=")[0] not in changed]
    return keys(" ".join([*kept, arguments]), *(names or arguments.split()), **more)


def nemo(arguments: str, *names: str, **more) -> Case:
    """PLAIN without a per-device batch, with some keys changed."""
    case = keys(arguments, *names, **more)
    left_out = ("per_device_batch_size=", "enable_rampup_batch_size=")
    case.arguments[:] = [a for a in case.arguments if not a.startswith(left_out)]
    return case


def plan(arguments: str, *names: str) -> Case:
    """A command line of maxramp.plan."""
    return dataclasses.replace(nemo(arguments, *names), module="plan")


def text(path: str, *names: str, more: str = "") -> Case:
    """PLAIN on text files."""
    return keys(f"dataset_type=text text_files={{files}}/{path} {more}", path, *names)


CASES = {
    # The config file.
    "no arguments": Case([], ("no config file", "CONFIG.yml")),
    "no config file": Case(["steps=3"], ("no config file", "CONFIG.yml")),
    "missing file": file("nothing.yml", "nothing.yml", "no such config file"),
    "missing file, near": file("duplicat.yml", "duplicat.yml", "did you mean", "duplicate.yml"),
    "folder": file("empty_folder", "empty_folder", "irectory"),
    "tabs": file("tabs.yml", "tabs.yml:2", "tab"),
    "bracket": file("bracket.yml", "bracket.yml:"),
    "list": file("list.yml", "list.yml", "key: value"),
    "word": file("word.yml", "word.yml", "key: value"),
    "duplicate key in a file": file("duplicate.yml", "duplicate.yml:3", '"steps"', "twice"),
    "wrong type in a file": file("type.yml", "type.yml", "steps=three", "an integer"),
    "number as a name in a file": file(
        "number_name.yml", "number_name.yml", "run_name", "quote it"
    ),
    "key that is a number": file("number_key.yml", "number_key.yml:1", "3"),
    "two documents": file("documents.yml", "documents.yml:2", "document"),
    "not UTF-8": file("latin.yml", "latin.yml", "utf-8"),
    "not text": file("binary.yml"),
    "missing base_config": file("far_base.yml", "nowhere/far.yml", "no such config file"),
    "base_config is a number": file("base_number.yml", "base_number.yml", "base_config=3"),
    "base_config is a folder": file("base_folder.yml", "empty_folder", "irectory"),
    "unknown model": keys("model_name=llama9-1t", "model_name=llama9-1t", "llama3-8b", "default"),
    # The command line.
    "no equals sign": keys("steps", '"steps"', "key=value"),
    "double dash": keys("--log_period=3", '"--log_period=3"', "key=value"),
    "second config file": keys("configs/other.yml", "configs/other.yml", "key=value"),
    "unknown key": keys("learning_rat=3", "learning_rat=3", "did you mean learning_rate?"),
    "MaxText's keys": keys(
        "use_random_routing=True ici_sequence_parallelism=2 dcn_sequence_parallelism=4",
        "use_random_routing=True (MaxText's): not supported",
        "ici_sequence_parallelism=2, dcn_sequence_parallelism=4 (MaxText's)",
    ),
    "broken value": keys("mlp_activations=[silu"),
    "yarn, no betas between": keys(
        "rope_type=yarn beta_fast=0.5", "beta_fast=0.5", "above beta_slow=1.0"
    ),
    "yarn, turns of one speed": keys(
        "rope_type=yarn rope_max_timescale=1", "rope_max_timescale=1", "more than 1"
    ),
    # Single keys out of range.
    "seed of the weights": keys(
        "init_weights_seed=1e20", "init_weights_seed=100000000000000000000"
    ),
    "seed of the data": keys("data_shuffle_seed=1e20", "data_shuffle_seed=100000000000000000000"),
    "too many epochs": keys("num_epoch=1e12", "num_epoch=1000000000000"),
    "slash in run_name": keys("run_name=a/b", "run_name=a/b", "base_output_directory"),
    "run_name is dots": keys("run_name=.."),
    "no steps": keys("steps=0"),
    "no learning rate": keys("learning_rate=none", "learning_rate=none", "give learning_rate"),
    "negative learning rate": keys("learning_rate=-0.1"),
    "Adam's b2 is one": keys("adam_b2=1", "adam_b2=1"),
    "warmup above one": keys("warmup_steps_fraction=1.5"),
    "eval_samples": keys("eval_samples=0"),
    "dtype": keys("dtype=int8", "dtype=int8", "bfloat16"),
    "float16": keys("dtype=float16", "dtype=float16", "65504", "use dtype=bfloat16"),
    "weights in float16": keys("weight_dtype=float16", "use weight_dtype=bfloat16"),
    "schedule": keys("lr_schedule_type=linear", "lr_schedule_type=linear", "cosine, wsd"),
    "remat": keys("remat_policy=some", "remat_policy=some", "minimal"),
    "dataset": keys("dataset_type=tfds", "dataset_type=tfds", "text, synthetic"),
    "hardware": keys("hardware=cuda", "hardware=cuda", "gpu"),
    "one activation": keys("mlp_activations=[silu]", "mlp_activations=['silu']", "two"),
    "unknown activation": keys("mlp_activations=[tanh,linear]", "tanh", "silu, gelu"),
    "odd head_dim": keys("head_dim=7", "head_dim=7", "even"),
    "rope": keys("rope_max_timescale=0", "rope_max_timescale=0"),
    "key/value heads": keys("base_num_kv_heads=3", "base_num_kv_heads=3", "base_num_query_heads=8"),
    "vocabulary below bytes": keys("vocab_size=257 dataset_type=text", "vocab_size=257", "258"),
    "schedule longer than run": keys("learning_rate_schedule_steps=3 steps=2"),
    "warmup and decay": keys(
        "lr_schedule_type=wsd warmup_steps_fraction=0.6 wsd_decay_steps_fraction=0.5",
        "warmup_steps_fraction=0.6",
        "wsd_decay_steps_fraction=0.5",
    ),
    "nothing held out": keys(
        "eval_interval=1 eval_fraction=0 dataset_type=text", "eval_fraction=0"
    ),
    # The batch and its ramp.
    "no rows": keys("per_device_batch_size=0"),
    "negative rows": keys("per_device_batch_size=-8"),
    "no accumulation steps": keys("gradient_accumulation_steps=0"),
    "batch below its start": ramp(
        "per_device_batch_size=4", "per_device_batch_size=4", "per_device_batch_size_start=8"
    ),
    "batch equal to its start": ramp(
        "per_device_batch_size_start=32",
        "per_device_batch_size_start=32",
        "enable_rampup_batch_size",
    ),
    "start 0": ramp("per_device_batch_size_start=0"),
    "increment 0": ramp("per_device_batch_size_increment=0"),
    "increment negative": ramp("per_device_batch_size_increment=-8"),
    "increment does not divide": ramp(
        "per_device_batch_size_increment=7",
        "per_device_batch_size_increment=7",
        "per_device_batch_size - per_device_batch_size_start = 24",
        "use 6 or 8",
    ),
    "fraction does not divide": ramp(
        "per_device_batch_size=1 per_device_batch_size_start=0.5 "
        "per_device_batch_size_increment=0.3",
        "per_device_batch_size_increment=0.3",
        "per_device_batch_size_start = 0.5",
    ),
    "ramp over no samples": ramp("global_rampup_samples=0"),
    "ramp over negative samples": ramp("global_rampup_samples=-60"),
    "no whole number of rows": keys(
        "per_device_batch_size=0.3", "per_device_batch_size 0.3", "2.4 rows", "0.125", devices=8
    ),
    "stage without whole rows": ramp(
        "per_device_batch_size=2 per_device_batch_size_start=0.5 "
        "per_device_batch_size_increment=0.5",
        "per_device_batch_size 0.5",
        "0.5 rows",
    ),
    "first stage does not divide over the mesh": ramp(
        "per_device_batch_size=1 per_device_batch_size_start=0.5 "
        "per_device_batch_size_increment=0.5",
        "stage 0",
        "4 rows",
        "fsdp = 8",
        devices=8,
    ),
    "second stage does not divide over the mesh": ramp(
        "per_device_batch_size=2 per_device_batch_size_start=1 per_device_batch_size_increment=0.5",
        "stage 1",
        "12 rows",
        "fsdp = 8",
        devices=8,
    ),
    "constant batch does not divide over the mesh": keys(
        "per_device_batch_size=0.5 ici_fsdp_parallelism=4 ici_data_parallelism=-1",
        "per_device_batch_size 0.5",
        "4 rows",
        "data x fsdp = 8",
        devices=8,
    ),
    "evaluation batch": keys(
        "eval_per_device_batch_size=1.5", "eval_per_device_batch_size=1.5", "12 rows", devices=8
    ),
    "evaluation batch without whole rows": keys("eval_per_device_batch_size=0.3"),
    # The mesh.
    "mesh of other devices": keys(
        "ici_fsdp_parallelism=4", "ici_fsdp_parallelism=4", "8 devices", devices=8
    ),
    "mesh that cannot be filled in": keys(
        "ici_tensor_parallelism=3", "ici_tensor_parallelism=3", "8 devices", devices=8
    ),
    "two open axes": keys("ici_data_parallelism=-1 ici_fsdp_parallelism=-1"),
    "axis of nothing": keys("ici_tensor_parallelism=0"),
    "negative axis": keys("dcn_fsdp_parallelism=-2"),
    "slices that are not there": keys(
        "dcn_data_parallelism=2", "dcn_data_parallelism=2", "1 slice"
    ),
    "slices that cannot be filled in": keys("dcn_tensor_parallelism=2"),
    # The pipeline; more in tests/model/test_pipeline.py.
    "a stage of the ramp with too few rows for the pipeline": ramp(
        "per_device_batch_size=4 per_device_batch_size_start=2 per_device_batch_size_increment=1 "
        "ici_pipeline_parallelism=2 num_pipeline_microbatches=4",
        *("per_device_batch_size 3 (stage 1)", "multiples of 2 rows", "2 or 4"),
        devices=8,
    ),
    "no nodes": keys("num_nodes=0"),
    "query heads over tensor": keys(
        "ici_tensor_parallelism=8 base_num_query_heads=4 base_num_kv_heads=4",
        "base_num_query_heads=4",
        "tensor",
        "8",
        devices=8,
    ),
    "key/value heads over tensor": keys(
        "ici_tensor_parallelism=8 base_num_kv_heads=4", "base_num_kv_heads=4", "tensor", devices=8
    ),
    "vocabulary over tensor": keys(
        "ici_tensor_parallelism=8 vocab_size=260", "vocab_size=260", "tensor", devices=8
    ),
    "model width over fsdp": keys("base_emb_dim=36", "base_emb_dim=36", "fsdp", devices=8),
    "hardware that is not there, gpu": keys("hardware=gpu", "hardware=gpu", "hardware=auto"),
    "hardware that is not there, tpu": keys("hardware=tpu", "hardware=tpu", "hardware=auto"),
    "half a job": keys(
        "log_period=3",
        "MAXRAMP_COORDINATOR=localhost:1234",
        "MAXRAMP_NUM_PROCESSES=",
        "all three",
        environment={"MAXRAMP_COORDINATOR": "localhost:1234"},
    ),
    "process that the job does not have": keys(
        "log_period=3",
        "MAXRAMP_NUM_PROCESSES=1",
        "MAXRAMP_PROCESS_ID=5",
        environment={"MAXRAMP_COORDINATOR": "localhost:1234"}
        | {"MAXRAMP_NUM_PROCESSES": "1", "MAXRAMP_PROCESS_ID": "5"},
    ),
    "coordinator without a port": keys(
        "log_period=3",
        "MAXRAMP_COORDINATOR=localhost",
        "host:port",
        environment={"MAXRAMP_COORDINATOR": "localhost"}
        | {"MAXRAMP_NUM_PROCESSES": "1", "MAXRAMP_PROCESS_ID": "0"},
    ),
    # The data.
    "missing text_files": text("no/such", "no such file"),
    "empty glob": text("*.rst", "no such file"),
    "empty folder": text("empty_folder", "no such file"),
    "folder of hidden files": text("hidden", "no such file"),
    "empty files": keys(
        "dataset_type=text text_files={files}/empty/*.txt", "empty/a.txt", "2 files"
    ),
    "binary file": text("binary", "model.bin", "zero byte at 4"),
    "text shorter than a row": text("short.txt", "16 tokens", "17", more="eval_fraction=0"),
    "no rows held out": text(
        "some.txt",
        "held-out",
        "10 tokens",
        "17",
        "eval_fraction",
        more="eval_interval=1 eval_fraction=0.001",
    ),
    # 100 steps of 8 rows; ceil(800 / 612) = 2 and floor(612 / 8) = 76.
    "more rows than there are": keys(
        "dataset_type=text text_files={files}/some.txt steps=100",
        "steps=100",
        "800 rows",
        "612",
        "num_epoch=2",
        "steps=76",
    ),
    # Where the output goes.
    "file in the way of the output": keys("base_output_directory={files}/a_file"),
    "nobody's home": keys("base_output_directory=~nobody-here/runs"),
    # A ramp in two notations, or the length of a run in two ways.
    "MaxText and NeMo": ramp("rampup_batch_size=[8,8,100]", "rampup_batch_size=", "enable_rampup"),
    "MaxText and a list": ramp("step_batch_size_schedule=0:8", "schedule=0:8", "enable_rampup"),
    "NeMo and a list": keys(
        "rampup_batch_size=[8,8,100] step_batch_size_schedule=0:8",
        "rampup_batch_size=",
        "step_batch_size_schedule=0:8",
    ),
    "MaxText to a global batch": ramp(
        "global_batch_size=64", "global_batch_size=64", "enable_ramp"
    ),
    "list to a global batch": keys("global_batch_size=64 step_batch_size_schedule=0:8"),
    "steps and samples": keys("steps=2 total_samples=99"),
    "samples and tokens": keys("total_samples=99 total_tokens=999 steps=-1", "total_samples=99"),
    "no length": keys("steps=-1", "steps=-1", "total_samples", "total_tokens"),
    "no samples": keys("total_samples=0 steps=-1", "total_samples=0"),
    "two sizes of a pass": keys(
        "per_device_batch_size=8 micro_batch_size=4 global_batch_size=8",
        "per_device_batch_size=8",
        "micro_batch_size=4",
    ),
    "micro batch of no batch": nemo(
        "micro_batch_size=4", "micro_batch_size=4", "global_batch_size"
    ),
    "accumulation of a global batch": nemo(
        "global_batch_size=8 gradient_accumulation_steps=2", "gradient_accumulation_steps=2"
    ),
    "MaxText's samples in NeMo's ramp": nemo(
        "rampup_batch_size=[8,8,100] global_batch_size=16 global_rampup_samples=99",
        "global_rampup_samples=99",
        "rampup_batch_size",
    ),
    # NeMo's ramp.
    "ramp without its end": nemo("rampup_batch_size=[8,8,100]", "[8, 8, 100]", "global_batch_size"),
    **{
        f"ramp {ramp_batch}": nemo(
            f"rampup_batch_size={ramp_batch} global_batch_size=32", "rampup_batch_size=", word
        )
        for ramp_batch, word in {
            "[8,8]": "three",
            "[8,8,100,1]": "three",
            "[8,8,1.5]": "integers",
            "[8,eight,100]": "integers",
            "8,8,100": "a list",
            "[40,8,100]": "40 is above",
            "[32,8,100]": "equals",
            "[0,8,100]": "start 0",
            "[8,0,100]": "increment 0",
            "[8,-8,100]": "increment -8",
            "[8,9,100]": "does not divide",
            "[8,8,0]": "samples 0",
            "[8,8,-1]": "samples -1",
        }.items()
    },
    # Megatron's list; in tokens, a row is 16 of them.
    **{
        f"list {schedule}": nemo(
            f"step_batch_size_schedule={schedule}", "step_batch_size_schedule", word
        )
        for schedule, word in {
            "0:8,8.2X:16": "8.2X:16",
            "0:8,160:16,80:32": "80:32",
            "8:8,160:16": "must be 0",  # half a row
            "0:8,160:16,170:32": "170:32",
            "16:8,160:16": "must be 0",
            "0:8,160": '"160"',
            "0:8,160:0": "160:0",
            "0:8,160:x": "160:x",
            "0:8,-160:16": "-160:16",
            "0:8,1.5:16": "1.5:16",
            ",": "no threshold",
        }.items()
    },
    "unit": keys("step_batch_size_unit=words"),
    # Batches on devices and nodes.
    "no split": nemo("global_batch_size=12", "stage 0", "batch of 12", "8 or 16", devices=8),
    "no split of a later stage": nemo(
        "rampup_batch_size=[8,4,100] global_batch_size=16", "stage 1", "12", "8 or 16", devices=8
    ),
    "no batch": nemo("global_batch_size=0"),
    "no micro batch": nemo("global_batch_size=8 micro_batch_size=0", "micro_batch_size=0"),
    "no devices": keys("devices_per_node=0"),
    "no fewest nodes": keys("min_nodes=0"),
    "node schedule": keys("node_schedule=greedy", "node_schedule=greedy", "nemo"),
    "too many stages": ramp(
        "per_device_batch_size=1e6 per_device_batch_size_increment=1",
        "per_device_batch_size_increment",
        "100000",
    ),
    "stages without checkpoints": keys("stop_at_stage_end=True enable_checkpointing=False"),
    "learning rate by": keys("learning_rate_by=tokens"),
    "learning rate scaling": keys("batch_size_lr_scaling=cube"),
    "planned speed": keys("planned_tflops_per_device=0", "planned_tflops_per_device=0"),
    # The other program.
    "plan without nodes for a stage": plan(
        "node_schedule=nemo num_nodes=2 devices_per_node=8 global_batch_size=24 micro_batch_size=4",
        "stage 0",
        "batch of 24",
        "num_nodes=2",
        "multiple of 32",
    ),
    "plan without a picture's name": plan("--plot", "--plot"),
    "plan to no folder": plan("--plot {files}/nowhere/plan.png", "nowhere/plan.png"),
    "plan as no picture": plan("--plot {files}/plan.xyz", "plan.xyz"),
    "fit without memory": plan("--fit", "device_memory_gib=-1"),
    "file in the way of the run": keys(
        "base_output_directory={files} run_name=a_file", "base_output_directory={files}", "a_file"
    ),
}

# Hardware that may be there after all.
SKIPPED = {
    "hardware that is not there, gpu": bool(glob.glob("/dev/nvidia[0-9]*")),
    "hardware that is not there, tpu": bool(
        glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    ),
}


# Refused before the imports, on the devices, by the data, in the run's folder; other commands; and
# what asks JAX for a platform or takes variables that are read once.
STARTED = {
    "no arguments",
    "unknown key",
    "not text",
    "mesh of other devices",
    "half a job",
    "hardware that is not there, gpu",
    "hardware that is not there, tpu",
    "empty files",
    "file in the way of the run",
    "plan without a picture's name",
    "plan to no folder",
    "fit without memory",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a command line."""

    status: int
    stdout: str
    stderr: str
    trained: bool  # whether a step was logged or saved


def execute(
    case: Case, files: pathlib.Path, folder: pathlib.Path, started: bool, limited: bool = True
) -> Outcome:
    """Runs a case by itself in an empty folder; for at most CPU_SECONDS where `limited`.

    Args:
      started: in a process of its own, which is killed after them.
    """
    folder.mkdir()
    output = folder / "output"
    arguments = [argument.replace("{files}", str(files)) for argument in case.arguments]
    if arguments and not any(a.startswith("base_output_directory=") for a in arguments):
        arguments.append(f"base_output_directory={output}")
    if started:
        done = run_forked(
            command(*arguments, module=case.module),
            environment(case.devices) | case.environment,
            cwd=folder,
            limits={resource.RLIMIT_CPU: CPU_SECONDS} if limited else None,
        )
    else:
        done = run_here(
            *arguments,
            module=case.module,
            devices=case.devices,
            cwd=folder,
            environment=case.environment,
            cpu_seconds=CPU_SECONDS if limited else None,
        )
    return Outcome(
        done.returncode,
        done.stdout,
        done.stderr,
        any(p.name == "metrics.jsonl" or p.name.isdigit() for p in folder.rglob("*")),
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "empty_folder").mkdir()
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize("name", CASES)
def test_refused(name, files, tmp_path):
    if SKIPPED.get(name):
        pytest.skip("this machine has it")
    case = CASES[name]
    outcome = execute(case, files, tmp_path / "run", name in STARTED)
    assert outcome.status == 2, outcome.stderr
    assert outcome.stdout == ""
    line = outcome.stderr.removesuffix("\n")
    assert line.startswith("error: ") and len(line.splitlines()) == 1, outcome.stderr
    assert len(line) < 500  # a screen's width a few times over, not a dump
    for part in case.names:
        assert part.replace("{files}", str(files)) in line
    assert not outcome.trained


def test_there_are_enough():
    assert len(CASES) >= 40 and CASES.keys() >= STARTED


def test_a_good_line_is_not_refused(files, tmp_path, cache_dir):
    """What every case is built on trains: a case fails for its own reason alone."""
    folder = tmp_path / "run"
    outcome = execute(keys(f"jax_cache_dir={cache_dir}"), files, folder, True, limited=False)
    assert (outcome.status, outcome.trained) == (0, True), outcome.stderr
