"""The optimizer: gradients -> the direction in which weights move."""

import jax.numpy as jnp
import optax

from maxramp.training.keys import OptimizerKeys


def make_optimizer(keys: OptimizerKeys) -> optax.GradientTransformation:
    """The update before the learning rate: gradients -> direction, for `opt_type`.

    Clipping and the learning rate are in `step.py`: the first needs the norm that is logged, the
    second the consumed samples.
    """
    if keys.opt_type == "sgd":
        return optax.identity()
    return optax.chain(
        optax.scale_by_adam(
            keys.adam_b1, keys.adam_b2, keys.adam_eps, mu_dtype=jnp.dtype(keys.mu_dtype)
        ),
        optax.add_decayed_weights(keys.adam_weight_decay),
    )
