"""The train state, its value before the first step, and its shapes on any mesh."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh

from maxramp.errors import ConfigError
from maxramp.model.adapters import attach_adapters, has_adapters
from maxramp.model.decoder import Decoder, kind_at
from maxramp.model.keys import ROLES
from maxramp.model.parts.weights import Weight, is_weight, join_parts, weights_of
from maxramp.model.pattern import DRAFT, Pattern
from maxramp.parallel.mesh import attach_mesh, platform
from maxramp.training.eight_bits import no_exponents
from maxramp.training.keys import OptimizerKeys, Recipe
from maxramp.training.optimizers.table import make_optimizer

Metrics = dict[str, jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step hands to the next one."""

    # the clock: uint32[2], low and high word, as a long run passes 2^32 samples and JAX has no
    # 64-bit integers by default
    consumed_samples: jax.Array
    trained: Decoder  # a model with the weights that have a gradient, and None for the others
    frozen: Decoder  # a model with the others
    # the layers' counts of the last step, by name: uint32 [L, ...]; and `eight_bits.EXPONENTS`
    buffers: dict[str, jax.Array]
    opt_state: optax.PartitionState  # by optimizer (`optimizers.table`)
    bad_steps: jax.Array  # uint32, how many of the last steps in a row were skipped
    # with skip_step_on_spikes, loss, grad_norm and targets of the last steps, the newest last:
    # float32 [skip_step_interval + 1]; a missing step has 0 targets
    recent: dict[str, jax.Array]

    @property
    def samples(self) -> jax.Array:
        """The clock, float32."""
        low, high = (word.astype(jnp.float32) for word in self.consumed_samples)
        return high * 2.0**32 + low

    @property
    def model(self) -> Decoder:
        return join_parts(self.frozen, self.trained)

    def with_model(self, model: Decoder) -> "TrainState":
        """Returns the state with the weights of a model of the same layers, those that train in
        `trained`."""
        trained = _pick(model, self.trained)
        return dataclasses.replace(self, trained=trained, frozen=_pick(model, self.frozen))


def _pick(model: Decoder, part: Decoder) -> Decoder:
    def pick(weight: Weight | None, like: Weight | None) -> Weight | None:
        return None if like is None else weight

    return jax.tree.map(pick, model, part, is_leaf=lambda x: x is None or is_weight(x))


def init_state(recipe: Recipe, model: Decoder | None = None) -> TrainState:
    """Makes the state before the first step; trace it under a mesh to make sharded weights. It
    starts from the weights of a model if there is one, with new adapters where `lora_rank` asks for
    them. A ConfigError if none of them trains."""
    if model is None or (recipe.model.lora_rank and not has_adapters(model)):
        own = Decoder(recipe.model, jax.random.key(recipe.optimizer.init_weights_seed))
        model = own if model is None else attach_adapters(own, model)
    trained, frozen = _parts(model, recipe.optimizer, recipe.objective.trains_drafts)
    opt_state = make_optimizer(recipe.optimizer).init(trained)
    clock = jnp.zeros((2,), jnp.uint32)
    numbers = ("loss", "grad_norm", "targets") if recipe.optimizer.skip_step_on_spikes else ()
    recent = {x: jnp.zeros(recipe.optimizer.skip_step_interval + 1) for x in numbers}
    buffers = no_counts(trained) | no_exponents(trained, recipe.model.quantization)
    return TrainState(clock, trained, frozen, buffers, opt_state, jnp.uint32(0), recent)


