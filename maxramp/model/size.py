"""The cost of a model: weights, FLOPs, and the memory of a pass. Imports no JAX."""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

from maxramp.model.families.table import FAMILIES, layer_pattern
from maxramp.model.keys import BYTES, ModelKeys
from maxramp.model.mixers.table import MIXER_FACTS, MixerFacts
from maxramp.model.pattern import Layer
from maxramp.parallel.axes import SHARD_AXES
from maxramp.stage import StageSpec


class LayerSizes(NamedTuple):
    """The sizes of a layer for one token, from which FLOPs and memory follow."""

    mixer: MixerFacts
    reads: Mapping[str, int]  # as in `MixerFacts`, of all weights
    writes: Mapping[str, int]
    inside: Mapping[str, tuple[int, int]]
    activations: int  # numbers between the products of the MLP

    @classmethod
    def from_keys(cls, keys: ModelKeys, layer: Layer) -> Self:
        family, width, router = FAMILIES[keys.decoder_block], keys.base_mlp_dim, {}
        mixer = MIXER_FACTS[layer.mixer].from_keys(keys, family)
        if layer.is_sparse:
            width = keys.moe_mlp_dim * (keys.num_experts_per_tok + keys.shared_experts)
            router = {"router": keys.num_experts + family.gates_shared}
        reads = {**mixer.reads, "gate_proj": width, "up_proj": width, **router}
        writes = {**mixer.writes, "down_proj": width}
        return cls(mixer, reads, writes, mixer.inside, 2 * width)

    def results(self, tensor: int) -> float:
        """Counts the numbers of a token that products make on each of `tensor` devices, but for
        those of the residual stream."""
        total = sum(self.reads.values()) + sum(outputs for _, outputs in self.inside.values())
        whole = sum(self.reads.get(name, 0) for name in self.mixer.whole)
        return whole + (total - whole) / tensor


def sharded_widths(keys: ModelKeys) -> dict[tuple[str, ...], dict[str, int]]:
    """Returns the widths that are split over mesh axes, by these axes and then by key; the product
    of the axes' sizes must divide each."""
    mixers = [MIXER_FACTS[layer.mixer] for layer in layer_pattern(keys)]
    tensor = *(name for facts in mixers for name in facts.tensor_keys), "base_emb_dim", "vocab_size"
    shards = "base_emb_dim", *(name for facts in mixers for name in facts.shard_keys)
    if keys.base_moe_mlp_dim != -1:
        tensor += ("base_moe_mlp_dim",)
    if keys.base_moe_mlp_dim == -1 or keys.first_num_dense_layers:
        tensor += ("base_mlp_dim",)
    axes = {("expert",): ("num_experts",), SHARD_AXES: shards, ("tensor",): tensor}
    return {axis: {name: getattr(keys, name) for name in names} for axis, names in axes.items()}


def describe_weights(total: int, active: int, form: Callable[[int], str] = "{:,}".format) -> str:
    """Returns the number of weights, and of those active for a token if they are fewer."""
    share = f", {form(active)} of them for a token" if active < total else ""
    return f"{form(total)} weights{share}"


def training_flops_per_token(keys: ModelKeys, tokens: int) -> float:
    """Counts a training step's FLOPs per token of a row of `tokens` > 0, without those of remat.

    They are 6 for each active weight of a matrix product (4 if it is frozen), and three times those
    of mixers without weights (PaLM, arXiv 2204.02311, appendix B; MaxText). The embedding's lookup
    is not one.
    """
    D, drafts, adapters, mixed = keys.base_emb_dim, keys.mtp_num_layers, 0, 0
    products = (1 + drafts) * D * keys.vocab_size + drafts * 2 * D * D
    for layer, count in Counter(layer_pattern(keys)).items():
        sizes = LayerSizes.from_keys(keys, layer)
        widths = {**sizes.reads, **sizes.writes}
        matrices = {name: (D, width) for name, width in widths.items()} | sizes.inside
        products += count * sum(map(math.prod, matrices.values()))
        adapted = (sum(matrices[name]) for name in keys.lora_modules if name in matrices)
        adapters += count * keys.lora_rank * sum(adapted)
        mixed += count * sizes.mixer.row_products(tokens, layer.mixing(keys))
    if keys.lora_rank:  # 4 for each frozen weight: it has no gradient
        products = products * 4 / 6 + adapters
    return 6.0 * products + 6.0 * (mixed / tokens)


def pipeline_ticks(microbatches: int, stages: int, repeats: int) -> int:
    """Counts the ticks of a pass in a pipeline: microbatches * repeats with work for a stage, the
    others are the bubble (Narayanan et al., arXiv 2104.04473, section 2.2)."""
    return microbatches * repeats + stages - 1


def pipeline_bubble(keys: ModelKeys, spec: StageSpec) -> float:
    """Returns the share of a pass in which a stage of the pipeline idles, 0 without one, of
    resolved keys: the formula of `pipeline_ticks`."""
    work = spec.pipeline_microbatches * keys.num_pipeline_repeats
    return 1 - work / pipeline_ticks(work, spec.mesh.pipeline_stages, 1)


