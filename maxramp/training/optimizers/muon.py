"""Muon: momentum whose singular values are made about 1 (arXiv 2409.20325, 2502.16982), as
`optax.contrib.muon` and MaxText compute it: Nesterov momentum without bias, five iterations of
Newton and Schulz, and a factor by the shape of the matrix.

Newton-Schulz needs whole matrices. The matrices of one shape, of all layers, are dealt out to the
devices: each trades its shards of others' matrices for the missing shards of its own, along one
mesh axis after the other, and back. Where there are more matrices than devices in a copy of the
weights, the copies share them too, and the results are gathered at the end, as shards.

Shapes: L matrices of one shape, of all layers; M their shorter side, N their longer one; in lower
case those of a device.
"""

import collections
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from maxramp.model.parts.weights import weights_of
from maxramp.parallel.axes import AXES
from maxramp.parallel.collectives import all_gather, all_to_all, map_shards
from maxramp.parallel.sharding import Spec
from maxramp.training.keys import OptimizerKeys
from maxramp.training.optimizers.half_lives import Pace, decay_weights, kept_share

# The polynomial with the steepest slope at zero (Jordan, kellerjordan.github.io/posts/muon).
_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_ITERATIONS = 5


class MuonState(NamedTuple):
    """The mean of gradients, and its bias as in AdamW."""

    mu: Any  # in mu_dtype
    zeros_in_mu: jax.Array


def transform(keys: OptimizerKeys, rate: Any, pace: Pace) -> optax.GradientTransformation:
    """Makes Muon's update, of matrices alone, at one learning rate and pace; table.py loads it by
    name.
    """
    return optax.chain(
        scale_by_muon(keys, kept_share(keys, "muon_beta", pace)),
        decay_weights(keys, "muon_weight_decay", pace),
        optax.scale_by_learning_rate(rate),
    )


def scale_by_muon(keys: OptimizerKeys, b: Any) -> optax.GradientTransformation:
    """Makes directions of gradients: their Nesterov mean, which keeps the share `b` of itself, made
    orthogonal. `update` needs the weights, for their shapes.
    """

    def init(weights: Any) -> MuonState:
        mu = optax.tree.zeros_like(weights, dtype=jnp.dtype(keys.mu_dtype))
        return MuonState(mu, jnp.float32(1))

    def update(gradients: Any, state: MuonState, weights: Any) -> tuple[Any, MuonState]:
        mu, zeros = optax.tree.update_moment(gradients, state.mu, b, 1), b * state.zeros_in_mu

        def look_ahead(m: jax.Array, g: jax.Array) -> jax.Array:
            return (b * m / (1 - b * zeros) + (1 - b) * g / (1 - zeros)).astype(keys.dtype)

        directions = orthogonal(jax.tree.map(look_ahead, mu, gradients), keys.adam_eps)
        factors = [_factor(keys, weight) for weight in weights_of(weights)]
        arrays, structure = jax.tree.flatten(directions)
        directions = structure.unflatten([f * x for f, x in zip(factors, arrays, strict=True)])
        return directions, MuonState(mu, zeros)

    return optax.GradientTransformation(init, update)


def _factor(keys: OptimizerKeys, weight: Any) -> float:
    sizes, cut = weight.shape[len(weight.leading) :], len(weight.inputs)
    inputs, outputs = math.prod(sizes[:cut]), math.prod(sizes[cut:])
    if keys.muon_consistent_rms is None:
        return math.sqrt(max(1.0, outputs / inputs))
    return keys.muon_consistent_rms * math.sqrt(max(inputs, outputs))


def orthogonal(tree: Any, epsilon: float) -> Any:
    """Makes every layer's matrix in a tree of such weights alone nearly orthogonal, in its dtype;
    `epsilon` is as in `newton_schulz`."""
    arrays, structure = jax.tree.flatten(tree)
    specs = [jax.typeof(x).sharding.spec for x in arrays]
    pools = collections.defaultdict(list)
    for i, (weight, spec) in enumerate(zip(weights_of(tree), specs, strict=True)):
        form = _Form.from_weight(weight, spec)
        pools[form.pool].append((i, form))

    def local(arrays: list[jax.Array]) -> list[jax.Array]:
        results = [*arrays]
        for pool, members in pools.items():
            x_lmn = [form.matrices(arrays[i]) for i, form in members]
            y_lmn = _orthogonal_shards(jnp.concatenate(x_lmn), pool, epsilon)
            ends = [0]
            for (i, form), x in zip(members, x_lmn, strict=True):
                ends.append(ends[-1] + x.shape[0])
                results[i] = form.weight(y_lmn[ends[-2] : ends[-1]], arrays[i].shape)
        return results

    with jax.named_scope("newton_schulz"):
        return structure.unflatten(map_shards(local, (specs,), specs)(arrays))


