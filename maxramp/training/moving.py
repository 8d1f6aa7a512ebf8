"""A train state moves to another mesh of the same devices, array by array: at no time is all of it
there twice.

Arrays of one shape and sharding share a program, which is compiled before it is needed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from maxramp.parallel.mesh import bytes_per_device

Moves = Mapping[tuple, Any]  # a program, lowered or compiled, for each kind of array


def _kind(x: Any) -> tuple:
    return x.shape, x.dtype, x.sharding.spec


def lower(
    arrays: Sequence[jax.ShapeDtypeStruct], mesh: Mesh, platforms: tuple[str, ...] | None = None
) -> Moves:
    """The programs that move such arrays to a mesh.

    Args:
      arrays: as they lie before.
      mesh: where they go.
      platforms: to lower for, where the devices belong to no backend of this process.
    """
    found: dict[tuple, jax.stages.Lowered] = {}
    for x in arrays:
        if _kind(x) not in found:
            moved = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, x.sharding.spec))
            found[_kind(x)] = moved.trace(x).lower(lowering_platforms=platforms)
    return found


def move(
    arrays: list[jax.Array], abstract: Sequence[jax.ShapeDtypeStruct], compiled: Moves
) -> None:
    """Puts arrays on the mesh that programs move them to, each in the place of what it was.

    Each is waited for: only then is there room for the next.
    """
    for number, like in enumerate(abstract):
        before = arrays[number]
        arrays[number] = compiled[_kind(like)](before).block_until_ready()
        before.delete()


def peak_bytes(before: Sequence[Any], after: Sequence[Any]) -> int:
    """What a device holds of arrays, at most, while `move` puts them on another mesh."""
    held, peak = bytes_per_device(before), 0
    for x, y in zip(before, after, strict=True):
        held += bytes_per_device(y)
        peak = max(peak, held)
        held -= bytes_per_device(x)
    return peak
