"""Layers, keys and tensors of families of experts. Imports no JAX."""

from collections.abc import Iterable, Mapping

from maxramp.keys.section import Relations
from maxramp.model.families.llama import LAYER, attend_window
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import Layer, Pattern

EXPERT_KEYS = (
    *("num_experts", "num_experts_per_tok", "base_moe_mlp_dim", "load_balance_loss_weight"),
    *("load_balance_loss_scope", "router_z_loss_weight", "capacity_factor", "expert_dispatch"),
    "grouped_matmul",
)


def pattern(keys: ModelKeys) -> Pattern:
    """Returns the pattern of first_num_dense_layers dense layers, then layers of experts, at least
    one (`check`)."""
    sums = {
        "load_balance_loss": keys.load_balance_loss_weight,
        "router_z_loss": keys.router_z_loss_weight,
        "dropped_share": keys.capacity_factor > 0,
    }
    sums = tuple(name for name, is_used in sums.items() if is_used)
    sparse = Layer("sparse", attend_window, sums, (("expert_load", (keys.num_experts,)),))
    dense = keys.first_num_dense_layers
    return Pattern(
        (sparse,), keys.base_num_decoder_layers - dense, (Layer("dense", attend_window),) * dense
    )


def check(
    keys: ModelKeys, others: Iterable[str] = ("q_proj", "k_proj", "v_proj", "o_proj")
) -> Relations:
    """Yields the relations of these families; `others` are the matrices beside experts."""
    experts, chosen = keys.num_experts, keys.num_experts_per_tok
    groups, open_groups = keys.n_routing_groups, keys.topk_routing_group
    yield (
        experts < 2,
        f"num_experts={experts}: decoder_block={keys.decoder_block} has experts; give 2 or more, "
        "or a family without them",
    )
    yield (
        chosen > experts,
        f"num_experts_per_tok={chosen} of num_experts={experts}: a token takes each once; give "
        f"{experts} or fewer",
    )
    dense = keys.first_num_dense_layers
    yield (
        dense >= keys.base_num_decoder_layers,
        f"first_num_dense_layers={dense} of base_num_decoder_layers={keys.base_num_decoder_layers} "
        "leaves no layer of experts; give fewer",
    )
    size = experts // max(1, groups)
    is_odd = min(groups, open_groups) < 1 or experts % groups or open_groups > groups
    yield (
        {groups, open_groups} != {-1} and (is_odd or size < 2 or open_groups * size < chosen),
        f"n_routing_groups={groups} topk_routing_group={open_groups}: give both or neither (-1); "
        f"groups are equal parts of the num_experts={experts}, of 2 or more, and those of a token "
        f"hold its num_experts_per_tok={chosen}",
    )
    adapted = {"gate_proj", "up_proj", "down_proj"}.intersection(keys.lora_modules)
    yield (
        keys.lora_rank and adapted,
        f"lora_targets={list(keys.lora_targets)}: experts have no adapters; use "
        f"lora_targets=[{','.join(others)}]",
    )


# The fields of a `Family` that all of these share.
LAYERS = {"pattern": pattern, "check": check}
# The names of keys in config.json, in most of these families.
NAMES = {name: name for name in ("num_experts", "num_experts_per_tok", "norm_topk_prob")}


def dense_tensors(dense: Mapping[str, str]) -> dict[str, str]:
    """Maps a dense model's tensors to experts, all copies of its MLP (arXiv 2212.05055)."""
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
    """Returns the tensors of a model of experts, in which {} is a layer's and then an expert's
    number. `dense` are those of a dense model, `names` the matrices of an expert: gate, up and
    out."""
    shared = {
        path.replace(".dense.", ".sparse."): tensor
        for path, tensor in dense.items()
        if ".mlp." not in path
    }
    own = zip(("gate_EDF", "up_EDF", "out_EFD"), names, strict=True)
    return {
        **shared,
        "layers.sparse.mlp.router.matrix_DE": f"{LAYER}.{router}.weight",
        **{
            f"layers.sparse.mlp.{ours}": f"{LAYER}.{experts}.{{}}.{theirs}.weight"
            for ours, theirs in own
        },
    }
