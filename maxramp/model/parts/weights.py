"""A weight says what it is: its role, by which others treat it, and the letters of its axes."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxramp.model.keys import ROLES_IN_PRODUCTS
from maxramp.parallel.sharding import Spec


class Weight(nnx.Param):
    """An array that training may change.

    Attributes:
      role: one of `keys.ROLES`; decay, cast, optimizer and noise scale ask it.
      axes: a letter for each axis, as in the name ("DHh"). What an array has in front of them are
        layers of a stack.
    """

    role: str
    axes: str

    @property
    def is_in_products(self) -> bool:
        """Whether it is used in the arithmetic's dtype; others are in float32."""
        return self.role in ROLES_IN_PRODUCTS


def normal(
    role: str,
    axes: str,
    key: jax.Array,
    shape: tuple[int, ...],
    spec: Spec,
    std: float,
    dtype: str,
) -> Weight:
    """A weight of truncated normal values (at 2 sigma) with standard deviation `std`."""
    # 0.87962566 is the standard deviation of a unit normal truncated at +-2.
    x = jax.random.truncated_normal(key, -2, 2, shape, jnp.float32, out_sharding=spec)
    return Weight((x * (std / 0.87962566)).astype(dtype), role=role, axes=axes)


def ones(role: str, axes: str, shape: tuple[int, ...], dtype: str) -> Weight:
    """A weight that changes nothing yet, on every device."""
    return Weight(jnp.ones(shape, dtype), role=role, axes=axes)


def is_weight(x: Any) -> bool:
    """Whether x is a weight: for `is_leaf` of `jax.tree.map`."""
    return isinstance(x, Weight)


def map_weights(change: Callable, tree: Any, *beside: Any) -> Any:
    """A tree with `change(weight)` in place of every weight; of trees alike, of theirs too."""

    def changed(x: Any, *others: Any) -> Any:
        return change(x, *others) if is_weight(x) else x

    return jax.tree.map(changed, tree, *beside, is_leaf=is_weight)


def map_products(change: Callable, tree: Any) -> Any:
    """A tree with `change(array)` in place of the arrays of weights that are used in products."""
    return map_weights(lambda w: jax.tree.map(change, w) if w.is_in_products else w, tree)


def weights_of(tree: Any) -> list[Weight]:
    """The weights of a tree, in order."""
    return [x for x in jax.tree.leaves(tree, is_leaf=is_weight) if is_weight(x)]


def part_of(tree: Any, is_in: Callable[[Weight], bool]) -> Any:
    """A tree with None in place of the weights that are not in a part."""
    return map_weights(lambda weight: weight if is_in(weight) else None, tree)


def joined(*parts: Any) -> Any:
    """The tree of these parts of it."""

    def found(*held: Weight | None) -> Weight | None:
        return next((weight for weight in held if weight is not None), None)

    return jax.tree.map(found, *parts, is_leaf=lambda x: x is None or is_weight(x))
