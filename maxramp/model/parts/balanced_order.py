"""An order of a row's tokens in which devices along `context` have as much to attend to.

Where tokens attend to keys gathered from all devices, a token costs as many as it sees. A row is
cut into runs of tokens, and each device gets as many runs, of near to the same cost: by what
documents and windows let tokens see, not by position.

Shapes: B rows, T tokens, C devices, m runs of a device, n = C m runs.
"""

import jax
import jax.numpy as jnp

_FEWEST_RUNS = 16  # of a device, for runs longer than a kernel's smallest blocks


def run_length(tokens: int) -> int:
    """Tokens of a run, of those that a device has of a row."""
    most = max(128, tokens // _FEWEST_RUNS)
    return next((n for n in (512, 256, 128) if tokens % n == 0 and n <= most), 1)


def balanced_order(costs_Bn: jax.Array, run: int, devices: int) -> jax.Array:
    """int32 [B, T]: the places in its row of the tokens of the first device, of the next, and so
    on, each rising; by the costs of runs. Of the dearest runs left each device gets one, the
    dearest that which has least to do."""
    n = costs_Bn.shape[1]

    def order(costs_n: jax.Array) -> jax.Array:
        dearest_mC = jnp.argsort(-costs_n).reshape(n // devices, devices)

        def take(loads_C: jax.Array, runs_C: jax.Array) -> tuple[jax.Array, jax.Array]:
            takers_C = jnp.argsort(loads_C)
            return loads_C.at[takers_C].add(costs_n[runs_C]), takers_C

        _, takers_mC = jax.lax.scan(take, jnp.zeros(devices), dearest_mC)
        taker_n = jnp.zeros(n, jnp.int32).at[dearest_mC].set(takers_mC)
        runs_n = jnp.argsort(taker_n, stable=True)
        return (runs_n[:, None] * run + jnp.arange(run)).reshape(n * run)

    return jax.vmap(order)(costs_Bn.astype(jnp.float32)).astype(jnp.int32)
