"""The train state: all that training changes, its initial value, its shapes, and how it is held."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from maxramp.model.decoder import Decoder
from maxramp.parallel.mesh import on_mesh
from maxramp.parallel.platform import platform
from maxramp.training.keys import Recipe
from maxramp.training.optimizer import make_optimizer


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("consumed_samples", "model", "opt_state", "bad_steps"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that training changes.

    `consumed_samples` is the clock: uint32[2], low and high word, because a long run passes 2^32
    samples and JAX has no 64-bit integers by default. `bad_steps` counts the last steps in a row
    that were skipped (uint32).
    """

    consumed_samples: jax.Array
    model: Decoder
    opt_state: Any
    bad_steps: jax.Array


def init_state(recipe: Recipe) -> TrainState:
    """The state before the first step, as it is traced: under a mesh weights are born sharded."""
    model = Decoder(recipe.model, jax.random.key(recipe.optimizer.init_weights_seed))
    opt_state = make_optimizer(recipe.optimizer).init(model)
    return TrainState(jnp.zeros((2,), jnp.uint32), model, opt_state, jnp.uint32(0))


def initial_state(recipe: Recipe) -> TrainState:
    """`init_state` of arrays, on the mesh that is set."""
    # On CPUs the random numbers take longer to optimize than the whole step, and run once.
    options = {"xla_backend_optimization_level": 1} if platform() == "cpu" else None
    return jax.jit(functools.partial(init_state, recipe), compiler_options=options)()


def abstract_state(recipe: Recipe, mesh: Mesh | AbstractMesh) -> TrainState:
    """`init_state` of shapes, dtypes and shardings, on any mesh: of devices or without them."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return on_mesh(jax.eval_shape(functools.partial(init_state, recipe)), mesh)


def in_layer_order(tree: Any) -> Any:
    """A tree of models, weights or moments, with layers in their own order, as it is stored.

    Any number of a pipeline's stages can go on from it.
    """
    return _in_layer_order(tree) if _is_circular(tree) else tree


def in_stage_order(tree: Any) -> Any:
    """The inverse of `in_layer_order`: as the pipeline of the mesh that is set holds them.

    The tree's arrays are given up.
    """
    return _in_stage_order(tree) if _is_circular(tree) else tree


def _is_model(x: Any) -> bool:
    return isinstance(x, Decoder)


def _is_circular(tree: Any) -> bool:
    leaves = jax.tree.leaves(tree, is_leaf=_is_model)
    return any(x.is_circular for x in leaves if _is_model(x))


def _with_models(change: Callable[[Decoder], Decoder], tree: Any) -> Any:
    return jax.tree.map(lambda x: change(x) if _is_model(x) else x, tree, is_leaf=_is_model)


# Compiled once for every mesh: a run saves often.
_in_layer_order = jax.jit(functools.partial(_with_models, Decoder.in_layer_order))
_in_stage_order = jax.jit(functools.partial(_with_models, Decoder.in_stage_order), donate_argnums=0)


class HeldState:
    """A train state between steps: the flat list of arrays that a train step takes and gives.

    To take the modules apart and put them together at every step would cost the loop a millisecond.
    """

    def __init__(self, state: TrainState):
        self.arrays, self._structure = jax.tree.flatten(state)

    @property
    def tree(self) -> TrainState:
        """The state as modules."""
        return self._structure.unflatten(self.arrays)
