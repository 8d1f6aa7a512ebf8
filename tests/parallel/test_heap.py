"""The memory of a step on one CPU device: taken from the system once, and ahead of the step."""

import os
import pathlib
import platform
import subprocess
import sys

import pytest
from conftest import ROOT, environment

from maxramp.parallel import cpu as heap

# A step that holds a matrix of 256 MiB: the page faults of every run.
PROGRAM = """
import resource, sys, threading
import jax, jax.numpy as jnp
from maxramp.config.load import load
from maxramp.parallel import cpu as heap, mesh
mesh.start_backend(load(["configs/base.yml", "jax_cache_dir="]).backend)
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


def faults(*arguments: str, prefix: tuple[str, ...] = ()) -> tuple[int, list[int]]:
    """The pages of the step, and the page faults of every run."""
    done = subprocess.run(
        [*prefix, sys.executable, "-c", PROGRAM, *arguments],
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


@pytest.mark.slow
def test_a_step_of_much_of_a_container_is_left_to_the_system(tmp_path):
    """The same machine, seen with a limit of eight steps less a page."""
    limits = [path / name for path, name in heap._limit_files(pathlib.Path("/proc/self"))]
    real = next((path for path in limits if path.exists()), None)
    given = tmp_path / "limit"
    given.write_text(f"{2**31 - 4096}\n")
    mounted = ("unshare", "--map-root-user", "--mount", "sh", "-c")
    mounted += ('mount --bind "$0" "$1" && shift && exec "$@"', str(given), str(real))
    if (
        not real
        or subprocess.run([*mounted, "true"], check=False, stderr=subprocess.DEVNULL).returncode
    ):
        pytest.skip("no right to show a process another limit")
    pages, found = faults("keep", "prepare", prefix=mounted)
    assert min(found) > pages / 2


MACHINE = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
OTHERS = "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
V2 = "31 23 0:28 {root} {top} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {root} {top} rw,relatime - cgroup cgroup rw,memory\n"
V1_OTHER = "36 31 0:33 / {top}/none rw - cgroup cgroup rw,cpu,cpuacct\n"
MIB = 2**20

# The kernel's files of a process: its groups, what is mounted, the limits of groups by path below
# the mount, and the bytes that it may have.
GROUPS = {
    "none": ("0::/\n", V2, {}, MACHINE),
    "v2, no limit": ("0::/a/b\n", V2, {"a/b/memory.max": "max"}, MACHINE),
    "v2, its own": ("0::/a/b\n", V2, {"a/b/memory.max": 64 * MIB, "a/memory.max": "max"}, 64 * MIB),
    "v2, a group around it": ("0::/a/b\n", V2, {"a/b/memory.max": "max", "a/memory.max": MIB}, MIB),
    "v2, more than the machine": ("0::/\n", V2, {"memory.max": 2**60}, MACHINE),
    "v1": (
        "9:memory,hugetlb:/a\n4:cpu,cpuacct:/b\n0::/\n",
        V1_OTHER + V1,
        {"a/memory.limit_in_bytes": 3 * MIB, "memory.limit_in_bytes": 2**63 - 4096},
        3 * MIB,
    ),
    "v1, a container's mount": (
        "9:memory:/docker/0ab\n",
        V1.replace("{root}", "/docker/0ab"),
        {"memory.limit_in_bytes": 5 * MIB},
        5 * MIB,
    ),
    "v2, a group beside the mounted one": ("0::/../b\n", V2, {"memory.max": 7 * MIB}, 7 * MIB),
}


@pytest.mark.parametrize("case", GROUPS)
def test_the_limit_of_a_container(tmp_path, case):
    groups, mounts, limits, expected = GROUPS[case]
    (tmp_path / "cgroup").write_text(groups)
    top = tmp_path / "mounted"
    (tmp_path / "mountinfo").write_text(OTHERS + mounts.format(root="/", top=top))
    for path, limit in limits.items():
        (top / path).parent.mkdir(parents=True, exist_ok=True)
        (top / path).write_text(f"{limit}\n")
    (tmp_path / "memory.max").write_text("1\n")  # above the mount: not a group's
    assert heap.memory_limit(str(tmp_path)) == expected


def test_this_process_has_a_limit():
    assert 0 < heap.memory_limit() <= MACHINE
