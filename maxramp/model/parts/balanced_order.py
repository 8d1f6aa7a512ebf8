"""An order of a row's tokens that gives devices along `context` equal work in attention.

Where tokens attend to keys gathered from all devices, a token costs as much as it sees. A row is
cut into runs of tokens. Each device gets the same number of runs and nearly the same cost, which
follows from what documents and windows let tokens see, not from positions.

Shapes: B rows, T tokens, C devices, m runs of a device, n = C m runs.
"""

import jax
import jax.numpy as jnp

_FEWEST_RUNS = 16  # of a device, for runs longer than a kernel's smallest blocks


def run_length(tokens: int) -> int:
    """Returns the tokens of a run, for a device's `tokens` of a row."""
    most = max(128, tokens // _FEWEST_RUNS)
    return next((n for n in (512, 256, 128) if tokens % n == 0 and n <= most), 1)


def balanced_order(costs_Bn: jax.Array, run: int, devices: int) -> jax.Array:
    """Assigns runs to devices by their costs: the costliest run left goes to the least busy device.

    Returns int32 [B, T]: indices in the row of the first device's tokens, then of the next one's,
    each rising.
    """
    n = costs_Bn.shape[1]

    def order(costs_n: jax.Array) -> jax.Array:
        costliest_mC = jnp.argsort(-costs_n).reshape(n // devices, devices)

        def assign(loads_C: jax.Array, runs_C: jax.Array) -> tuple[jax.Array, jax.Array]:
            devices_C = jnp.argsort(loads_C)
            return loads_C.at[devices_C].add(costs_n[runs_C]), devices_C

        _, devices_mC = jax.lax.scan(assign, jnp.zeros(devices), costliest_mC)
        device_n = jnp.zeros(n, jnp.int32).at[costliest_mC].set(devices_mC)
        runs_n = jnp.argsort(device_n, stable=True)
        return (runs_n[:, None] * run + jnp.arange(run)).reshape(n * run)

    return jax.vmap(order)(costs_Bn.astype(jnp.float32)).astype(jnp.int32)