class _Pool(NamedTuple):
    """What matrices that are made orthogonal together have in common."""

    sizes: tuple[int, int]  # M and N
    axes: tuple[tuple[str, ...], ...]  # mesh axes that shard each side
    copies: tuple[str, ...]  # mesh axes along which every device holds the same


@dataclasses.dataclass(frozen=True)
class _Form:
    """How the matrices of a weight's layers lie in its array."""

    pool: _Pool
    sides: int  # how many of the array's axes are those of a matrix
    cut: int  # how many of these are the input side
    is_turned: bool  # whether the input side is N

    @classmethod
    def from_weight(cls, weight: Any, spec: Spec) -> "_Form":
        """Reads a weight and its spec, in which at most the first axis of each side is sharded."""
        sides, cut, layers = map(len, (weight.own, weight.inputs, weight.leading))
        partitions = [*spec.partitions, *(None,) * (weight.ndim - len(spec.partitions))]
        used = {*jax.tree.leaves(partitions)}
        sizes, partitions = weight.shape[layers:], partitions[layers:]
        assert not any(partitions[1:cut] + partitions[cut + 1 :]), "would mix up a side's parts"
        pairs = [
            (math.prod(sizes[part]), tuple(jax.tree.leaves(partitions[part][0])))
            for part in (slice(cut), slice(cut, sides))
        ]
        short, long = sorted(pairs)
        copies = tuple(axis for axis in AXES if axis not in used)
        pool = _Pool((short[0], long[0]), (short[1], long[1]), copies)
        return cls(pool, sides, cut, pairs[0] != short)

    def matrices(self, x: jax.Array) -> jax.Array:
        """Reshapes a device's part of the array to [l, m, n]."""
        sizes = x.shape[x.ndim - self.sides :]
        shape = -1, math.prod(sizes[: self.cut]), math.prod(sizes[self.cut :])
        x = x.reshape(shape)
        return x.swapaxes(1, 2) if self.is_turned else x

    def weight(self, x_lmn: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Reshapes matrices to a device's part of the array, as `matrices` backwards."""
        return (x_lmn.swapaxes(1, 2) if self.is_turned else x_lmn).reshape(shape)


def _orthogonal_shards(x_lmn: jax.Array, pool: _Pool, epsilon: float) -> jax.Array:
    """Makes sharded matrices nearly orthogonal, inside `map_shards`; each device computes some of
    them whole."""
    count = x_lmn.shape[0]
    sharded_sides = [(axes, 1 + side) for side, axes in enumerate(pool.axes) if axes]
    devices = math.prod(jax.lax.axis_size(axes) for axes, _ in sharded_sides)
    sharing = pool.copies if count > devices else ()
    copies = math.prod(map(jax.lax.axis_size, sharing))
    x_lmn = jnp.pad(x_lmn, ((0, -count % (devices * copies)), (0, 0), (0, 0)))
    # XLA for CPUs would send the joined arrays in their earlier layouts, which it then refuses.
    x_lmn = jax.lax.optimization_barrier(x_lmn)
    if copies > 1:
        own = x_lmn.shape[0] // copies
        first = jax.lax.axis_index(sharing) * own
        x_lmn = jax.lax.dynamic_slice_in_dim(x_lmn, first, own)
    for axes, side in sharded_sides:
        x_lmn = all_to_all(x_lmn, axes, split=0, join=side)
    x_lmn = newton_schulz(x_lmn, epsilon)
    for axes, side in reversed(sharded_sides):
        x_lmn = all_to_all(x_lmn, axes, split=side, join=0)
    return all_gather(x_lmn, sharing)[:count]


def newton_schulz(x_LMN: jax.Array, epsilon: float) -> jax.Array:
    """Moves the singular values of matrices to 0.7 to 1.2, but those below about a thousandth of
    their norm not as far. `epsilon` is added to the norms that they are divided by first. M should
    be the shorter side: its square is computed."""
    dtype, (a, b, c) = x_LMN.dtype, _COEFFICIENTS
    x_LMN = x_LMN.astype(jnp.float32)
    norm = jnp.sqrt(jnp.square(x_LMN).sum((1, 2), keepdims=True))
    x_LMN = (x_LMN / (norm + epsilon)).astype(dtype)
    for _ in range(_ITERATIONS):
        xx_LMM = x_LMN @ x_LMN.swapaxes(1, 2)
        x_LMN = a * x_LMN + (b * xx_LMM + c * (xx_LMM @ xx_LMM)) @ x_LMN
    return x_LMN