def loss_blocks(tokens: int, block_tokens: int, width: int, itemsize: int) -> tuple[int, int, int]:
    """Cuts a device's loss over `tokens` > 0, of the model's `width`, into blocks of at most
    block_tokens (0 = all). Returns the number of groups, the blocks of each, and the tokens of a
    block; the last one is padded. The gradients of a group's logits, `itemsize` bytes each, are no
    larger than the float32 sum of their product, if it has several blocks; but one group has all of
    them where that takes no more memory, as it needs one such sum less."""
    count = math.ceil(tokens / (block_tokens or tokens))
    size = math.ceil(tokens / count)

    def room(blocks: int) -> int:
        return blocks * size * itemsize + 4 * width * (1 if blocks == count else 2)

    most = max(1, 4 * width // itemsize * count // tokens)
    blocks = max(n for n in range(1, min(most, count) + 1) if count % n == 0)
    blocks = count if room(count) <= room(blocks) else blocks
    return count // blocks, blocks, size


def pass_bytes(
    keys: ModelKeys, spec: StageSpec, loss_block_tokens: int, platform: str | None = None
) -> float:
    """Estimates the bytes that a device of a platform (None: of any) keeps of a pass for its
    backward pass, and for logits; `keys` are resolved, without -1."""
    tokens, tensor = spec.device_tokens, spec.mesh.sizes["tensor"]
    D, stages = keys.base_emb_dim, spec.mesh.pipeline_stages
    itemsize, counts = BYTES[keys.dtype], Counter(layer_pattern(keys))
    layer_sizes = {layer: LayerSizes.from_keys(keys, layer) for layer in counts}
    kept = {layer: _kept_bytes(one, keys, spec, platform) for layer, one in layer_sizes.items()}
    passing = 0.0
    for layer in (layer for layer in counts if layer.is_sparse):
        more, passing = _expert_bytes(keys, spec)
        kept[layer] = {name: size + more[name] for name, size in kept[layer].items()}
    everything = max(sizes["none"] for sizes in kept.values())
    policy, recomputed = spec.remat_policy, 0 if spec.remat_policy == "none" else everything
    groups, blocks, block = loss_blocks(math.ceil(tokens), loss_block_tokens, D, itemsize)
    sums = 4 * D * (2 if groups > 1 else 1)  # all groups', and the product that is added to them
    logits = (block * (2 * 4 + blocks * itemsize) + sums) * keys.vocab_size / tensor
    share, slots = 1, 0.0
    if stages > 1:  # idle ticks keep as much as others; inputs and results wait in slots
        share = 1 - pipeline_bubble(keys, spec)
        slots = 2 * tokens * D * itemsize
        at_once = 1
        if policy == "none":  # a tick keeps its products, and is recomputed as a whole
            policy, at_once = "minimal_with_context", keys.num_layers_per_pipeline_stage
        recomputed = at_once * everything * stages / spec.pipeline_microbatches
    layers = sum(count / share * kept[layer][policy] for layer, count in counts.items())
    # What the join of a draft reads: the vectors of two tokens, and these behind their norms.
    layers += keys.mtp_num_layers * 2 * tokens * D * itemsize * (1 + 1 / tensor)
    return layers + max(recomputed + passing, logits) + slots


def _expert_bytes(keys: ModelKeys, spec: StageSpec) -> tuple[dict[str, float], float]:
    """Returns the bytes that experts add on a device. For each layer, by remat policy: rows sorted
    by expert (as many as can reach one device along `expert`) and their results. While one layer's
    backward pass runs: the weights of a device's experts, gathered over fsdp, their gradient, and
    that of the rows."""
    sizes, itemsize = spec.mesh.sizes, BYTES[keys.dtype]
    tokens = spec.device_tokens
    own, k = keys.num_experts // sizes["expert"], keys.num_experts_per_tok
    D, F = keys.base_emb_dim, keys.moe_mlp_dim
    rows = tokens * sizes["expert"] * min(k, own)
    stream = rows * D * itemsize
    products = stream + 2 * (rows - tokens * k) * F / sizes["tensor"] * itemsize
    more = {"full": 0, "minimal": products, "minimal_with_context": products}
    more["none"] = 2 * products  # what is sent, and what lies between the products
    matrix = own * D * F / sizes["tensor"] * itemsize
    return more, stream + (4 * matrix if sizes["fsdp"] * sizes["context"] > 1 else 0)


def _kept_bytes(
    sizes: LayerSizes, keys: ModelKeys, spec: StageSpec, platform: str | None
) -> dict[str, float]:
    """Returns the bytes that a device keeps of one layer and pass for the backward pass, by
    remat_policy."""
    tokens, tensor = spec.device_tokens, spec.mesh.sizes["tensor"]
    itemsize = BYTES[keys.dtype]
    stream = tokens * keys.base_emb_dim * itemsize
    context, mixed = sizes.mixer.kept_bytes(keys, spec, platform)
    products = tokens * sizes.results(tensor) * itemsize
    activations = tokens * sizes.activations / tensor * itemsize
    norms = 2 * tokens * keys.base_emb_dim * 4
    everything = 4 * stream + norms + products + mixed + activations
    shard = stream / tensor  # the residual stream between the products
    minimal = 3 * shard + products
    return {
        "full": shard,
        "minimal": minimal,
        "minimal_with_context": minimal + context,
        "none": everything,
    }
