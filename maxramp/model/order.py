"""The order of layers in memory: that of the model, or that of a circular pipeline."""

import functools
from typing import Any

import jax

from maxramp.model.parts.weights import Weight, map_weights, relabel, weights_of
from maxramp.model.pipeline import merge_repeats, split_repeats
from maxramp.parallel.mesh import attach_mesh, mesh_of


def order_by_layer(tree: Any) -> Any:
    """Returns the tree as checkpoints store it: layers on one axis, for any number of stages."""
    if not any(map(_is_circular, weights_of(tree))):
        return tree
    mesh, is_abstract = mesh_of(tree), isinstance(jax.tree.leaves(tree)[0], jax.ShapeDtypeStruct)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if is_abstract:
            return attach_mesh(jax.eval_shape(_order_by_layer, tree), mesh)
        return _order_by_layer(tree)


def order_by_stage(tree: Any, like: Any) -> Any:
    """Inverts `order_by_layer` for a pipeline that holds `like`; donates the arrays."""
    repeats = {weight.shape[0] for weight in weights_of(like) if _is_circular(weight)}
    if not repeats:
        return tree
    with jax.set_mesh(mesh_of(tree)):
        return _order_by_stage(tree, *repeats)


def _is_circular(weight: Weight) -> bool:
    return len(weight.layers) > 1


# Compiled once for every mesh: a run saves often.
@jax.jit
def _order_by_layer(tree: Any) -> Any:
    def order(weight: Weight) -> Weight:
        if not _is_circular(weight):
            return weight
        return relabel(jax.tree.map(merge_repeats, weight), "R", "")

    return map_weights(order, tree)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _order_by_stage(tree: Any, repeats: int) -> Any:
    def order(weight: Weight) -> Weight:
        if not weight.layers:
            return weight
        return relabel(jax.tree.map(lambda x_L: split_repeats(x_L, repeats), weight), "", "R")

    return map_weights(order, tree)
