"""The gated delta rule on TPUs: a kernel goes through the chunks of a row, whose state never leaves
the chip; a second one goes back through them, from the states that the first one kept.

Arrays are [N, B, K, R, ...]; shapes as in `gated_delta`.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from maxramp.model.parts.delta_chunk import Gates, overlap, prepare, square
from maxramp.model.parts.delta_sizes import MOST_HEADS


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def scan_chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    gates: Gates,
    state: jax.Array,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns what tokens read [N, B, K, R, C, v], and the state [B, K, R, k, v] after the last
    from that before the first; both float32. Queries and keys are [N, B, K, C, k], of sizes for
    which `has_kernel` is true."""
    return _forward(q, k, v, gates, state, interpret)[0]


def _multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    """Multiplies float32 matrices by three products of their halves, as XLA's precision "high"."""
    (x, x_rest), (y, y_rest) = map(_halve, (x, y))
    product = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)
    return product(x, y) + (product(x, y_rest) + product(x_rest, y))


def _halve(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    first = x.astype(jnp.bfloat16)
    return first, (x - first).astype(jnp.bfloat16)


_multiply_exactly = functools.partial(jnp.matmul, precision="highest")


def _read_chunk(whole, S_kv, q_Ck, k_Ck, v_Cv, rest, beta):
    """Returns the results and next states of a key head's value heads; lists are by value head."""
    products = overlap(q_Ck, k_Ck)
    multiply = _multiply if q_Ck.dtype == jnp.bfloat16 else _multiply_exactly
    results = []
    for S, v, *rows in zip(S_kv, v_Cv, whole, rest, beta, strict=True):
        rows = Gates(*rows)
        chunk = prepare(q_Ck, k_Ck, *products, v, rows, Gates(*map(_column, rows)), multiply)
        after, writes = chunk.advance(S)
        results.append((chunk.read(S, writes), after))
    return results


def _column(row_1C: jax.Array) -> jax.Array:
    i, j = square(row_1C.size)
    return jnp.where(i == j, row_1C, 0).sum(1, keepdims=True)


def _load(g: int, q, k, v, whole, rest, beta):
    """Returns the arguments of `_read_chunk` for a key head of the program."""
    heads = range(v.shape[1])
    gates = ([x[g, r : r + 1, :] for r in heads] for x in (whole, rest, beta))
    return q[g], k[g], [v[g, r] for r in heads], *gates


def _forward_kernel(q, k, v, whole, rest, beta, state, o, before, last, S):
    @pl.when(pl.program_id(2) == 0)
    def _():
        S[...] = state[...]

    for g in range(q.shape[0]):
        q_Ck, k_Ck, v_Cv, whole_1C, *rows = _load(g, q, k, v, whole, rest, beta)
        states = [S[g, r] for r in range(len(v_Cv))]
        for r, (read, after) in enumerate(_read_chunk(whole_1C, states, q_Ck, k_Ck, v_Cv, *rows)):
            before[g, r] = states[r]
            o[g, r] = read
            S[g, r] = after

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        last[...] = S[...]


def _backward_kernel(
    q, k, v, whole, rest, beta, before, do, dlast, dq, dk, dv, drest, dbeta, dstate, dS
):
    @pl.when(pl.program_id(2) == 0)
    def _():
        dS[...] = dlast[...]

    for g in range(q.shape[0]):
        q_Ck, k_Ck, v_Cv, whole_1C, *rows = _load(g, q, k, v, whole, rest, beta)
        heads = range(len(v_Cv))
        states = [before[g, r] for r in heads]
        run = functools.partial(_read_chunk, whole_1C)
        _, pull_back = jax.vjp(run, states, q_Ck, k_Ck, v_Cv, *rows)
        gradients = pull_back([(do[g, r], dS[g, r]) for r in heads])
        dq[g], dk[g] = gradients[1:3]
        for r in heads:
            dS[g, r], dv[g, r] = gradients[0][r], gradients[3][r]
            drest[g, r : r + 1, :], dbeta[g, r : r + 1, :] = gradients[4][r], gradients[5][r]

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
        dstate[...] = dS[...]


def _call(kernel, arrays, outputs, interpret):
    """Runs a kernel for every chunk of the heads of every row, backward from the last one to the
    first. Of its arrays and of its results the last is by rows, the others are by chunks."""
    is_backward = kernel is _backward_kernel
    N, B, K = arrays[0].shape[:3]
    G = 2 if K % 2 == 0 and 2 * arrays[-1].shape[2] <= MOST_HEADS else 1  # key heads of a program

    def specs(arrays):
        def chunk(x):
            rest = x.shape[3:]
            return pl.BlockSpec(
                (None, None, G, *rest),
                lambda b, h, n: (N - 1 - n if is_backward else n, b, h, *(0 for _ in rest)),
            )

        state = pl.BlockSpec((None, G, *arrays[-1].shape[2:]), lambda b, h, n: (b, h, 0, 0, 0))
        return [*map(chunk, arrays[:-1]), state]

    return pl.pallas_call(
        kernel,
        grid=(B, K // G, N),
        in_specs=specs(arrays),
        out_specs=specs(outputs),
        out_shape=outputs,
        scratch_shapes=[pltpu.VMEM((G, *arrays[-1].shape[2:]), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary")
        ),
        interpret=interpret,
        name="gated_delta_backward" if is_backward else "gated_delta_forward",
    )(*arrays)


def _forward(q, k, v, gates, state, interpret):
    shapes = v.shape, (len(v), *state.shape), state.shape
    outputs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    o, before, last = _call(_forward_kernel, (q, k, v, *gates, state), outputs, interpret)
    return (o, last), (q, k, v, gates, before)


def _backward(interpret, kept, gradients):
    q, k, v, gates, before = kept
    do, dlast = gradients
    outputs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v, *gates[1:], dlast)]
    arrays = q, k, v, *gates, before, do, dlast
    dq, dk, dv, drest, dbeta, dstate = _call(_backward_kernel, arrays, outputs, interpret)
    return dq, dk, dv, Gates(jnp.zeros_like(drest), drest, dbeta), dstate


scan_chunks.defvjp(_forward, _backward)
