"""Estimates how long a step takes on a mesh, to rank meshes before a compiler is asked.

    step = (products + attention + memory) / (1 - bubble) + weights + copies + tensor + experts
           + context + stages

n is `StageSpec.device_tokens`, the tokens of a pass on a device; p passes make a step; r and a are
the shares of a forward pass's products and attention that the backward pass computes again
(`_RECOMPUTED`):

    products   6 + 2r FLOPs for each active weight and token, at `flops`
    attention  (9 + 2a) / 6 of the FLOPs of the scores as they are counted, at `flops`; 7 for 9 in
               cuDNN's kernel, which all_gather has no use of
    memory     bytes for a byte of the residual stream, of products' results, and of a row of
               experts that nothing fills: (3 + r) / 4 of 18, 16 and `room`, at `memory`
    bubble     share of a pass in which a pipeline's stages idle
    weights    p x (2 gathers and a scattered gradient) of the weights that fsdp, expert and context
               shard; in every tick of a pipeline, unless pipeline_fsdp_ag_once; without what runs
               beside products
    copies     one sum of the gradients over data, behind the passes
    tensor     p x (9 + 4r) gathers or scatters of [n, D] a layer
    experts    p x (4 + r) exchanges of a token's k copies, or gathers of all tokens, a layer
    context    p x (2 + r) exchanges of queries, keys, values and results (ulysses), or 2.5 + r
               gathers of keys and values, a layer
    stages     p x 2 x [n, D] to the next stage, in every tick

A transfer of N bytes in a group of g devices on s nodes (or slices) brings (g - s) / g N over the
links inside one and (s - 1) / g N over the network; the slower decides. Numbers that follow from
no shape were read off programs that the TPU compiler made for Llama 3 8B, Mixtral and Qwen3 30B-A3B
(docs/experts.md, docs/context.md).
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import jax

from maxramp.model.families.table import layer_pattern
from maxramp.model.keys import BYTES, ModelKeys
from maxramp.model.mixers.table import MIXER_FACTS
from maxramp.model.parts.attention import select_for
from maxramp.model.parts.weights import Weight, weights_of
from maxramp.model.size import (
    LayerSizes,
    pass_bytes,
    pipeline_bubble,
    pipeline_ticks,
    training_flops_per_token,
)
from maxramp.parallel.axes import AXES, COPY_AXES
from maxramp.parallel.keys import MeshKeys
from maxramp.parallel.mesh import abstract_mesh, bytes_per_device
from maxramp.planning.machine import Machine
from maxramp.stage import StageSpec
from maxramp.training.device_memory import GIB
from maxramp.training.keys import Recipe
from maxramp.training.state import abstract_state

# Shares of the forward pass's products and attention that the backward pass computes again.
_RECOMPUTED = {
    "none": (0.3, 0),
    "minimal_with_context": (0.6, 0),
    "minimal": (0.65, 1),
    "full": (0.8, 1),
}
# As `memory` above says.
_STREAM, _RESULT = 18, 16


class Shard(NamedTuple):
    """How weights lie: on `axes`, gathered over `gathered` where a product reads them."""

    axes: frozenset[str]
    gathered: frozenset[str]
    is_trained: bool
    is_expert: bool


class StepEstimate(NamedTuple):
    """The estimate of a step: seconds by the names above, and GiB of a device."""

    parts: dict[str, float]
    gib: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())


def _shard(weight: Weight, is_trained: bool) -> Shard:
    """Returns how a weight lies, by its spec on a mesh that has every axis."""
    (x,) = jax.tree.leaves(weight)
    parts = [part if isinstance(part, tuple) else (part,) for part in x.sharding.spec if part]
    axes = {axis for part in parts for axis in part}
    gathered = {axis for part in parts if "fsdp" in part for axis in part}
    stage = {"stage"} if "L" in weight.leading else set()
    return Shard(frozenset(axes | stage), frozenset(gathered), is_trained, "E" in weight.leading)


class CostModel:
    """Estimates the steps of a recipe on a machine with `rates`, one by name."""

    def __init__(self, recipe: Recipe, machine: Machine):
        self._block, self._rates = recipe.loss.loss_block_tokens, machine.rates
        self._platform = machine.devices[0].platform
        state = abstract_state(recipe, abstract_mesh(dict.fromkeys(AXES, 1)))
        self._elements, self._bytes = Counter(), Counter()
        for part in (state.trained, state.frozen):
            for weight in weights_of(part):
                shard, (x,) = _shard(weight, part is state.trained), jax.tree.leaves(weight)
                copy = 0 if x.dtype == recipe.model.dtype else BYTES[recipe.model.dtype]
                self._elements[shard] += x.size
                self._bytes[shard] += x.size * (x.dtype.itemsize + copy + 4 * shard.is_trained)
        trained = sum(n for shard, n in self._elements.items() if shard.is_trained)
        self._optimizer_bytes = bytes_per_device(state.opt_state) / trained  # for each weight

    def step(self, model: ModelKeys, spec: StageSpec) -> StepEstimate:
        """Estimates a step; `model` is resolved for the mesh of `spec`."""
        again, _ = _RECOMPUTED[spec.remat_policy]
        rates, idle = self._rates, 1 / (1 - pipeline_bubble(model, spec))
        devices = math.prod(spec.mesh.sizes.values())
        tokens = spec.samples * spec.tokens / devices
        products = training_flops_per_token(model, 1)
        scores = training_flops_per_token(model, spec.row_length) - products
        parts = {
            "products": tokens * products * (3 + again) / 3 / rates.flops * idle,
            "attention": tokens * scores * self._score_share(model, spec) / rates.flops * idle,
            "memory": self._activation_bytes(model, spec) * (3 + again) / 4 / rates.memory * idle,
        }
        wait, beside = self._weight_waits(model, spec)
        parts["weights"] = wait - min(beside, sum(parts.values()))
        parts["copies"] = self._copy_waits(spec.mesh)
        for name, wait in self._activation_waits(model, spec, again):
            parts[name] = spec.accumulation * wait
        return StepEstimate(parts, self.gib(model, spec))

    def _score_share(self, model: ModelKeys, spec: StageSpec) -> float:
        """Returns the FLOPs of attention's kernels for one of the scores as they are counted."""
        sizes = spec.mesh.sizes
        strategy = model.context_strategy(sizes["tensor"], sizes["context"])
        is_whole = sizes["context"] == 1 or strategy == "ulysses"
        is_cudnn = is_whole and select_for(model, self._platform) == "cudnn_flash"
        return ((7 if is_cudnn else 9) + 2 * _RECOMPUTED[spec.remat_policy][1]) / 6

    def _group(self, mesh: MeshKeys, *axes: str) -> tuple[int, float]:
        """Counts the devices of a group along axes, and the nodes or slices that they are on: on
        average, a fraction where some groups lie on fewer."""
        devices, nodes, inner = 1, 1.0, 1
        for axis, size in reversed(mesh.sizes.items()):
            if axis in axes:
                devices *= size
                node = self._rates.node
                crossed = inner * size / node if node else mesh.slices[axis]
                nodes *= max(1, min(size, crossed))
            inner *= size
        return devices, nodes

    def _wait(self, size: float, mesh: MeshKeys, *axes: str) -> float:
        """Returns how long a device waits for its part of `size` bytes, gathered or scattered."""
        devices, nodes = self._group(mesh, *axes)
        inside = (devices - nodes) / devices * size / self._rates.links
        return max(inside, (nodes - 1) / devices * size / self._rates.network)

    def _activation_bytes(self, model: ModelKeys, spec: StageSpec) -> float:
        """Counts the bytes of activations that a step moves in a device's memory."""
        sizes, D = spec.mesh.sizes, model.base_emb_dim
        numbers, own = 0.0, model.num_experts // sizes["expert"]
        for layer, count in Counter(layer_pattern(model)).items():
            widths = LayerSizes.from_keys(model, layer)
            tensor = sizes["tensor"]
            results = widths.results(tensor) + D * len(widths.writes) / tensor
            numbers += count * (_STREAM * D + _RESULT * results)
            if layer.is_sparse:
                k = model.num_experts_per_tok
                room = sizes["expert"] * min(k, own) - k
                numbers += count * room * self._rates.room * (D + model.moe_mlp_dim / tensor)
        return spec.accumulation * spec.device_tokens * numbers * BYTES[model.dtype]

    def _weight_waits(self, model: ModelKeys, spec: StageSpec) -> tuple[float, float]:
        """Returns the seconds of a step in which weights are gathered, twice a pass, and their
        gradients scattered, once, in the dtype of arithmetic; and those that may run beside
        products."""
        sizes, itemsize, total, beside = spec.mesh.sizes, BYTES[model.dtype], 0.0, 0.0
        repeats, stages = model.num_pipeline_repeats, spec.mesh.pipeline_stages
        ticks = 1.0
        if stages > 1 and not model.pipeline_fsdp_ag_once:
            ticks = pipeline_ticks(spec.pipeline_microbatches, stages, repeats) / repeats
        for shard, count in self._elements.items():
            share = count / math.prod(sizes[axis] for axis in shard.axes - shard.gathered)
            times = 3 if shard.is_trained else 2
            wait = self._wait(times * itemsize * share, spec.mesh, *shard.gathered)
            wait *= spec.accumulation * (ticks if "stage" in shard.axes else 1)
            total += wait
            beside += wait * (self._rates.hidden_experts if shard.is_expert else self._rates.hidden)
        return total, beside

    def _copy_waits(self, mesh: MeshKeys) -> float:
        """Returns the seconds of a step that wait for the sum of float32 gradients over copies.
        One pass sums in the dtype of arithmetic: then bfloat16 waits up to half as long."""
        return sum(
            self._wait(
                2 * 4 * count / math.prod(mesh.sizes[axis] for axis in shard.axes),
                mesh,
                *(axis for axis in COPY_AXES if axis not in shard.axes),
            )
            for shard, count in self._elements.items()
            if shard.is_trained
        )

    def _activation_waits(
        self, model: ModelKeys, spec: StageSpec, again: float
    ) -> Iterator[tuple[str, float]]:
        """Yields the waits of a pass for activations, by name, in seconds."""
        mesh, itemsize = spec.mesh, BYTES[model.dtype]
        sizes, layers = mesh.sizes, [*layer_pattern(model)]
        stream = spec.device_tokens * model.base_emb_dim * itemsize
        yield "tensor", len(layers) * (9 + 4 * again) * self._wait(stream, mesh, "tensor")
        experts, k = sizes["expert"], model.num_experts_per_tok
        automatic = min(k, experts) if self._platform == "tpu" else experts
        sent = {"ragged": k, "gather": experts}.get(model.expert_dispatch, automatic)
        counting = sum(layer.is_sparse for layer in layers)
        yield "experts", counting * (4 + again) * self._wait(sent * stream, mesh, "expert")
        facts = (MIXER_FACTS[layer.mixer] for layer in layers)
        size = sum(each.context_bytes(model, spec, again) for each in facts)
        yield "context", self._wait(size, mesh, "context")
        stages, parts = sizes["stage"], spec.pipeline_microbatches
        if stages > 1:
            ticks = pipeline_ticks(parts, stages, model.num_pipeline_repeats)
            network = self._group(mesh, "stage")[1] > 1
            rate = self._rates.network if network else self._rates.links
            yield "stages", 2 * stream * stages / parts * ticks / rate

    def gib(self, model: ModelKeys, spec: StageSpec) -> float:
        """Adds up weights, optimizer, gradients and a pass, as `planning.plan.estimate` does."""
        sizes = spec.mesh.sizes
        state = sum(
            (self._bytes[shard] + count * self._optimizer_bytes * shard.is_trained)
            / math.prod(sizes[axis] for axis in shard.axes)
            for shard, count in self._elements.items()
        )
        return (state + pass_bytes(model, spec, self._block, self._platform)) / GIB
