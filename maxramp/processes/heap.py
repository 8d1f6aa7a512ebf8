"""The heap of a process with one CPU device, which keeps the memory of a step for the next one.

XLA's CPU client takes a step's memory from malloc and gives it back. glibc returns blocks of that
size to the system, which clears every page again: half of the time of the demo's steps.
"""

import ctypes
import mmap
import os
import sys

import jax

# Parameters of mallopt(3), and their defaults.
_M_TRIM_THRESHOLD, _TRIM_THRESHOLD = -1, 128 * 1024
_M_MMAP_MAX, _MMAP_MAX = -4, 65536


def keep(step_bytes: int) -> None:
    """Makes malloc keep the memory that steps of up to so many bytes free: glibc's, with one CPU
    device; elsewhere it does nothing. Starts JAX's backend.

    Steps of more than an eighth of the machine's memory give theirs back: before glibc 2.39 blocks
    may move in the heap, which then holds a step's memory more than once.
    """
    if sys.platform != "linux" or jax.default_backend() != "cpu" or jax.local_device_count() > 1:
        return
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # not glibc
        return
    is_large = step_bytes > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 8
    # Blocks of any size come from the heap, which never shrinks.
    libc.mallopt(_M_MMAP_MAX, _MMAP_MAX if is_large else 0)
    libc.mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD if is_large else -1)
