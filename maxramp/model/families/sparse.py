"""What families of experts share: their layers, keys, sizes and tensors. Imports no JAX."""

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from maxramp.model.families.family import LayerSizes, MlpSizes
from maxramp.model.families.llama import LAYER, LLAMA, see_before
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import Layer, Pattern

EXPERT_KEYS = (
    *("num_experts", "num_experts_per_tok", "base_moe_mlp_dim", "load_balance_loss_weight"),
    *("load_balance_loss_scope", "router_z_loss_weight", "capacity_factor", "expert_dispatch"),
    "grouped_matmul",
)


def pattern(keys: ModelKeys) -> Pattern:
    """Layers of experts, behind dense ones."""
    sums = {
        "load_balance_loss": keys.load_balance_loss_weight,
        "router_z_loss": keys.router_z_loss_weight,
        "dropped_share": keys.capacity_factor > 0,
    }
    sums = tuple(name for name, is_there in sums.items() if is_there)
    sparse = Layer("sparse", see_before, sums, (("expert_load", (keys.num_experts,)),))
    dense = keys.first_num_dense_layers
    return Pattern(
        (sparse,), keys.base_num_decoder_layers - dense, (Layer("dense", see_before),) * dense
    )


def blocks(
    change: Callable[[ModelKeys], ModelKeys] = lambda keys: keys, **attention: Any
) -> Mapping[str, Callable[..., Any]]:
    """Layers whose experts see `change(keys)`, and `attention` with these arguments."""
    from maxramp.model.block import Block
    from maxramp.model.mixers.attention import Attention
    from maxramp.model.parts.experts import Experts

    block = functools.partial(Block, mixer=functools.partial(Attention, **attention))
    experts = functools.partial(block, mlp=lambda keys, key: Experts(change(keys), key))
    return {"dense": block, "sparse": experts}


def sizes(keys: ModelKeys, layer: Layer) -> LayerSizes:
    """Of a token, with the experts that it takes."""
    sizes = LLAMA.sizes(keys, layer)
    if layer.kind == "dense":
        return sizes
    mlp = MlpSizes.from_width(keys.moe_mlp_dim * (keys.num_experts_per_tok + keys.shared_experts))
    mlp = mlp._replace(reads={**mlp.reads, "router": keys.num_experts})
    return sizes._replace(mlp=mlp)


# The fields of a `Family` that are the same in all.
LAYERS = {"pattern": pattern, "sizes": sizes}
# Keys by the names that most of these families have for them.
NAMES = {name: name for name in ("num_experts", "num_experts_per_tok", "norm_topk_prob")}


def dense_tensors(dense: Mapping[str, str]) -> dict[str, str]:
    """The tensors of a dense model as weights of one of experts, each of which is its MLP
    (Komatsuzaki et al., arXiv 2212.05055)."""
    sparse = {path.replace(".dense.", ".sparse."): tensor for path, tensor in dense.items()}
    for ours, theirs in (("gate_DF", "gate_EDF"), ("up_DF", "up_EDF"), ("out_FD", "out_EFD")):
        sparse[f"layers.sparse.mlp.{theirs}"] = sparse.pop(f"layers.sparse.mlp.{ours}")
    return {**dense, **sparse}


def tensors(
    dense: Mapping[str, str],
    router: str = "mlp.gate",
    experts: str = "mlp.experts",
    names: Iterable[str] = ("gate_proj", "up_proj", "down_proj"),
) -> dict[str, str]:
    """The tensors of a model whose MLPs are experts, {} a layer's and then an expert's number.
    `dense` are those of a dense model, `names` those of an expert's gate, up and out."""
    found = {
        path.replace(".dense.", ".sparse."): tensor
        for path, tensor in dense.items()
        if ".mlp." not in path
    }
    own = zip(("gate_EDF", "up_EDF", "out_EFD"), names, strict=True)
    return {
        **found,
        "layers.sparse.mlp.router.matrix_DE": f"{LAYER}.{router}.weight",
        **{
            f"layers.sparse.mlp.{ours}": f"{LAYER}.{experts}.{{}}.{theirs}.weight"
            for ours, theirs in own
        },
    }
