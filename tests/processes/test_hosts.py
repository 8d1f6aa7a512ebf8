"""Real jax.distributed processes on this machine: the same rows whoever reads them."""

import functools
import itertools
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import BASE, ROOT, TINY
from jobs import finish, start, wait_until

from maxramp.data.files.megatron import MegatronWriter
from maxramp.run.metrics import read_records

PROGRAM = [sys.executable, str(ROOT / "tests" / "hosts.py")]
TRAIN = [sys.executable, "-m", "maxramp.train"]

# Eight steps on batches of 16, 32 and 48 rows, and held-out rows that no batch divides.
RAMP = [
    "step_batch_size_schedule=0:16, 48:32, 144:48",
    *("step_batch_size_unit=samples", "total_samples=240", "text_files=text", "eval_interval=4"),
    *("eval_samples=-1", "eval_fraction=0.1"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with `text`, and one beside it without."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "with" / "text").mkdir(parents=True)
    (folder / "without").mkdir()
    texts = [f"file {i}: " + " ".join(str(i * j) for j in range(90)) for i in range(40)]
    for i, text in enumerate(texts):
        (folder / "with" / "text" / f"{i:02}.txt").write_text(text)
    words = [text[at : at + 9 + 7 * (at % 5)] for text in texts for at in range(0, len(text), 40)]
    lines = [json.dumps({"text": text}) + "\n" for text in words]
    (folder / "with" / "a.jsonl").write_text("".join(lines[::2]))
    (folder / "with" / "b.jsonl").write_text("".join(lines[1::2]))
    for name, part in (("a", words[::2]), ("b", words[1::2])):
        with MegatronWriter(str(folder / "with" / name), np.dtype("uint16")) as writer:
            writer.add([np.frombuffer(text.encode(), np.uint8) for text in part])
            writer.finish()
    return folder


def keys(devices, *more, factor=1, tensor=1, accumulation=1):
    """Returns the arguments of a job; `accumulation` is that of the last stage."""
    return [
        *(BASE, *TINY, *RAMP),
        f"per_device_batch_size={48 / devices / accumulation}",
        f"eval_per_device_batch_size={16 / devices}",
        f"ici_tensor_parallelism={tensor}",
        f"expansion_factor_real_data={factor}",
        *more,
    ]


def folders(data, processes, factor):
    """Returns the folder of each process of a job: only those that should read have the data."""
    return [data / ("with" if i % max(1, factor) == 0 else "without") for i in range(processes)]


def answers_of(outcomes):
    """Returns what each process of a job printed, which must have succeeded."""
    assert [status for *_, status in outcomes] == [0] * len(outcomes), outcomes
    printed = [out.splitlines() for out, _, _ in outcomes]
    return [[json.loads(line) for line in lines if line.startswith("{")] for lines in printed]


def ask(data, requests, processes=1, devices=1):
    """What loaders read, by request (first step, expansion factor, keys); a job for each factor."""
    answers = [None] * len(requests)
    for factor in {factor for _, factor, _ in requests}:
        numbers = [i for i, request in enumerate(requests) if request[1] == factor]
        program = [*PROGRAM, json.dumps([[requests[i][0], requests[i][2]] for i in numbers])]
        job = start(program, processes, devices, folders(data, processes, factor))
        printed = zip(*answers_of(finish(job)), strict=True)
        for i, answer in zip(numbers, printed, strict=True):
            answers[i] = answer
    return answers


@pytest.fixture(scope="module")
def alone(data):
    """Returns what one process with one device reads."""
    ((answer,),) = ask(data, [(0, 1, keys(1))])
    assert len(answer["steps"]) == len(set(answer["steps"])) == 8
    assert answer["share"] == [16, 32, 48] and answer["moved"] == [0] * 8
    return answer


def check(data, alone, processes, devices, cases):
    """Jobs of cases (factor, tensor, accumulation, step) read one process's rows, move no more."""
    count = processes * devices
    requests = [
        (first, factor, keys(count, factor=factor, tensor=tensor, accumulation=accumulation))
        for factor, tensor, accumulation, first in cases
    ]
    for case, answer in zip(cases, ask(data, requests, processes, devices), strict=True):
        factor, tensor, _, first = case
        # The batches of all steps; a device holds batch * tensor / count rows, and those of all
        # devices that do not read themselves are moved.
        batches = [16, 16, 16, 32, 32, 32, 48, 48][first:]
        moved = [
            b * tensor * (count - count // factor) // count * (2 * 16 + 2) * 4 for b in batches
        ]
        for process, seen in enumerate(answer):
            assert seen["steps"] == alone["steps"][first:], case
            assert seen["evaluations"] == alone["evaluations"], case
            assert seen["moved"] == moved, case
            assert seen["hash"] == alone["hash"]
            assert seen["reads"] == (process % factor == 0) == any(seen["share"])


SHAPES = [
    pytest.param(
        *shape, (1, 2, 4), marks=[pytest.mark.slow] + [pytest.mark.long] * (shape != (2, 2))
    )
    for shape in itertools.product((1, 2, 4), repeat=2)
]


@pytest.mark.parametrize(("processes", "devices", "factors"), [(2, 1, (1,)), *SHAPES])
def test_rows_depend_on_no_reader(data, alone, processes, devices, factors):
    cases = [
        (factor, tensor, accumulation, first_step)
        for factor in factors
        for tensor, accumulation, first_step in ((1, 3, 2), (2, 1, 0))
        if processes % factor == 0 and processes * devices % tensor == 0
    ]
    check(data, alone, processes, devices, cases)


MIXTURE = ("dataset_type=grain", "grain_train_files=a.jsonl,0.7;b.jsonl,0.3", "num_epoch=9")

PACKINGS = [
    (packing, evaluated)
    for packing in ("concat_then_split", "best_fit", "none")
    for evaluated in (".1 of them", "a file of its own")
]
PACKINGS.append(("by the index of a set", ".1 of them"))


def mixture(packing, evaluated):
    """Returns the keys of a mixture of documents, packed and evaluated in one of the ways."""
    if packing == "by the index of a set":
        files = MIXTURE[1].replace("a.jsonl", "a.bin").replace("b.jsonl", "b.bin")
        return MIXTURE[0], files, MIXTURE[2], "text_files="
    text = (*MIXTURE, f"packing={packing != 'none'}", "text_files=")
    text += ("grain_eval_files=b.jsonl",) if evaluated == "a file of its own" else ()
    return text + ((f"grain_packing_type={packing}",) if packing != "none" else ())


@pytest.fixture(scope="module")
def mixtures(data):
    """Returns what one process reads of every mixture, and what two do if one reads for both."""
    asked = [mixture(*case) for case in PACKINGS]
    one = ask(data, [(0, 1, keys(1, *text)) for text in asked])
    two = ask(data, [(0, 2, keys(2, *text, factor=2)) for text in asked], processes=2)
    return dict(zip(PACKINGS, zip(one, two, strict=True), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", PACKINGS, ids=", ".join)
def test_documents_of_a_mixture_are_the_same_rows(mixtures, case):
    """Those who read count the documents, and all lay them out alike."""
    (alone,), both = mixtures[case]
    assert alone["packed"] == (case[0] != "none")
    for seen in both:
        for name in ("steps", "evaluations", "hash", "packed"):
            assert seen[name] == alone[name]


AT_HOME = "import os, hosts; os.environ['HOME'] = os.getcwd(); hosts.main()"


@pytest.mark.slow
@pytest.mark.parametrize("in_storage", [False, True], ids=["apart", "in a storage"])
def test_machines_that_share_no_disk_prepare_a_set(data, mixtures, storages, tmp_path, in_storage):
    """Each its own, or the first for both in a storage; each has a home of its own."""
    disks = [tmp_path / "a", tmp_path / "b"]
    for folder in disks:
        copy = os.symlink if in_storage else shutil.copy2  # a copy has a version of its own
        ignore = shutil.ignore_patterns("output")
        shutil.copytree(data / "with", folder, ignore=ignore, copy_function=copy)
    sets = (f"data_cache_dir={storages('gs').address}/sets",) if in_storage else ()
    request = json.dumps([[0, keys(2, *mixture(*PACKINGS[0]), *sets)]])
    outcomes = finish(start([sys.executable, "-c", AT_HOME, request], 2, 1, disks))
    for (answer,) in answers_of(outcomes):
        assert answer["steps"] == mixtures[PACKINGS[0]][0][0]["steps"]
    assert sorted(out.count("fetching") for out, _, _ in outcomes) == [0, 2 * in_storage]
    for folder in disks:
        assert in_storage or len([*(folder / "output" / ".prepared").iterdir()]) == 2


# Makes a process of a job see the file boot_id of its folder as the machine's: a host of its own.
ON_A_HOST = 'mount --bind boot_id /proc/sys/kernel/random/boot_id && exec "$@"'
ON_A_HOST = ["unshare", "--map-root-user", "--mount", "sh", "-c", ON_A_HOST, "sh"]

MESH = """
import json, sys
import jax
from maxramp.config.load import load
from maxramp.config.resolve import resolve
from maxramp.parallel import mesh
from maxramp.processes import backend
loaded = load(sys.argv[1:])
backend.start(loaded.backend)
resolved = resolve(loaded, jax.device_count(), mesh.num_slices(), jax.process_count())
devices = mesh.make_mesh(resolved.mesh)
hosts = sorted({device.slice_index for device in jax.devices()})
print(json.dumps([hosts, dict(devices.shape), [d.id for d in devices.devices.flat]]))
"""


@pytest.mark.slow
def test_weights_are_sharded_over_the_devices_of_all_hosts(tmp_path):
    hosts = [tmp_path / str(i) for i in range(2)]
    for i, folder in enumerate(hosts):
        folder.mkdir()
        (folder / "boot_id").write_text(f"{i}" * 8 + "-0000-4000-8000-000000000000\n")
    look = [*ON_A_HOST, "cat", "/proc/sys/kernel/random/boot_id"]
    sees = subprocess.run(look, cwd=hosts[1], capture_output=True, text=True, check=False)
    if not sees.stdout.startswith("11111111"):
        pytest.skip("no right to give a process a boot id of its own")
    command = [*ON_A_HOST, sys.executable, "-c", MESH, *keys(4, "jax_cache_dir=")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = functools.partial(subprocess.Popen, **pipes)
    for out, err, status in finish(start(command, 2, 2, hosts, process=started)):
        assert status == 0, err[-2000:]
        indices, shape, order = json.loads(out.splitlines()[-1])
        assert indices == [0, 1]  # what JAX calls slices: the hosts
        assert shape == {"data": 1, "stage": 1, "fsdp": 4, "expert": 1, "context": 1, "tensor": 1}
        assert order == sorted(order)


def train(
    data, folder, cache_dir, name, processes, devices, *more, kill_at=None, optimized=False, **shape
):
    """Runs a job of maxramp.train; returns its records. With `kill_at`, all of it is killed once
    that checkpoint exists. With `optimized` XLA adds up as it does for users."""
    factor, count = shape.get("factor", 1), processes * devices
    arguments = keys(count, f"base_output_directory={folder}", f"run_name={name}", *more, **shape)
    command = [*TRAIN, *arguments, f"jax_cache_dir={cache_dir}", "checkpoint_period=2"]
    job = start(command, processes, devices, folders(data, processes, factor), optimized)
    if kill_at is not None:
        wait_until((folder / name / "checkpoints" / str(kill_at)).exists, 200)
        for process in job:
            process.kill()
    done = finish(job)
    assert kill_at is not None or not any(status for *_, status in done), done
    return read_records(folder / name / "metrics.jsonl")


def losses(records):
    return [(r["step"], r.get("loss"), r.get("eval_loss")) for r in records]


def norms(records):
    return [r["grad_norm"] for r in records if "loss" in r]


def fingerprints(records):
    return [r["batch_fingerprint"] for r in records if "loss" in r]


def noise(records):
    scales = [{k: v for k, v in r.items() if "noise_" in k} for r in records if "loss" in r]
    assert all(scales)
    return scales


NOISE = "log_gradient_noise_scale=True"

SPLIT = {"tensor": 2, "accumulation": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "factor"),
    (pytest.param({}, 4, marks=pytest.mark.long), (SPLIT, 2)),
    ids=("rows", "tensor parallelism and accumulation"),
)
def test_losses_are_the_same_bits_on_as_many_devices(data, tmp_path, cache_dir, shape, factor):
    """Whoever reads them, clipped at every step."""
    clipped = ("gradient_clipping_threshold=0.1", NOISE, "total_samples=72")
    shape = shape | {"optimized": True}
    two = train(data, tmp_path, cache_dir, "two", 2, 4, *clipped, **shape)
    assert min(norms(two)) > 0.1
    four = train(data, tmp_path, cache_dir, "four", 4, 2, *clipped, factor=factor, **shape)
    assert losses(two) == losses(four) and fingerprints(two) == fingerprints(four)
    assert norms(two) == norms(four) and noise(two) == noise(four)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "resumed_on"),
    (pytest.param((), (8, 4), marks=pytest.mark.long), ((*MIXTURE, "text_files="), (2, 0.5))),
    ids=("rows", "packed"),
)
def test_a_killed_run_resumes_on_other_processes_with_the_same_rows(
    data, tmp_path, cache_dir, text, resumed_on
):
    """On eight and on two, with other factors, one below 1; in the middle of the ramp."""
    processes, factor = resumed_on
    whole = train(data, tmp_path, cache_dir, "whole", 1, 1, *text)
    train(data, tmp_path, cache_dir, "killed", 4, 1, *text, factor=2, kill_at=4)
    resumed = train(data, tmp_path, cache_dir, "killed", processes, 1, *text, factor=factor)
    assert len(fingerprints(whole)) == 8
    assert fingerprints(resumed) == fingerprints(whole)
    assert [r["consumed_samples"] for r in resumed] == [r["consumed_samples"] for r in whole]
