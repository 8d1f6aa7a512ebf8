"""What only CPU devices need: the order of collectives on several, the kept heap on one.

The heap: XLA's CPU client takes the memory of a step from malloc at every step, and gives it back
after it. glibc passes blocks of that size on to the system, which clears every page again when it
is touched: a third of a step's time. Kept, the same pages serve every step.
"""

import ctypes
import functools
import mmap
import os
import sys
import threading
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxramp.parallel.mesh import platform

_NO_ARITHMETIC_MAKES = 0x7FABCDEF  # a signaling NaN with a payload

# Parameters of mallopt(3), and advice of madvise(2).
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_GLIBC_MMAP_MAX = 65536
_MADV_POPULATE_WRITE = 23

_GAP = _AT_A_TIME = 64 * 2**20


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """The C library, where it is glibc and the main thread is the one that runs the steps."""
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
    """Has the pages of a later step of `size` bytes cleared, in a thread of its own.

    Call it in the main thread between two steps: what is free there is where that step will be.
    A step of more than an eighth of the machine's memory is left to the system as it was: before
    glibc 2.39 a step may move in the heap, which then holds its memory more than once.
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


def wait_for(value: jax.Array, other: jax.Array) -> jax.Array:
    """`value`, which on several CPU devices waits for `other`: float32, a scalar or of its shape.

    XLA on CPU orders the collectives of one sequence, but not a loop that holds some and a
    collective beside it: a device that begins with one waits for ever for a device that began with
    the other. So what could run beside the layers' loop is made to wait, and by data, because an
    optimization barrier is dropped before the order is chosen. Elsewhere nothing is added.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if platform() != "cpu" or mesh.size == 1:
        return value
    bits = jax.lax.bitcast_convert_type(other, jnp.uint32)
    return jnp.where(bits == _NO_ARITHMETIC_MAKES, jnp.zeros_like(value), value)


def recompute_after(function: Callable) -> Callable:
    """`function` of an array and more, to another of that shape and more: see `wait_for`.

    On CPUs its backward pass begins with nothing but its arguments, and not before the gradient of
    the first result is there.
    """
    if platform() != "cpu":
        return function

    def backward(arguments: tuple, gradients: tuple) -> tuple:
        first = wait_for(arguments[0], gradients[0].astype(jnp.float32))
        return jax.vjp(function, first, *arguments[1:])[1](gradients)

    waiting = jax.custom_vjp(function)
    waiting.defvjp(lambda *arguments: (function(*arguments), arguments), backward)
    return waiting


@jax.custom_vjp
def delay_gradient(value: jax.Array, other: jax.Array) -> jax.Array:
    """`value`, whose gradient is not there before `other`, a float32 scalar, is: see `wait_for`."""
    return value


delay_gradient.defvjp(
    lambda value, other: (value, other), lambda other, gradient: (wait_for(gradient, other), None)
)
