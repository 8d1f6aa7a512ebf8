"""What a person can get wrong: one line that says what, and nothing else. Cases run in this
process; those with `started` in their own: every way to a refusal, and what is read once."""

import dataclasses
import glob
import pathlib
import resource
import subprocess

import pytest
from conftest import BASE, TINY, check_refusal, command, environment, table
from forked import run_forked
from in_process import run_here

CPU_SECONDS = 5  # of processor time after the imports; other work does not lengthen it

# Eight rows a step, of data that needs no files: a case adds what it is about.
PLAIN = [*TINY, "enable_rampup_batch_size=False", "per_device_batch_size=8", "steps=2"]
PLAIN += ["dataset_type=synthetic", "eval_interval=-1", "jax_cache_dir="]
# 8, 16, 24, 32 rows per device.
RAMP = ["enable_rampup_batch_size=True", "per_device_batch_size=32"]
RAMP += ["per_device_batch_size_start=8", "per_device_batch_size_increment=8"]

FILES = {
    "tabs.yml": "steps: 3\n\tlog_period: 3\n",
    "bracket.yml": "steps: 3\nmlp_activations: [silu, linear\n",
    **{"list.yml": "- steps: 3\n- log_period: 3\n", "word.yml": "steps\n"},
    **{"duplicate.yml": "steps: 3\nlog_period: 3\nsteps: 4\n", "type.yml": "steps: three\n"},
    **{"number_name.yml": "run_name: 007\n", "number_key.yml": "3: steps\n"},
    **{"documents.yml": "steps: 3\n---\nsteps: 4\n", "latin.yml": b"run_name: caf\xe9\n"},
    **{"binary.yml": b"\x00\x01\x02", "far_base.yml": "base_config: nowhere/far.yml\n"},
    **{"base_number.yml": "base_config: 3\n", "base_folder.yml": "base_config: empty_folder\n"},
    "a_file": "in the way of a folder",
    **dict.fromkeys(("empty/a.txt", "empty/b.txt", "maxtext/manifest.ocdbt"), ""),
    "binary/model.bin": b"text\x00",
    "short.txt": "x" * 14,  # with its marks 16 tokens, and a row takes 17
    "some.txt": "x" * 9998,  # 10000 tokens, 200 of them held out: (9800 - 1) // 16 = 612 rows
    **{"hidden/.only": "x" * 9998, "file_for_checkpoints/checkpoints": ""},
    **{"folder_for_metrics/metrics.jsonl/a": "", "folder_for_plan/plan.json/a": ""},
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line, and what its line must name. {files} is the folder that holds FILES."""

    name: str
    arguments: list[str]
    names: tuple[str, ...]
    devices: int = 1
    module: str = "train"
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    started: bool = False  # in a process of its own


def file(name: str, *names: str, **more) -> Case:
    """A config file alone; without `names` the line names it."""
    return Case(name, [f"{{files}}/{name}"], names or (name,), **more)


def keys(arguments: str, *names: str, left_out: tuple[str, ...] = (), **more) -> Case:
    """PLAIN with some keys changed; without `names` the line names every one of them as written."""
    kept, changes = [key for key in PLAIN if not key.startswith(left_out)], arguments.split()
    return Case(arguments, [BASE, *kept, *changes], names or tuple(changes), **more)


def ramp(arguments: str, *names: str, **more) -> Case:
    """PLAIN and RAMP with some keys changed."""
    case = keys(" ".join([*RAMP, arguments]), *(names or arguments.split()), **more)
    return dataclasses.replace(case, name=f"ramp {arguments}")


def nemo(arguments: str, *names: str, **more) -> Case:
    """PLAIN without a per-device batch, with some keys changed."""
    left_out = ("per_device_batch_size", "enable_rampup_batch_size")
    return keys(arguments, *names, left_out=left_out, **more)


def plan(arguments: str, *names: str, **more) -> Case:
    """A command line of maxramp.plan."""
    return nemo(arguments, *names, module="plan", **more)


def cases(kind, text: str, **more) -> list[Case]:
    """A case for each line: what changes, and what the error must name."""
    return [kind(*row, **more) for row in table(text)]


def job(coordinator: str, *names: str, **variables: str) -> Case:
    """A process of a job."""
    environment = {"MAXRAMP_COORDINATOR": coordinator}
    environment |= {f"MAXRAMP_{name}": value for name, value in variables.items()}
    return keys("log_period=3", *names, environment=environment, started=not variables)


CASES = [
    Case("no arguments", [], ("no config file", "CONFIG.yml"), started=True),
    Case("no config file", ["steps=3"], ("no config file", "CONFIG.yml")),
    job("localhost:1234", "R=localhost:1234", "MAXRAMP_NUM_PROCESSES=", "all three"),
    job("localhost:1234", "S=1", "MAXRAMP_PROCESS_ID=5", NUM_PROCESSES="1", PROCESS_ID="5"),
    job("localhost", "COORDINATOR=localhost", "host:port", NUM_PROCESSES="1", PROCESS_ID="0"),
    *cases(
        file,
        """
nothing.yml | nothing.yml | no such config file
duplicat.yml | duplicat.yml | did you mean | duplicate.yml
empty_folder | empty_folder | irectory
tabs.yml | tabs.yml:2 | tab
bracket.yml | bracket.yml:
list.yml | list.yml | key: value
word.yml | word.yml | key: value
duplicate.yml | duplicate.yml:3 | "steps" | twice
type.yml | type.yml | steps=three | an integer
number_name.yml | number_name.yml | run_name | quote it
number_key.yml | number_key.yml:1 | 3
documents.yml | documents.yml:2 | document
latin.yml | latin.yml | utf-8
far_base.yml | nowhere/far.yml | no such config file
base_number.yml | base_number.yml | base_config=3
base_folder.yml | empty_folder | irectory
""",
    ),
    *cases(
        keys,
        """
model_name=llama9-1t | model_name=llama9-1t | llama3-8b | default
steps | "steps" | key=value
--log_period=3 | "--log_period=3" | key=value
--log_period=3 run_name=it's--x | did you mean log_period=3
use_random_routing=True ici_sequence_parallelism=2 dcn_sequence_parallelism=4 | \
    use_random_routing=True (MaxText's): not supported | ici_sequence_parallelism=2, \
    dcn_sequence_parallelism=4 (MaxText's)
mlp_activations=[silu
rope_type=yarn beta_fast=0.5 | beta_fast=0.5 | below beta_slow=1.0
rope_type=yarn rope_max_timescale=1 | rope_max_timescale=1 | more than 1
init_weights_seed=1e20 | init_weights_seed=100000000000000000000
num_epoch=1e12 | num_epoch=1000000000000
run_name=a/b | run_name=a/b | base_output_directory
run_name=..
steps=0
learning_rate=none | learning_rate=none | give learning_rate
learning_rate=-0.1
adam_b2=1
warmup_steps_fraction=1.5
eval_samples=0
dtype=int8 | dtype=int8 | bfloat16
dtype=float16 | dtype=float16 | 65504 | use dtype=bfloat16
weight_dtype=float16 | use weight_dtype=bfloat16
lr_schedule_type=linear | lr_schedule_type=linear | cosine, wsd
remat_policy=some | remat_policy=some | minimal
dataset_type=c4 | dataset_type=c4 | text, synthetic
hardware=cuda | hardware=cuda | gpu
mlp_activations=[silu] | mlp_activations=['silu'] | two
mlp_activations=[tanh,linear] | tanh | silu, gelu
head_dim=7 | head_dim=7 | even
rope_max_timescale=0
base_num_kv_heads=3 | base_num_kv_heads=3 | base_num_query_heads=8
vocab_size=257 dataset_type=text | vocab_size=257 | 258
learning_rate_schedule_steps=3 steps=2
lr_schedule_type=wsd warmup_steps_fraction=0.6 wsd_decay_steps_fraction=0.5 | \
    warmup_steps_fraction=0.6 | wsd_decay_steps_fraction=0.5
eval_interval=1 eval_fraction=0 dataset_type=text | eval_fraction=0
per_device_batch_size=0
gradient_accumulation_steps=0
eval_per_device_batch_size=0.3
ici_data_parallelism=-1 ici_fsdp_parallelism=-1
ici_tensor_parallelism=0
dcn_fsdp_parallelism=-2
dcn_data_parallelism=2 | dcn_data_parallelism=2 | 1 slice
dcn_tensor_parallelism=2
num_nodes=0
dataset_type=text text_files={files}/no/such | no/such | no such file
dataset_type=text text_files={files}/empty_folder | empty_folder | no such file
dataset_type=text text_files={files}/hidden | hidden | no such file
dataset_type=text text_files={files}/binary | binary | model.bin | zero byte at 4
dataset_type=text text_files={files}/short.txt eval_fraction=0 | short.txt | 16 tokens | 17
dataset_type=text text_files={files}/some.txt eval_interval=1 eval_fraction=0.001 | some.txt | \
    held-out | 10 tokens | 17 | eval_fraction
dataset_type=text text_files={files}/some.txt steps=100 | steps=100 | 800 rows | 612 | num_epoch=2 \
    | steps=76
base_output_directory={files}/a_file
base_output_directory={files} run_name=file_for_checkpoints | file_for_checkpoints/checkpoints
base_output_directory={files} run_name=folder_for_metrics | metrics.jsonl
base_output_directory={files} run_name=folder_for_plan | plan.json
load_parameters_path=nowhere | load_parameters_path=nowhere | no checkpoint there
load_parameters_path=gs://nowhere/0/items | 0/items: is MaxText's checkpoint | to_huggingface
load_parameters_path={files}/maxtext model_name=hf | maxtext: is MaxText's checkpoint
load_parameters_path=meta-llama/Llama-3.2-1B | =meta-llama/Llama-3.2-1B | Hugging Face
base_output_directory=~nobody-here/runs
rampup_batch_size=[8,8,100] step_batch_size_schedule=0:8 | rampup_batch_size= | \
    step_batch_size_schedule=0:8
global_batch_size=64 step_batch_size_schedule=0:8
total_samples=99 total_tokens=999 steps=-1 | total_samples=99
steps=-1 | steps=-1 | total_samples | total_tokens
total_samples=0 steps=-1 | total_samples=0
per_device_batch_size=8 micro_batch_size=4 global_batch_size=8 | per_device_batch_size=8 | \
    micro_batch_size=4
step_batch_size_unit=words
devices_per_node=0
min_nodes=0
node_schedule=greedy | node_schedule=greedy | nemo
stop_at_stage_end=True enable_checkpointing=False
learning_rate_by=tokens
expansion_factor_real_data=0 | expansion_factor_real_data=0 | and above 0; or -1
expansion_factor_real_data=1.5 | must be a whole number of processes
expansion_factor_real_data=two | expansion_factor_real_data=two must be a number, not text
expansion_factor_real_data=.nan | must be a finite number
expansion_factor_real_data=2 text_files=nowhere dataset_type=text | \
    expansion_factor_real_data=2: one of that many processes reads for the others, but this job \
    has 1; use 1
grain_packing_type=first_fit | is not one of concat_then_split, best_fit
packing=2 | packing=2 must be True or False, not an integer
grain_worker_count=-1 | must be 0 or more
batch_size_lr_scaling=cube
planned_tflops_per_device=0
""",
    ),
    *cases(
        keys,
        """
per_device_batch_size=0.3 | per_device_batch_size 0.3 | 2.4 rows | 0.125
per_device_batch_size=0.5 ici_fsdp_parallelism=4 ici_data_parallelism=-1 | per_device_batch_size \
    0.5 | 4 rows | data x fsdp = 8
eval_per_device_batch_size=1.5 | eval_per_device_batch_size=1.5 | 12 rows
ici_tensor_parallelism=3 | ici_tensor_parallelism=3 | 8 devices
ici_tensor_parallelism=8 base_num_query_heads=4 base_num_kv_heads=4 | base_num_query_heads=4 | \
    tensor | 8
ici_tensor_parallelism=8 base_num_kv_heads=4 | base_num_kv_heads=4 | tensor
ici_tensor_parallelism=8 vocab_size=260 | vocab_size=260 | tensor
base_emb_dim=36 | base_emb_dim=36 | fsdp
""",
        devices=8,
    ),
    *cases(
        ramp,
        """
per_device_batch_size=4 | per_device_batch_size=4 | per_device_batch_size_start=8
per_device_batch_size_start=32 | per_device_batch_size_start=32 | enable_rampup_batch_size
per_device_batch_size_start=0
per_device_batch_size_increment=0
per_device_batch_size_increment=7 | per_device_batch_size_increment=7 | per_device_batch_size - \
    per_device_batch_size_start = 24 | use 6 or 8
per_device_batch_size=1 per_device_batch_size_start=0.5 per_device_batch_size_increment=0.3 | \
    per_device_batch_size_increment=0.3 | per_device_batch_size_start = 0.5
global_rampup_samples=0
per_device_batch_size=2 per_device_batch_size_start=0.5 per_device_batch_size_increment=0.5 | \
    per_device_batch_size 0.5 | 0.5 rows
rampup_batch_size=[8,8,100] | rampup_batch_size= | enable_rampup
step_batch_size_schedule=0:8 | schedule=0:8 | enable_rampup
global_batch_size=64 | global_batch_size=64 | enable_ramp
per_device_batch_size=1e6 per_device_batch_size_increment=1 | per_device_batch_size_increment | \
    100000
""",
    ),
    *cases(
        ramp,
        """
per_device_batch_size=1 per_device_batch_size_start=0.5 per_device_batch_size_increment=0.5 | \
    stage 0 | 4 rows | fsdp = 8
per_device_batch_size=2 per_device_batch_size_start=1 per_device_batch_size_increment=0.5 | stage \
    1 | 12 rows | fsdp = 8
per_device_batch_size=4 per_device_batch_size_start=2 per_device_batch_size_increment=1 \
    ici_pipeline_parallelism=2 num_pipeline_microbatches=4 | per_device_batch_size 3 (stage 1) | \
    multiples of 2 rows | 2 or 4
""",
        devices=8,
    ),
    *cases(
        nemo,
        """
micro_batch_size=4 | micro_batch_size=4 | global_batch_size
global_batch_size=8 gradient_accumulation_steps=2 | gradient_accumulation_steps=2
rampup_batch_size=[8,8,100] global_batch_size=16 global_rampup_samples=99 | \
    global_rampup_samples=99 | rampup_batch_size
rampup_batch_size=[8,8,100] | [8, 8, 100] | global_batch_size
global_batch_size=0
global_batch_size=8 micro_batch_size=0 | micro_batch_size=0
rampup_batch_size=[8,8] global_batch_size=32 | rampup_batch_size= | three
rampup_batch_size=[8,8,1.5] global_batch_size=32 | rampup_batch_size= | integers
rampup_batch_size=[8,eight,100] global_batch_size=32 | rampup_batch_size= | integers
rampup_batch_size=8,8,100 global_batch_size=32 | rampup_batch_size= | a list
rampup_batch_size=[40,8,100] global_batch_size=32 | rampup_batch_size= | 40 is above
rampup_batch_size=[32,8,100] global_batch_size=32 | rampup_batch_size= | equals
rampup_batch_size=[0,8,100] global_batch_size=32 | rampup_batch_size= | start 0
rampup_batch_size=[8,0,100] global_batch_size=32 | rampup_batch_size= | increment 0
rampup_batch_size=[8,9,100] global_batch_size=32 | rampup_batch_size= | does not divide
rampup_batch_size=[8,8,0] global_batch_size=32 | rampup_batch_size= | samples 0
step_batch_size_schedule=0:8,8.2X:16 | step_batch_size_schedule | 8.2X:16
step_batch_size_schedule=0:8,160:16,80:32 | step_batch_size_schedule | 80:32
step_batch_size_schedule=8:8,160:16 | step_batch_size_schedule | must be 0
step_batch_size_schedule=0:8,160:16,170:32 | step_batch_size_schedule | 170:32
step_batch_size_schedule=0:8,160 | step_batch_size_schedule | "160"
step_batch_size_schedule=0:8,160:0 | step_batch_size_schedule | 160:0
step_batch_size_schedule=0:8,160:x | step_batch_size_schedule | 160:x
step_batch_size_schedule=0:8,-160:16 | step_batch_size_schedule | -160:16
step_batch_size_schedule=0:8,1.5:16 | step_batch_size_schedule | 1.5:16
step_batch_size_schedule=, | step_batch_size_schedule | no threshold
""",
    ),
    *cases(
        nemo,
        """
global_batch_size=12 | stage 0 | batch of 12 | 8 or 16
rampup_batch_size=[8,4,100] global_batch_size=16 | stage 1 | 12 | 8 or 16
""",
        devices=8,
    ),
    *cases(
        plan,
        """
node_schedule=nemo num_nodes=2 devices_per_node=8 global_batch_size=24 micro_batch_size=4 | stage \
    0 | batch of 24 | num_nodes=2 | multiple of 32
--plot {files}/plan.xyz | plan.xyz
""",
    ),
    file("binary.yml", started=True),
    *cases(
        keys,
        """
learning_rat=3 | learning_rat=3 | did you mean learning_rate?
hardware=gpu | hardware=gpu | hardware=auto
hardware=tpu | hardware=tpu | hardware=auto
dataset_type=text text_files={files}/empty/*.txt | empty/a.txt | 2 files
base_output_directory={files} run_name=a_file | base_output_directory={files} | a_file
""",
        started=True,
    ),
    keys("ici_fsdp_parallelism=4", "ici_fsdp_parallelism=4", "8 devices", devices=8, started=True),
    *cases(
        plan,
        """
--plot
--plot {files}/nowhere/plan.png | nowhere/plan.png
--fit | device_memory_gib=-1
""",
        started=True,
    ),
]

# Hardware that may be there after all.
HARDWARE = {"hardware=gpu": ["/dev/nvidia[0-9]*"]}
HARDWARE["hardware=tpu"] = ["/dev/accel*", "/dev/vfio/[0-9]*"]


def execute(
    case: Case, files: pathlib.Path, folder: pathlib.Path, started: bool, limited: bool = True
) -> tuple[subprocess.CompletedProcess, bool]:
    """Runs a case alone in an empty folder, `started` in a process of its own, for at most
    CPU_SECONDS where `limited`; returns the process, and whether a step was logged or saved."""
    folder.mkdir()
    arguments = [argument.replace("{files}", str(files)) for argument in case.arguments]
    if arguments and not any(a.startswith("base_output_directory=") for a in arguments):
        arguments.append(f"base_output_directory={folder / 'output'}")
    if started:
        done = run_forked(
            command(*arguments, module=case.module),
            environment(case.devices) | case.environment,
            cwd=folder,
            limits={resource.RLIMIT_CPU: CPU_SECONDS} if limited else None,
        )
    else:
        more = {"environment": case.environment, "cpu_seconds": CPU_SECONDS if limited else None}
        done = run_here(*arguments, module=case.module, devices=case.devices, cwd=folder, **more)
    return done, any(p.name == "metrics.jsonl" or p.name.isdigit() for p in folder.rglob("*"))


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "empty_folder").mkdir()
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_refused(case, files, tmp_path):
    for key, devices in HARDWARE.items():
        if case.name == key and any(map(glob.glob, devices)):
            pytest.skip("this machine has it")
    done, has_trained = execute(case, files, tmp_path / "run", case.started)
    parts = [part.replace("{files}", str(files)) for part in case.names]
    check_refusal(done, *parts)
    assert not has_trained


def test_a_good_line_is_not_refused(files, tmp_path, cache_dir):
    """What every case is built on trains: a case fails for its own reason alone."""
    case = keys(f"jax_cache_dir={cache_dir}")
    done, has_trained = execute(case, files, tmp_path / "run", True, limited=False)
    assert (done.returncode, has_trained) == (0, True), done.stderr
