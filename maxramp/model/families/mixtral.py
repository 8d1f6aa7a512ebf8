"""Mixtral: a Mistral whose MLPs are mixtures of experts (arXiv 2401.04088)."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from maxramp.model.families.family import LayerSizes, Released
from maxramp.model.families.llama import LAYER, LLAMA, see_before
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import Layer, Pattern

EXPERT_KEYS = (
    *("num_experts", "num_experts_per_tok", "base_moe_mlp_dim", "load_balance_loss_weight"),
    *("load_balance_loss_scope", "router_z_loss_weight", "capacity_factor", "grouped_matmul"),
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


def blocks() -> Mapping[str, Callable[..., Any]]:
    from maxramp.model.parts.block import PreNormBlock
    from maxramp.model.parts.experts import Experts

    return {"dense": PreNormBlock, "sparse": functools.partial(PreNormBlock, mlp=Experts)}


def _blocks() -> Mapping[str, Callable[..., Any]]:
    def make(keys: ModelKeys, key: Any) -> Any:  # its weights of a token always add up to 1
        return blocks()["sparse"](dataclasses.replace(keys, norm_topk_prob=True), key)

    return {**blocks(), "sparse": make}


def sizes(keys: ModelKeys, layer: Layer) -> LayerSizes:
    """Of a token, with the experts that it takes."""
    found = LLAMA.sizes(keys, layer)
    if layer.kind == "dense":
        return found
    width = keys.moe_mlp_dim * (keys.num_experts_per_tok + keys.shared_experts)
    mlp = dict.fromkeys(("gate_proj", "up_proj"), width)
    return found._replace(
        reads={**found.reads, **mlp, "router": keys.num_experts},
        writes={**found.writes, "down_proj": width},
        activations=2 * width,
    )


def expert_tensors(experts: str, router: str, names: tuple[str, str, str]) -> dict[str, str]:
    """The tensors of sparse layers, {} a layer's and then an expert's number; `names` are those of
    gate, up and out."""
    dense, sparse = "layers.dense.", "layers.sparse."
    alike = {
        path.replace(dense, sparse): tensor
        for path, tensor in LLAMA.tensors.items()
        if path.startswith(dense) and ".mlp." not in path
    }
    own = ("gate_EDF", "up_EDF", "out_EFD")
    return alike | {
        f"{sparse}mlp.router.matrix_DE": f"{LAYER}.{router}.weight",
        **{
            f"{sparse}mlp.{ours}": f"{LAYER}.{experts}.{{}}.{theirs}.weight"
            for ours, theirs in zip(own, names, strict=True)
        },
    }


MIXTRAL = dataclasses.replace(
    LLAMA,
    pattern=pattern,
    blocks=_blocks,
    sizes=sizes,
    tensors={
        **{path: name for path, name in LLAMA.tensors.items() if ".dense." not in path},
        **expert_tensors("block_sparse_moe.experts", "block_sparse_moe.gate", ("w1", "w3", "w2")),
    },
    released=Released(
        "mixtral",
        "MixtralForCausalLM",
        {"num_key_value_heads": 8},
        {
            "sliding_window_size": "sliding_window",
            "num_experts": "num_local_experts",
            "num_experts_per_tok": "num_experts_per_tok",
        },
    ),
    keys=(*EXPERT_KEYS, "sliding_window_size"),
)
