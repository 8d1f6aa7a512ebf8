"""The memory of a step on one CPU device: taken from the system once, and ahead of the step."""

import platform
import subprocess
import sys

import pytest
from conftest import ROOT, environment

# A step that holds a matrix of 256 MiB: the page faults of every run.
PROGRAM = """
import resource, sys, threading
import jax, jax.numpy as jnp
from maxramp.processes import backend
from maxramp.config.load import load
from maxramp.parallel import heap, mesh
backend.start(load(["configs/base.yml", "jax_cache_dir="]).backend)
if "keep" in sys.argv:
    heap.keep()
x = jnp.arange(2.0**13)
compiled = jax.jit(lambda x: jnp.sin(x[:, None] * x) @ x).lower(x).compile()
size = compiled.memory_analysis().temp_size_in_bytes
assert size >= 2**28
if "too large" in sys.argv:
    heap.prepare(2**50)
if "prepare" in sys.argv:
    heap.prepare(size)
    for thread in set(threading.enumerate()) - {threading.current_thread()}:
        thread.join()
faults = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
for _ in range(8):
    jax.block_until_ready(compiled(x))
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(size // resource.getpagesize(), *(b - a for a, b in zip(faults, faults[1:])))
"""

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="malloc is not glibc's")


def faults(*arguments: str) -> tuple[int, list[int]]:
    """The pages of the step, and the page faults of every run."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=environment(),
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    pages, *found = map(int, done.stdout.split())
    return pages, found


@pytest.mark.slow
def test_without_keep_every_step_takes_its_pages_from_the_system():
    pages, found = faults()
    assert min(found) > pages / 2


@pytest.mark.slow
def test_kept_pages_serve_later_steps():
    pages, found = faults("keep")
    assert found[0] > pages / 2
    assert min(found) < pages / 100  # not all: glibc before 2.39 moves some of them in the heap


def test_prepared_pages_are_there_at_the_first_step():
    pages, found = faults("keep", "prepare")
    assert found[0] < pages / 20


@pytest.mark.slow
def test_a_step_of_much_of_the_memory_is_left_to_the_system():
    pages, found = faults("keep", "too large")
    assert min(found) > pages / 2
