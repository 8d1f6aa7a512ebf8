"""The order of layers in memory: that in which a row meets them, or a circular pipeline's."""

import functools
from typing import Any

import jax

from maxramp.model.parts.weights import Weight, map_weights, relabel, weights_of
from maxramp.model.pipeline import by_layers, by_repeats
from maxramp.parallel.mesh import mesh_of, on_mesh


def in_layer_order(tree: Any) -> Any:
    """A tree of weights or moments as it is stored, in arrays or their shapes: layers are one axis.

    Any number of a pipeline's stages can go on from it.
    """
    if not any(map(_is_circular, weights_of(tree))):
        return tree
    mesh, is_abstract = mesh_of(tree), isinstance(jax.tree.leaves(tree)[0], jax.ShapeDtypeStruct)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        if is_abstract:
            return on_mesh(jax.eval_shape(_in_layer_order, tree), mesh)
        return _in_layer_order(tree)


def in_stage_order(tree: Any, like: Any) -> Any:
    """The inverse of `in_layer_order`: as the pipeline of a tree that is like it holds it.

    The tree's arrays are given up.
    """
    repeats = {weight.shape[0] for weight in weights_of(like) if _is_circular(weight)}
    if not repeats:
        return tree
    with jax.set_mesh(mesh_of(tree)):
        return _in_stage_order(tree, *repeats)


def _is_circular(weight: Weight) -> bool:
    return "R" in weight.leading


# Compiled once for every mesh: a run saves often.
@jax.jit
def _in_layer_order(tree: Any) -> Any:
    def ordered(weight: Weight) -> Weight:
        if not _is_circular(weight):
            return weight
        return relabel(jax.tree.map(by_layers, weight), "R", "")

    return map_weights(ordered, tree)


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def _in_stage_order(tree: Any, repeats: int) -> Any:
    def ordered(weight: Weight) -> Weight:
        if not weight.layers:
            return weight
        return relabel(jax.tree.map(lambda x_L: by_repeats(x_L, repeats), weight), "", "R")

    return map_weights(ordered, tree)
