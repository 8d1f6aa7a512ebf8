"""What blocks are made of: weights, products with them, the embedding's lookup, norms, the MLP.

A weight's shape, sharding and initial scale are one line.

Shapes: B rows, T tokens, N tokens of all rows, D model width, F MLP width, V vocabulary.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxramp.model.keys import ModelKeys
from maxramp.parallel.axes import BATCH_AXES, COPY_AXES
from maxramp.parallel.collectives import all_gather, all_to_all, psum, psum_scatter
from maxramp.parallel.platform import platform
from maxramp.parallel.sharding import (
    MLP_IN_DF,
    MLP_OUT_FD,
    STREAM_BTD,
    TOKENS_BT,
    X_BTD,
    X_BTF,
    Spec,
    merged,
    of_gradient,
    of_own_gradient,
    staged,
    summed_at_once,
    without_axis,
)

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "linear": lambda x: x,
}

STAGE_PRODUCTS = "products of a pipeline's stages"  # what remat_policy=minimal keeps


class Scale(nnx.Param):
    """A weight that is used in float32 whatever the arithmetic's dtype is."""


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("scale", "rows_BD"), meta_fields=()
)
@dataclasses.dataclass(frozen=True)
class RowScale:
    """A norm's scale whose gradient is wanted for each row as well: as that of `rows_BD`, zeros."""

    scale: Scale
    rows_BD: jax.Array

    def __getitem__(self, index):
        return self.scale[index]


@jax.custom_vjp
def _by_rows(y_BTD: jax.Array, x_BTD: jax.Array, rows_BD: jax.Array) -> jax.Array:
    """y = x * scale as it is; the gradient to `rows_BD` is what a scale of each row would have."""
    return y_BTD


def _by_rows_backward(x_BTD, dy_BTD):
    return dy_BTD, None, (dy_BTD * x_BTD).sum(1)


_by_rows.defvjp(lambda y_BTD, x_BTD, rows_BD: (y_BTD, x_BTD), _by_rows_backward)


def normal(key: jax.Array, shape: tuple[int, ...], spec: Spec, std: float, dtype: str) -> nnx.Param:
    """A weight of truncated normal values (at 2 sigma) with standard deviation `std`."""
    # 0.87962566 is the standard deviation of a unit normal truncated at +-2.
    x = jax.random.truncated_normal(key, -2, 2, shape, jnp.float32, out_sharding=spec)
    return nnx.Param((x * (std / 0.87962566)).astype(dtype))


def dense(x: jax.Array, subscripts: str, weight: nnx.Param, out_sharding: Spec) -> jax.Array:
    """An einsum with a weight, computed in x's dtype.

    Naming the result's sharding is what makes a product with an fsdp-sharded weight gather the
    weight and not the activations.

    Args:
      x: [B, T, ...].
      subscripts: of x, the weight and the result, such as "BTD,DF->BTF".
      weight: of a layer; or with an axis S in front of it, of a layer on every stage of a pipeline.
      out_sharding: of the result.
    """
    weight = weight[...].astype(x.dtype)
    weight_spec = jax.typeof(weight).sharding.spec
    is_apart = weight_spec.reduced or _confuses_rows(weight_spec)
    product = _product_apart if is_apart else _product
    x_axes, weight_axes, y_axes = re.split(",|->", subscripts)
    is_staged = weight.ndim > len(weight_axes)
    (B, T), letters = x.shape[:2], "BT"
    rows, spec, y_spec = (B, T), jax.typeof(x).sharding.spec, out_sharding
    if platform() == "cpu":
        # Products of matrices, rows and tokens in one axis N, make a step on CPUs 1.2 to 1.3 times
        # as fast, and one on TPUs slower.
        rows, letters, spec, y_spec = (B * T,), "N", merged(spec), merged(y_spec)
    if is_staged:
        rows, letters, spec, y_spec = _stages(rows), f"dS{letters}", staged(spec), staged(y_spec)
        weight_axes = f"S{weight_axes}"
    subscripts = f"{x_axes},{weight_axes}->{y_axes}".replace("BT", letters)
    x = jax.lax.reshape(x, (*rows, *x.shape[2:]), out_sharding=spec)
    y = _with_whole_gradient(product(subscripts, y_spec, x, weight))
    y = jax.lax.reshape(y, (B, T, *y.shape[len(rows) :]), out_sharding=out_sharding)
    # Among stages a product has batch dimensions, by which remat_policy=minimal tells attention's.
    return checkpoint_name(y, STAGE_PRODUCTS) if is_staged else y


