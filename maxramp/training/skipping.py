"""Steps that change nothing: their gradient is not finite (`skip_bad_steps`), or their loss or
gradient norm is a spike (`skip_step_on_spikes`).

A spike lies more than skip_step_scaling_factor standard deviations above the mean of the last
skip_step_interval steps, as in OLMo-core's SkipStepAdamW and in MaxText. Through a ramp these have
different numbers of targets. A mean over n targets scatters by 1 / sqrt(n), so a deviation from
step i counts n_i / n; where all n are equal, this is the plain formula. The squared norm of a
gradient is |G|^2 + tr(Sigma) / n: where the batch falls, its mean may grow by sqrt(n_i / n).

Skipped spikes are among the last steps too. A loss that stays on a higher level is skipped until
interval / (1 + factor^2) of them are.

Shapes: N = skip_step_interval.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from maxramp.training.keys import OptimizerKeys
from maxramp.training.state import Metrics, TrainState


def skip_bad_step(
    keys: OptimizerKeys,
    before: TrainState,
    after: TrainState,
    metrics: Metrics,
    targets: jax.Array,
    again: bool,
) -> tuple[TrainState, Metrics]:
    """Returns the state after a step, or if the step is bad the one before it with the clock moved
    on. `targets` is the number that the loss was divided by; `again` is as in `step.update`."""
    if not keys.skip_bad_steps and not keys.skip_step_on_spikes:
        return after, metrics
    is_bad, recent = jnp.bool(False), before.recent
    if keys.skip_step_on_spikes:
        numbers = {name: metrics[name] for name in ("loss", "grad_norm")} | {"targets": targets}
        # Later updates on a batch are compared with the steps before it, as the first was.
        window = {name: x[:-1] if again else x[1:] for name, x in recent.items()}
        is_bad = _is_spike(keys, window, numbers)
        if not again:
            recent = _append(window, numbers)
    if keys.skip_bad_steps:
        is_bad |= ~jnp.isfinite(metrics["grad_norm"])
    # A step of several updates counts once.
    count = jnp.maximum(before.bad_steps, 1) if again else before.bad_steps + jnp.uint32(1)
    bad_steps = jnp.where(is_bad, count, jnp.uint32(0))
    state = jax.tree.map(functools.partial(jnp.where, is_bad), before, after)
    state = dataclasses.replace(
        state, consumed_samples=after.consumed_samples, bad_steps=bad_steps, recent=recent
    )
    return state, metrics | {"bad_steps": bad_steps}


def _is_spike(keys: OptimizerKeys, window: Metrics, numbers: Metrics) -> jax.Array:
    """Tells whether a step is a spike, once half of N steps are seen, by loss and gradient norm of
    the steps before (`window`, with 0 targets where there was none). Numbers that are not finite
    are no spikes."""
    weights_N = window["targets"] / numbers["targets"]
    seen, total = (weights_N > 0).sum(), weights_N.sum()

    def is_above(name: str, growth: jax.Array | float) -> jax.Array:
        mean = (weights_N * window[name]).sum() / total
        variance = (weights_N * (window[name] - mean) ** 2).sum() / (seen - 1)
        limit = growth * mean + keys.skip_step_scaling_factor * jnp.sqrt(variance)
        return numbers[name] > limit

    growth = jnp.sqrt(jnp.maximum(total / seen, 1))
    is_above_any = is_above("loss", 1.0) | is_above("grad_norm", growth)
    return is_above_any & _is_finite(numbers) & (seen + 1 >= keys.skip_step_interval // 2)


def _append(window: Metrics, numbers: Metrics) -> Metrics:
    """Returns the window with a new step, N + 1 steps; one that is not finite counts no targets."""
    kept = {name: jnp.where(_is_finite(numbers), x, 0) for name, x in numbers.items()}
    return {name: jnp.append(x, kept[name].astype(x.dtype)) for name, x in window.items()}


def _is_finite(numbers: Metrics) -> jax.Array:
    return jnp.isfinite(numbers["loss"] + numbers["grad_norm"])