def _parts(model: Decoder, keys: OptimizerKeys, trains_drafts: bool) -> tuple[Decoder, Decoder]:
    """Splits the weights into those that train (trainable_parameters_mask, else adapters, else all)
    and the others. With trainable_layers those of all layers train, and no others; `mask_layers`
    then keeps the other layers as they are; but drafts train only if one of them is chosen. A
    ConfigError if none trains."""
    layers = len(list(model.pattern))
    for number in keys.trainable_layers:
        if number >= layers:
            raise ConfigError(
                f"trainable_layers={list(keys.trainable_layers)}: {number} is not one of the "
                f"model's layers 0 to {layers - 1}"
            )
    roles = keys.trainable_parameters_mask or (("adapter",) if has_adapters(model) else ROLES)
    kinds = {layer.kind for n, layer in enumerate(model.pattern) if n in keys.trainable_layers}
    within = {kind: model.layers[kind] for kind in kinds} or model
    available_roles = dict.fromkeys(weight.role for weight in weights_of(within))
    if available_roles.keys().isdisjoint(roles):
        whose = "model has" if within is model else "layers of trainable_layers have"
        raise ConfigError(
            f"trainable_parameters_mask={list(roles)}: the {whose} no such weights; use some of "
            f"{', '.join(available_roles)}"
        )

    def part(is_trained: bool) -> Decoder:
        def pick(path: Any, weight: Weight) -> Weight | None:
            kind = kind_at(path)
            trains = weight.role in roles and (within is model or kind is not None)
            if kind == DRAFT:
                trains &= trains_drafts and (within is model or DRAFT in kinds)
            return weight if trains == is_trained else None

        return jax.tree_util.tree_map_with_path(pick, model, is_leaf=is_weight)

    return part(True), part(False)


def mask_layers(tree: Decoder, numbers: Sequence[int], others: Decoder | None = None) -> Decoder:
    """Keeps the layers of these numbers (none: all layers) in a tree of weights, and replaces the
    rest by those of `others` (None: by zeros). With numbers, only layers may have weights in it."""
    if not numbers:
        return tree

    def mask_weight(path: Any, weight: Weight, other: Weight) -> Weight:
        spec = jax.typeof(weight[...]).sharding.spec
        is_chosen = _chosen_layers(tree, path, weight, numbers)
        mask = jax.lax.broadcast_in_dim(
            is_chosen, weight.shape, range(is_chosen.ndim), out_sharding=spec
        )
        return weight.replace(jnp.where(mask, weight[...], other[...] if others else 0))

    return jax.tree_util.tree_map_with_path(mask_weight, tree, others or tree, is_leaf=is_weight)


def num_trained(trained: Decoder, numbers: Sequence[int]) -> int:
    """Counts the parameters that train."""
    count = 0
    for path, weight in jax.tree_util.tree_leaves_with_path(trained, is_leaf=is_weight):
        chosen = _chosen_layers(trained, path, weight, numbers) if numbers else np.ones(())
        count += weight.size // chosen.size * int(chosen.sum())
    return count


def _chosen_layers(tree: Decoder, path: Any, weight: Weight, numbers: Sequence[int]) -> np.ndarray:
    """Tells which layers of a weight's stack are chosen: bool [L], or in a circular pipeline
    [R, L / R]."""
    own = [i for i, layer in enumerate(tree.pattern) if layer.kind == kind_at(path)]
    return np.isin(own, numbers).reshape(weight.layers)


def active_pattern(trained: Decoder) -> Pattern:
    """Returns the layers that a step runs: drafts only if they train."""
    drafts = weights_of(trained.layers.get(DRAFT))
    return trained.pattern if drafts else trained.pattern.main


def no_counts(trained: Decoder) -> dict[str, jax.Array]:
    counts = active_pattern(trained).counts.items()
    return {name: jnp.zeros(shape, jnp.uint32) for name, shape in counts}


def initial_state(recipe: Recipe, *model: Decoder) -> TrainState:
    """Runs `init_state` on the mesh that is set, and donates the model if there is one."""
    # On CPUs the compiler takes longer for the random numbers than for the whole step.
    options = {"xla_backend_optimization_level": 1} if platform() == "cpu" else None
    make, donated = functools.partial(init_state, recipe), range(len(model))
    return jax.jit(make, compiler_options=options, donate_argnums=donated)(*model)


def abstract_state(recipe: Recipe, mesh: Mesh | AbstractMesh) -> TrainState:
    """Returns the shapes, dtypes and shardings of `init_state` on any mesh."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return attach_mesh(jax.eval_shape(functools.partial(init_state, recipe)), mesh)
