"""The memory of a step on one CPU device is taken from the system once."""

import platform
import subprocess
import sys

import pytest
from conftest import ROOT, environment

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