@jax.custom_vjp
def _with_whole_gradient(y: jax.Array) -> jax.Array:
    """y, whose gradient is computed once, though two products read it.

    XLA for TPUs would compute it in both of them, and anew for every tile.
    """
    return y


_with_whole_gradient.defvjp(lambda y: (y, None), lambda _, dy: (jax.lax.optimization_barrier(dy),))


def _stages(rows: tuple[int, ...]) -> tuple[int, ...]:
    """Rows [B, ...] of all batch axes as [d, S, B, ...]: the copies, the stages, the others."""
    mesh = jax.sharding.get_abstract_mesh()
    d, S = mesh.shape["data"], mesh.shape["stage"]
    return d, S, rows[0] // (d * S), *rows[1:]


def _product(subscripts: str, out_sharding: Spec, x: jax.Array, weight: jax.Array) -> jax.Array:
    spec = jax.typeof(weight).sharding.spec
    if _confuses_rows(spec):
        weight = jax.reshard(weight, without_axis(spec, "fsdp"))
    return jnp.einsum(subscripts, x, weight, out_sharding=out_sharding)


def _confuses_rows(spec: Spec) -> bool:
    """Whether XLA may return the rows of a product with such a weight in another order.

    Where a weight is sharded over fsdp and tensor, and rows over fsdp and another axis, it puts the
    rows of few tokens in the order of the weight's shards, and leaves them there. So there weights
    are gathered before the product. XLA for TPUs gathers them by itself.
    """
    if platform() == "tpu":
        return False
    sizes = jax.sharding.get_abstract_mesh().shape
    copies = math.prod(sizes[axis] for axis in COPY_AXES if axis not in spec.partitions)
    return copies > 1 and sizes["fsdp"] > 1 and sizes["tensor"] > 1


# The same with a weight whose gradient stays apart (`sharding.of_weight`); what it keeps of the
# weight for the backward pass are shards.
_product_apart = jax.custom_vjp(_product, nondiff_argnums=(0, 1))


def _product_apart_forward(subscripts, out_sharding, x, weight):
    return _product(subscripts, out_sharding, x, weight), (x, weight)


def _product_apart_backward(subscripts, out_sharding, residuals, dy):
    x, weight = residuals
    x_axes, weight_axes, y_axes = re.split(",|->", subscripts)
    spec = jax.typeof(weight).sharding.spec
    dx = _product(f"{y_axes},{weight_axes}->{x_axes}", jax.typeof(x).sharding.spec, dy, weight)
    # JAX sums a product over all axes that its rows are sharded on, or over none: so over none,
    # and then over those on which the weight is a shard.
    subscripts = f"{x_axes},{y_axes}->{weight_axes}"
    dweight = jnp.einsum(subscripts, x, dy, out_sharding=of_own_gradient(spec))
    return dx, jax.reshard(dweight, of_gradient(spec))


_product_apart.defvjp(_product_apart_forward, _product_apart_backward)


