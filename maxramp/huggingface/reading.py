"""Reads the tensors of a folder into the weights of a model, one after the other.

Each device gets some rows of every tensor, which its host alone reads. A compiled program exchanges
them between devices, turns the tensor into our axes, and puts it into the stack of layers, whose
memory it reuses. Besides its shards a host holds no more than the parts of the two largest tensors.

Shapes: L layers of a stack, E experts, R rows of a tensor (its first axis), N devices, r rows of a
device.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxramp.errors import ConfigError
from maxramp.huggingface import quantized
from maxramp.huggingface.names import Form, NamedWeight, name_copies, name_tensors
from maxramp.huggingface.safetensors import DTYPES, Tensor
from maxramp.huggingface.variants import is_of_text_model
from maxramp.model.decoder import Decoder
from maxramp.model.families.table import FAMILIES
from maxramp.model.pipeline import order_by_layer, order_by_stage
from maxramp.parallel.axes import AXES
from maxramp.parallel.collectives import map_shards, own_index
from maxramp.parallel.mesh import mesh_of
from maxramp.parallel.sharding import REPLICATED, axes_spec, unstack_spec

# Endings of tensors that follow from the config.
_DERIVED = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


def _describe_left_out(
    folder: str, tensors: Mapping[str, Tensor], used: set[str], tied: bool, side_prefix: str
) -> Iterator[str]:
    """Yields lines about tensors that belong to no weight (whose names are not in `used`); refuses
    those that should.

    `tied` = the model's head is its embedding; `side_prefix` as in `Released`.
    """
    names_by_reason = collections.defaultdict(list)
    # Of no shared experts transformers writes tensors without numbers.
    for name in sorted(name for name in tensors.keys() - used if 0 not in tensors[name].shape):
        if not is_of_text_model(name):
            names_by_reason["of no text model"].append(name)
        elif side_prefix and name.startswith(side_prefix):
            names_by_reason["not trained: an export has them as they are"].append(name)
        elif name.endswith(_DERIVED):
            names_by_reason["computed here"].append(name)
        elif tied and name == "lm_head.weight":
            if not _begin_alike(tensors[name], tensors.get("model.embed_tokens.weight")):
                raise ConfigError(
                    f"{tensors[name].file}: {name} is not the embedding, which config.json makes "
                    "it; write tie_word_embeddings=false there"
                )
            names_by_reason["the head, which is the embedding"].append(name)
        else:
            raise ConfigError(
                f"{tensors[name].file}: {name} is not a tensor of such a model; the weights are of "
                "another family or another version of it"
            )
    for reason, names in names_by_reason.items():
        yield f"{folder}: {len(names)} tensors are left out, {reason}: {', '.join(names[:3])}"


def _begin_alike(a: Tensor, b: Tensor | None) -> bool:
    if b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return np.array_equal(*(tensor.read(0, min(16, tensor.rows)) for tensor in (a, b)))


def _check_tensors(
    weights: list[NamedWeight], tensors: Mapping[str, Tensor], vocab_size: int, folder: str
) -> None:
    """Refuses tensors that are missing, of another shape, or of a dtype that weights never have.

    The folder has `vocab_size` rows of embedding and head; ours may have more, for new tokens.
    """
    for weight in weights:
        expected = weight.form.tensor_shape
        if weight.form.groups[0] == "V":
            expected = min(vocab_size, expected[0]), *expected[1:]
        for name in weight.names.values():
            if name not in tensors:
                remedy = "fetch it again"
                if name == "lm_head.weight":
                    remedy = "save the model with its head (transformers' AutoModelForCausalLM)"
                raise ConfigError(
                    f"{folder}: has no tensor {name}, which config.json's model has; {remedy}"
                )
            tensor = tensors[name]
            if tensor.shape != expected:
                raise ConfigError(
                    f"{tensor.file}: {name} is {list(tensor.shape)}, but the config makes it "
                    f"{list(expected)}; give the keys it was trained with"
                )
            if tensor.dtype not in DTYPES:
                raise ConfigError(
                    f"{tensor.file}: {name} is {tensor.dtype}; weights are read in "
                    f"{', '.join(DTYPES)}: give the model before it was quantized"
                )


def _has_inputs_first(weight: NamedWeight, tensors: Mapping[str, Tensor]) -> bool:
    first = next(iter(weight.names.values()), "")
    return first in tensors and tensors[first].inputs_first


def prepare_load(
    folder: str,
    tensors: Mapping[str, Tensor],
    vocab_size: int,
    model: Decoder,
    decoder_block: str,
    note: Callable[[str], None],
    layers: Sequence[int] = (),
    dense_block: str = "",
) -> Callable[[], Decoder]:
    """Refuses a folder without all weights of an abstract `model`, or with those of another;
    returns what reads them on its mesh, called once by all processes together.

    Args:
      folder: where `tensors` lie, for messages.
      vocab_size: rows of embedding and head that the folder has.
      decoder_block: the family of `model`; `dense_block` is the folder's, if it is another.
      note: takes a line about tensors that belong to no weight.
      layers: those that have tensors, none = all; the others are zeros.
      dense_block: the folder's family, if its dense MLP becomes every expert; routers are then new.
    """
    weights = list(name_tensors(order_by_layer(model), decoder_block, layers, dense_block))
    weights = [
        weight.turn() if _has_inputs_first(weight, tensors) else weight for weight in weights
    ]
    _check_tensors(weights, tensors, vocab_size, folder)
    used = {name for weight in weights for name in weight.names.values()}
    side_prefix = FAMILIES[decoder_block].released.side_prefix.format(len([*model.pattern.main]))
    for line in quantized.describe(folder, tensors):
        note(line)
    copies = {*itertools.chain(*name_copies(model, decoder_block).values())}
    tensors = {name: x for name, x in tensors.items() if name not in copies}
    for line in _describe_left_out(folder, tensors, used, model.tied, side_prefix):
        note(line)
    return functools.partial(_load, tensors, model, weights)


def _load(tensors: Mapping[str, Tensor], model: Decoder, weights: Sequence[NamedWeight]) -> Decoder:
    """Reads tensors that passed `_check_tensors` into the weights of `model`, on all processes
    together."""
    structure = jax.tree.structure(order_by_layer(model))
    with ThreadPoolExecutor() as pool, jax.set_mesh(mesh_of(model)):
        arrays = list(map(_initial_array, weights))
        steps = []
        for number, weight in enumerate(weights):
            transfer = _Transfer.from_weight(weight)
            for index, name in weight.names.items():
                steps.append((tensors[name], transfer, number, index))
        for wait, tensor, transfer, number, index in _read_ahead(steps, pool):
            x_NR, form = wait(), weights[number].form
            arrays[number] = _put(arrays[number], x_NR, index, form, tensor.rows, transfer)
            del x_NR
            jax.block_until_ready(arrays[number])  # programs that wait would hold their parts
    return order_by_stage(structure.unflatten(arrays), model)


def _read_ahead(steps: Sequence[tuple], pool: Executor) -> Iterator[tuple]:
    """Yields steps (tensor, transfer, ...), each behind a function that waits for its rows.

    Meanwhile the next ones are read, up to the size of the largest tensor in all. `steps` is not
    empty.
    """
    sizes = [math.prod(tensor.shape) for tensor, *_ in steps]
    limit, waiting, total = max(sizes), collections.deque(), 0
    for (tensor, transfer, *more), size in zip(steps, sizes, strict=True):
        waiting.append((size, (transfer.begin(tensor, pool), tensor, transfer, *more)))
        total += size
        while total > limit:
            size, step = waiting.popleft()
            total -= size
            yield step
    yield from (step for _, step in waiting)


def _initial_array(weight: NamedWeight) -> jax.Array:
    """Makes zeros, which tensors replace, or random values for a router that has no tensor."""
    (like,) = jax.tree.leaves(weight.weight)

    def make() -> jax.Array:
        if weight.names or weight.weight.role != "router":
            return jnp.zeros(like.shape, like.dtype)
        x = jax.random.truncated_normal(jax.random.key(0), -2, 2, like.shape)
        return (x * like.shape[-2] ** -0.5).astype(like.dtype)

    return jax.jit(make, out_shardings=like.sharding)()


@dataclasses.dataclass(frozen=True)
class _Transfer:
    """Which rows of a tensor every device reads, and how they travel to their shards."""

    mesh: Mesh
    split: tuple[tuple[str, ...], ...]  # the mesh axes that cut each axis of the tensor at last
    axes: tuple[str, ...]  # all mesh axes: rows are cut over them, in this order

    @classmethod
    def from_weight(cls, weight: NamedWeight) -> Self:
        """Finds the transfer of one layer of a weight, by the sharding that it has at last."""
        (array,) = jax.tree.leaves(weight.weight)
        spec = array.sharding.spec.partitions + (None,) * array.ndim
        spec = spec[len(weight.weight.leading) :]  # of one layer
        parts = [spec[weight.form.axes.index(group[0])] for group in weight.form.groups]
        if weight.form.blocks:  # whole heads lie in several places
            parts[0] = None
        split = tuple((part,) if isinstance(part, str) else part or () for part in parts)
        # What cuts the rows at last comes first, and what cuts the other axis last: so parts are
        # exchanged along that one, and joined along the others.
        first, last = split[0], tuple(itertools.chain(*split[1:]))
        axes = (*first, *(axis for axis in AXES if axis not in (*first, *last)), *last)
        return cls(mesh_of(weight.weight), split, axes)

    @property
    def partitions(self) -> tuple[tuple[str, ...] | None, ...]:
        return tuple(axes or None for axes in self.split)

    def begin(self, tensor: Tensor, pool: Executor) -> Callable[[], jax.Array]:
        """Begins to read the rows of this host's devices in `pool`; returns what waits for them, on
        all processes, and raises what reading raised.

        That gives the tensor [N * r, ...] on all devices, with zeros behind its last row.
        """
        r, rest = math.ceil(tensor.rows / self.mesh.size), tensor.shape[1:]
        shape = r * self.mesh.size, *rest
        sharding = NamedSharding(self.mesh, axes_spec(self.axes, *(None for _ in rest)))

        def read(index: tuple[slice, ...]) -> np.ndarray:
            first, stop, _ = index[0].indices(shape[0])
            rows = tensor.read(min(first, tensor.rows), min(stop, tensor.rows))
            missing = np.zeros((r - len(rows), *rest), rows.dtype)
            return np.concatenate([rows, missing]) if len(missing) else rows

        devices = sharding.addressable_devices_indices_map(shape)
        pending = [(pool.submit(read, index), device) for device, index in devices.items()]
        return lambda: jax.make_array_from_single_device_arrays(
            shape, sharding, [jax.device_put(rows.result(), device) for rows, device in pending]
        )

    def join_rows(self, x_NR: jax.Array, rows: int, num_rows: int) -> jax.Array:
        """Returns the tensor of `begin`, which has `rows`, cut as `split` says; traced.

        If it shall have more rows, `num_rows`, new ones are the mean of the others.
        """
        row_axes, *rest = self.partitions
        others = tuple(a for a in self.axes if a not in itertools.chain(*self.split[1:]))
        x = jax.reshard(x_NR, axes_spec(others, *rest))
        if len(x) != num_rows or rows != num_rows:
            x = jax.reshard(x, axes_spec(None, *rest))[:rows]
            if rows < num_rows:
                mean = jnp.mean(x.astype(jnp.float32), axis=0, keepdims=True).astype(x.dtype)
                new = jnp.broadcast_to(mean, (num_rows - rows, *x.shape[1:]))
                x = jnp.concatenate([x, new])
        return jax.reshard(x, axes_spec(row_axes, *rest))


@functools.partial(jax.jit, static_argnums=(3, 4, 5), donate_argnums=0)
def _put(
    stack: jax.Array,
    x_NR: jax.Array,
    index: tuple[int, ...],
    form: Form,
    rows: int,
    transfer: _Transfer,
) -> jax.Array:
    """Returns a stack [L, ...] or [L, E, ...], which is donated, with one more tensor at `index`;
    or the weight, if the tensor is all of it (index ())."""
    x = transfer.join_rows(x_NR, rows, form.tensor_shape[0])
    # Only the first letter of a tensor's axis is sharded here, so a reshape moves nothing.
    first = dict(zip((group[0] for group in form.groups), transfer.partitions, strict=True))
    letters = [form.axes[i] for i in form.order]
    if form.blocks:
        x = x.at[form.rows].get(out_sharding=axes_spec(*transfer.partitions))
    x = jax.lax.reshape(x, form.split, out_sharding=axes_spec(*map(first.get, letters)))
    x = x.transpose([letters.index(letter) for letter in form.axes]).astype(stack.dtype)
    if not index:
        return x
    # As bits, which only move: XLA for CPUs turns a whole bfloat16 stack into float32 and back.
    dtype, bits = stack.dtype, np.dtype(f"u{stack.dtype.itemsize}")
    stack, x = (jax.lax.bitcast_convert_type(y, bits) for y in (stack, x))
    spec = jax.typeof(stack).sharding.spec
    axes, own_spec = spec.partitions[: len(index)], unstack_spec(spec, len(index))

    def put(stack: jax.Array, x: jax.Array, *index: jax.Array) -> jax.Array:
        own = [own_index(*each) for each in zip(index, stack.shape, axes, strict=False)]

        def update(stack: jax.Array) -> jax.Array:
            start = *own, *(0 for _ in x.shape)
            return jax.lax.dynamic_update_slice(stack, x[(None,) * len(own)], start)

        # An update is done in place, also by a device that may have nothing to do; one that reads
        # what it replaces would copy the stack.
        if not any(axes):
            return update(stack)
        is_own = jnp.array([i < size for i, size in zip(own, stack.shape, strict=False)]).all()
        return jax.lax.cond(is_own, update, lambda stack: stack, stack)

    specs = spec, own_spec, *(REPLICATED for _ in index)
    x = jax.reshard(x, own_spec)
    stack = map_shards(put, specs, spec)(stack, x, *map(jnp.int32, index))
    return jax.lax.bitcast_convert_type(stack, dtype)
