"""The heap of a process with one CPU device, which keeps the memory of a step for the next one.

XLA's CPU client takes a step's memory from malloc and gives it back; glibc returns blocks of that
size to the system, which clears every page again: a third of a step's time.
"""

import ctypes
import functools
import mmap
import os
import sys
import threading

import jax

# Parameters of mallopt(3), and advice of madvise(2).
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_GLIBC_MMAP_MAX = 65536
_MADV_POPULATE_WRITE = 23

_GAP = _AT_A_TIME = 64 * 2**20


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """The C library, if it is glibc and this is the main thread, which runs the steps."""
    if sys.platform != "linux" or jax.default_backend() != "cpu" or jax.local_device_count() > 1:
        return None
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return None
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def keep() -> None:
    """Makes malloc keep what the main thread frees. Call it there, when the train state is made."""
    if libc := _libc():
        libc.mallopt(_M_MMAP_MAX, 0)  # blocks of any size come from the heap
        libc.mallopt(_M_TRIM_THRESHOLD, -1)  # which never shrinks
        # Small blocks go to the smallest gap that holds them. Without one they would go to where
        # the last step was and the next one wants to be.
        gap = libc.malloc(_GAP)
        libc.malloc(_GAP)  # stays untouched, and keeps the gap apart from what is behind it
        libc.free(gap)


def prepare(size: int) -> None:
    """Clears the pages of a later step of `size` bytes in a thread of its own.

    Call it in the main thread between two steps: what is free there is where that step will be. A
    step of more than an eighth of the machine's memory stays as it was: before glibc 2.39 a step
    may move in the heap, which then holds its memory more than once.
    """
    if not (libc := _libc()):
        return
    if size > os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE // 8:
        libc.mallopt(_M_MMAP_MAX, _GLIBC_MMAP_MAX)
    elif block := libc.malloc(size):
        libc.free(block)
        threading.Thread(target=_populate, args=(libc, block, size), daemon=True).start()


def _populate(libc: ctypes.CDLL, block: int, size: int) -> None:
    start = block + -block % mmap.PAGESIZE
    for at in range(start, block + size, _AT_A_TIME):  # other threads' mmap waits for each
        libc.madvise(at, min(_AT_A_TIME, block + size - at), _MADV_POPULATE_WRITE)