@jax.custom_vjp
def look_up(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """The tokens' vectors [B, T, D], with a gradient that is summed in float32.

    A frequent token's gradient is a sum over thousands of tokens. In bfloat16 it stops growing when
    a token adds less than 1/256 of it, and so would depend on how many tokens a pass has.
    """
    spec, sizes = jax.typeof(table_VD).sharding.spec, jax.sharding.get_abstract_mesh().shape
    tokens = tokens_BT.size // math.prod(sizes[axis] for axis in BATCH_AXES)
    # Where a device has fewer tokens than its part of the table has rows, vectors travel and the
    # table does not: every device cuts its part of D for the rows of all who share the table, and
    # sends it. Where text is generated the table is whole already.
    rows = table_VD.shape[0] // sizes["tensor"]
    travel = "fsdp" in spec.partitions and tokens < rows
    if not travel:
        spec = without_axis(spec, "fsdp")

    def local(table_VD, tokens_BT):
        if travel:
            tokens_BT = all_gather(tokens_BT, "fsdp")
        index_BT = _own_index(tokens_BT, table_VD.shape[0])
        x_BTD = table_VD.at[index_BT].get(mode="fill", fill_value=0)
        if travel:
            x_BTD = all_to_all(x_BTD, "fsdp", split=0, join=2)
        return psum_scatter(x_BTD, "tensor", dimension=2)

    return jax.shard_map(local, in_specs=(spec, TOKENS_BT), out_specs=STREAM_BTD, check_vma=False)(
        jax.reshard(table_VD, spec), jax.reshard(tokens_BT, TOKENS_BT)
    )


def _own_index(tokens_BT: jax.Array, V: int) -> jax.Array:
    """Where tokens are among the V rows of this device's part of the table; V: in another part."""
    index_BT = tokens_BT - jax.lax.axis_index("tensor") * V
    return jnp.where(index_BT < 0, V, index_BT)


def _look_up_forward(table_VD, tokens_BT):
    return look_up(table_VD, tokens_BT), (table_VD, tokens_BT)


def _look_up_backward(residuals, dx_BTD):
    table_VD, tokens_BT = residuals
    spec = jax.typeof(table_VD).sharding.spec

    def local(dx_BTD, tokens_BT):
        """Every device adds up its own tokens, and their sums travel as those of the head do."""
        V, D = table_VD.shape[0] // jax.lax.axis_size("tensor"), table_VD.shape[1]
        index_BT = _own_index(tokens_BT, V)
        dtable_VD = jnp.zeros((V, D), jnp.float32)
        dtable_VD = dtable_VD.at[index_BT].add(dx_BTD.astype(jnp.float32), mode="drop")
        dtable_VD = dtable_VD.astype(table_VD.dtype)
        dtable_VD = psum_scatter(dtable_VD, "fsdp", dimension=1)
        dtable_VD = psum(dtable_VD, summed_at_once(spec))
        # XLA for TPUs would take the scattering out of the loop over passes, and fails at it.
        return jax.lax.optimization_barrier(dtable_VD)

    dtable_VD = jax.shard_map(
        local,
        in_specs=(X_BTD, TOKENS_BT),
        out_specs=of_gradient(spec),
        check_vma=False,
    )(jax.reshard(dx_BTD, X_BTD), jax.reshard(tokens_BT, TOKENS_BT))
    return dtable_VD, None


look_up.defvjp(_look_up_forward, _look_up_backward)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * scale, in float32 (Zhang & Sennrich, arXiv 1910.07467)."""

    def __init__(self, width: int, epsilon: float, dtype: str):
        self.epsilon = epsilon
        self.scale_D = Scale(jnp.ones((width,), dtype))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Normalizes every token's vector; [B, T, D], dtype kept."""
        x = x_BTD.astype(jnp.float32)
        x = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.epsilon)
        scale = self.scale_D[...].astype(jnp.float32)
        if scale.ndim > 1:  # of every stage of a pipeline
            spec = jax.typeof(x).sharding.spec
            y = jax.lax.reshape(x, _stages(x.shape), out_sharding=staged(spec))
            y = jax.lax.reshape(y * scale[:, None, None], x.shape, out_sharding=spec)
        else:
            y = x * scale
        if isinstance(self.scale_D, RowScale):
            y = _by_rows(y, x, self.scale_D.rows_BD)
        return y.astype(x_BTD.dtype)


class MLP(nnx.Module):
    """Gated MLP (Shazeer, arXiv 2002.05202): out(f(gate(x)) * g(up(x)))."""

    def __init__(self, keys: ModelKeys, key: jax.Array):
        D, F, dtype = keys.base_emb_dim, keys.base_mlp_dim, keys.weight_dtype
        gate, up, out = jax.random.split(key, 3)
        self.activations = tuple(keys.mlp_activations)
        self.gate_DF = normal(gate, (D, F), MLP_IN_DF, D**-0.5, dtype)
        self.up_DF = normal(up, (D, F), MLP_IN_DF, D**-0.5, dtype)
        self.out_FD = normal(out, (F, D), MLP_OUT_FD, F**-0.5, dtype)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        x_BTD = jax.reshard(x_BTD, X_BTD)
        f, g = (_ACTIVATIONS[name] for name in self.activations)
        gate_BTF = f(dense(x_BTD, "BTD,DF->BTF", self.gate_DF, X_BTF))
        up_BTF = g(dense(x_BTD, "BTD,DF->BTF", self.up_DF, X_BTF))
        return dense(gate_BTF * up_BTF, "BTF,FD->BTD", self.out_FD, STREAM_BTD)
