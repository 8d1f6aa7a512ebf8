"""Moves a train state to another mesh of the same devices, array by array, so that memory never
holds it twice. Arrays of one shape and sharding share their programs, which are compiled ahead."""

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
    """Lowers the moves of arrays to a mesh; for `platforms` if no backend here has its devices."""
    programs: dict[str, list[jax.stages.Lowered]] = {}
    for name, x in {kind(x): x for x in arrays}.items():
        programs[name] = []
        for sharding in _stops(x, mesh):
            moved = jax.jit(lambda x: x, out_shardings=sharding, compiler_options=options)
            programs[name].append(moved.trace(x).lower(lowering_platforms=platforms))
            x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return programs


def _stops(x: jax.ShapeDtypeStruct, mesh: Mesh) -> list[NamedSharding]:
    """Returns the shardings that an array passes through on its way to a mesh. Where copies and
    heads change at once, XLA would gather the whole array; so it becomes shards first and copies
    last."""
    before, spec = mesh_of(x), x.sharding.spec
    meshes = [mesh]
    if before.shape["tensor"] != mesh.shape["tensor"]:
        meshes = [mesh_without_copies(before), mesh_without_copies(mesh), mesh]
    stops = [NamedSharding(stop, spec) for stop in meshes if stop != before]
    try:
        for stop in stops:
            stop.shard_shape(x.shape)
    except ValueError:  # an axis has fewer elements than a stop has shards
        return [NamedSharding(mesh, spec)]
    return list(dict.fromkeys(stops))


def move(
    arrays: list[jax.Array], abstract: Sequence[jax.ShapeDtypeStruct], compiled: Moves
) -> None:
    """Puts each array of the list, in place, on the mesh that its programs move it to; waits for
    each and frees the old one, to save memory. `abstract` are the shapes of the arrays, in their
    order, that `lower` got."""
    for number, like in enumerate(abstract):
        for program in compiled[kind(like)]:
            before = arrays[number]
            arrays[number] = program(before).block_until_ready()
            before.delete()


def peak_bytes(
    before: Sequence[Any], after: Sequence[Any], during: Sequence[int] | None = None
) -> int:
    """Returns the most bytes that a device holds while `move` runs. `during` are those of each
    array's programs, by default its bytes before and after."""
    sizes = [(bytes_per_device(x), bytes_per_device(y)) for x, y in zip(before, after, strict=True)]
    held, peak = bytes_per_device(before), 0
    for (old, new), both in zip(sizes, during or map(sum, sizes), strict=True):
        peak = max(peak, held - old + both)
        held += new - old
    return peak
