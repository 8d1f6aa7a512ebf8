"""The optimizers of optax and optax.contrib: `opt_type=optax.NAME`, with `opt_arguments`.

Layers are stacked, so an optimizer that takes norms of arrays (LAMB's trust ratios, Adafactor's
clipping) takes those of all layers together, as wherever layers are scanned.
"""

import difflib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from maxramp.errors import ConfigError, reason_of
from maxramp.keys.base import show_key
from maxramp.model.keys import ROLES
from maxramp.model.parts.weights import map_weights, new_weight
from maxramp.training.keys import OptimizerKeys
from maxramp.training.optimizers.half_lives import Pace

_RATE = "learning_rate"


def transform(keys: OptimizerKeys, rate: Any, pace: Pace) -> optax.GradientTransformation:
    """Makes the update of opt_type=optax.NAME at one learning rate; table.py loads it by name.
    `pace` is not used. The keys must have passed `check`.
    """

    def update(*arguments: Any) -> tuple[Any, Any]:
        # Of (gradients, state, weights): updates are sharded as gradients, the new state as the
        # state.
        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, arguments[:2])
        # Where optax takes norms and products of whole arrays, XLA chooses the shardings.
        step = jax.sharding.auto_axes(
            lambda rate, *arguments: _make(keys, rate).update(*arguments), out_sharding=specs
        )
        return step(rate, *arguments)

    return optax.GradientTransformation(_make(keys, 0.0).init, update)


def check(keys: OptimizerKeys) -> None:
    """Raises ConfigError for an optimizer that optax does not have, for arguments that it does not
    take, and for one that needs more than a step has. Starts no backend."""
    optimizers = _optimizers()
    if keys.opt_type not in optimizers:
        by_name = {name.rpartition(".")[2]: name for name in reversed(optimizers)}
        near = difflib.get_close_matches(keys.opt_type.rpartition(".")[2], by_name, 1)
        hint = f"did you mean {by_name[near[0]]}?" if near else f"use {', '.join(optimizers)}"
        raise ConfigError(
            f"opt_type={keys.opt_type} is not an optimizer of optax {optax.__version__} that takes "
            f"a learning rate; {hint}"
        )
    arguments = [*inspect.signature(optimizers[keys.opt_type]).parameters][1:]
    if any(name.endswith("dimension_numbers") for name in arguments):
        raise ConfigError(
            f"opt_type={keys.opt_type} tells matrices by having two axes, and those of layers have "
            "more, as layers are stacked; use opt_type=muon, or another optimizer"
        )
    for name, value in keys.opt_arguments.items():
        shown = f"opt_arguments: {show_key(name, value)}"
        if name == _RATE:
            raise ConfigError(f"{shown}: every step has its own; give the key learning_rate")
        if name not in arguments:
            near = difflib.get_close_matches(name, arguments, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"{shown} is not an argument of {keys.opt_type}; {hint}it takes "
                f"{', '.join(arguments) or 'none'}"
            )
        if _is_mask(name) and not (isinstance(value, list) and {*map(str, value)} <= {*ROLES}):
            raise ConfigError(f"{shown} must be a list of some of {', '.join(ROLES)}")
    try:
        jax.eval_shape(
            functools.partial(_trace_update, keys), jax.ShapeDtypeStruct((), jnp.float32)
        )
    except Exception as error:
        raise ConfigError(
            f"opt_type={keys.opt_type} opt_arguments={dict(keys.opt_arguments)}: {reason_of(error)}"
            "; a step gives gradients, weights and a learning rate: use other arguments, or "
            "another optimizer"
        ) from None


def _trace_update(keys: OptimizerKeys, rate: Any) -> Any:
    weights = {role: new_weight(jnp.zeros((2, 2)), role, "D F") for role in ROLES}
    state = _make(keys, 0.0).init(weights)
    if any(jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in jax.tree.leaves(state)):
        raise TypeError("its state holds a random key, which checkpoints do not")
    return _make(keys, rate).update(weights, state, weights)


def _make(keys: OptimizerKeys, rate: Any) -> optax.GradientTransformation:
    arguments = dict(keys.opt_arguments)
    for name in filter(_is_mask, arguments):
        roles = arguments[name]
        arguments[name] = functools.partial(map_weights, lambda w, roles=roles: w.role in roles)
    return _optimizers()[keys.opt_type](learning_rate=rate, **arguments)


def _is_mask(name: str) -> bool:
    return name.endswith("mask")


def _optimizers() -> dict[str, Callable[..., optax.GradientTransformation]]:
    """Returns the functions that make an optimizer from a learning rate, by opt_type."""
    modules = {"optax": optax, "optax.contrib": optax.contrib}
    return {
        f"{module}.{name}": make
        for module, members in modules.items()
        for name, make in inspect.getmembers(members, inspect.isfunction)
        if not name.startswith(("_", "scale_by_"))
        and [*inspect.signature(make).parameters][:1] == [_RATE]
    }
