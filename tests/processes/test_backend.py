"""How JAX is started, and that a step's memory is taken from the system once."""

import platform
import subprocess
import sys

import jax
import pytest
from conftest import BASE, ROOT, command, environment
from jax._src import hardware_utils

from maxramp.processes import backend

START = """
import jax
from maxramp.processes.keys import BackendKeys
from maxramp.processes.backend import start
start(BackendKeys("cpu", "gs://bucket/cache", 1, devices_per_node=6, processes_per_node=2))
print(jax.device_count())
"""


def test_a_cpu_has_the_devices_of_a_process_and_a_cache_in_a_storage_no_local_folder(tmp_path):
    line = [sys.executable, "-c", START]
    assert subprocess.check_output(line, cwd=tmp_path, env=environment(), text=True) == "3\n"
    assert not list(tmp_path.iterdir())


def test_an_interactive_step_of_salloc_is_one_process(monkeypatch):
    """The job has four tasks, of which the person's shell is one: nobody starts the others."""
    step = {"JOB_ID": 7, "NTASKS": 4, "STEP_NUM_TASKS": 1, "PROCID": 0, "LOCALID": 0}
    for name, value in (step | {"STEP_NODELIST": "localhost"}).items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    backend.join(1)
    assert not jax.distributed.is_initialized()


PLUGIN = """
import jax

def initialize():  # as NVIDIA's, which looks for its libraries where a GPU may be asked for
    if jax.config.jax_platforms != "cpu":
        raise RuntimeError("Unable to load cuFFT.\\nIs it installed?")
"""


@pytest.mark.parametrize(
    "arguments, says",
    [
        pytest.param(("hardware=cpu",), "", marks=pytest.mark.slow),
        pytest.param(("devices_per_node=8", "num_nodes=1"), "", marks=pytest.mark.slow),
        pytest.param(("compile_topology=h200:2x8",), "", marks=pytest.mark.slow),
        ((), "broken.initialize(): Unable to load cuFFT. Is it installed?\n"),
    ],
)
def test_a_plugin_that_fails_prints_one_line_where_an_accelerator_may_be(arguments, says, tmp_path):
    """A line where an accelerator may be; NVIDIA's and libtpu's plugins have none without one."""
    for name in ("broken", *["xla_cuda99"] * (not hardware_utils.has_visible_nvidia_gpu())):
        folder = tmp_path / "jax_plugins" / name
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(PLUGIN)
    variables = environment()
    del variables["JAX_PLATFORMS"]
    variables["PYTHONPATH"] += f":{tmp_path}"
    line, more = command(BASE, *arguments, module="plan"), {"capture_output": True, "text": True}
    done = subprocess.run(line, env=variables, check=True, **more)
    assert done.stderr.endswith(says) and done.stderr.count("\n") == bool(says), done.stderr


# A step that holds a matrix of 256 MiB: the page faults of every run.
PROGRAM = """
import resource, sys
import jax, jax.numpy as jnp
from maxramp.processes import backend
from maxramp.config.load import load
from maxramp.processes import heap
backend.start(load(["configs/base.yml", "jax_cache_dir="]).backend)
x = jnp.arange(2.0**13)
compiled = jax.jit(lambda x: jnp.sin(x[:, None] * x) @ x).lower(x).compile()
size = compiled.memory_analysis().temp_size_in_bytes
assert size >= 2**28
for step_bytes in {"keep": [size], "too large": [size, 2**50]}.get(sys.argv[-1], []):
    heap.keep(step_bytes)
faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
for _ in range(8):
    jax.block_until_ready(compiled(x))
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(size // resource.getpagesize(), *(b - a for a, b in zip(faults, faults[1:])))
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")


def faults(*arguments: str) -> tuple[int, list[int]]:
    """Returns the pages of the step, and the page faults of every run."""
    line, options = [sys.executable, "-c", PROGRAM, *arguments], {"env": environment(), "cwd": ROOT}
    done = subprocess.run(line, **options, check=True, capture_output=True, text=True)
    pages, *faults_by_run = map(int, done.stdout.split())
    return pages, faults_by_run


@pytest.mark.slow
def test_kept_pages_serve_later_steps():
    pages, faults_by_run = faults("keep")
    assert faults_by_run[0] > pages / 2
    assert min(faults_by_run) < pages / 100  # some blocks move in the heap before glibc 2.39


@pytest.mark.slow
@pytest.mark.parametrize("how", ["nothing kept", "too large"])
def test_other_steps_give_their_pages_back(how):
    pages, faults_by_run = faults(how)
    assert min(faults_by_run) > pages / 2
