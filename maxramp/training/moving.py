"""Moves a train state to another mesh of the same devices, array by array, so that it never lies
there twice. Arrays of one shape and sharding share their programs, compiled ahead."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from maxramp.parallel.mesh import bytes_per_device, mesh_of, mesh_without_copies

# For each kind of array the programs that it passes through, lowered or compiled.
Moves = Mapping[str, Sequence[Any]]


def kind(x: Any) -> str:
    return f"{x.dtype} {x.shape} {x.sharding.spec}"


def lower(
    arrays: Sequence[jax.ShapeDtypeStruct],
    mesh: Mesh,
    platforms: tuple[str, ...] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Moves:
    """The moves of such arrays to a mesh; for `platforms` if no backend here has its devices."""
    found: dict[str, list[jax.stages.Lowered]] = {}
    for name, x in {kind(x): x for x in arrays}.items():
        found[name] = []
        for sharding in _way(x, mesh):
            moved = jax.jit(lambda x: x, out_shardings=sharding, compiler_options=options)
            found[name].append(moved.trace(x).lower(lowering_platforms=platforms))
            x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return found


def _way(x: jax.ShapeDtypeStruct, mesh: Mesh) -> list[NamedSharding]:
    """Where an array lies on its way to a mesh. Between meshes that have copies and other heads XLA
    would gather the whole array: so it becomes shards first and copies last."""
    before, spec = mesh_of(x), x.sharding.spec
    way = [mesh]
    if before.shape["tensor"] != mesh.shape["tensor"]:
        way = [mesh_without_copies(before), mesh_without_copies(mesh), mesh]
    stops = [NamedSharding(stop, spec) for stop in way if stop != before]
    try:
        for stop in stops:
            stop.shard_shape(x.shape)
    except ValueError:  # an axis has too few elements for all of them
        return [NamedSharding(mesh, spec)]
    return list(dict.fromkeys(stops))


def move(
    arrays: list[jax.Array], abstract: Sequence[jax.ShapeDtypeStruct], compiled: Moves
) -> None:
    """Puts each array on the mesh that its programs move it to, one by one to save memory."""
    for number, like in enumerate(abstract):
        for program in compiled[kind(like)]:
            before = arrays[number]
            arrays[number] = program(before).block_until_ready()
            before.delete()


def peak_bytes(
    before: Sequence[Any], after: Sequence[Any], during: Sequence[int] | None = None
) -> int:
    """The most that a device holds while `move` runs; by default an array's programs take its own
    bytes before and after."""
    sizes = [(bytes_per_device(x), bytes_per_device(y)) for x, y in zip(before, after, strict=True)]
    held, peak = bytes_per_device(before), 0
    for (old, new), taken in zip(sizes, during or map(sum, sizes), strict=True):
        peak = max(peak, held - old + taken)
        held += new - old
    return peak
