"""The families by the values of `decoder_block`. Imports no JAX."""

from collections.abc import Mapping
from typing import Any

from maxramp.keys.section import Relations
from maxramp.model.families.dots1 import DOTS1
from maxramp.model.families.family import Family
from maxramp.model.families.gemma2 import GEMMA2
from maxramp.model.families.gemma3 import GEMMA3
from maxramp.model.families.llama import LLAMA
from maxramp.model.families.mistral import MISTRAL
from maxramp.model.families.mixtral import MIXTRAL
from maxramp.model.families.olmo2 import OLMO2
from maxramp.model.families.olmo3 import OLMO3
from maxramp.model.families.olmoe import OLMOE
from maxramp.model.families.qwen2 import QWEN2
from maxramp.model.families.qwen3 import QWEN3
from maxramp.model.families.qwen3_moe import QWEN3_MOE
from maxramp.model.keys import ModelKeys

FAMILIES: dict[str, Family] = {
    "llama2": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3": GEMMA3,
    "olmo2": OLMO2,
    "olmo3": OLMO3,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "dots1": DOTS1,
}


def unify_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """One value for keys that mean the same, and none for those that no weight has."""
    found = dict(values)
    if is_of_experts(values["decoder_block"]):
        if found["base_moe_mlp_dim"] == -1:
            found["base_moe_mlp_dim"] = found["base_mlp_dim"]
        if found.get("n_routing_groups") == 1:
            found |= {"n_routing_groups": -1, "topk_routing_group": -1}
        if not found.get("first_num_dense_layers"):
            del found["base_mlp_dim"]
    return found


def check_family(keys: ModelKeys) -> Relations:
    block = keys.decoder_block
    yield block not in FAMILIES, f"decoder_block={block} is not one of {', '.join(FAMILIES)}"
    family = FAMILIES[block]
    needs = dict(family.fixed)
    if family.released.period > 1 and not keys.sliding_window_size:
        needs["sliding_window_size"] = 4096
    needs = {name: value for name, value in needs.items() if getattr(keys, name) != value}
    here = ", ".join(f"{name}={getattr(keys, name)}" for name in needs)
    such = ", or as many tokens as most layers see" if "sliding_window_size" in needs else ""
    others = "" if is_of_experts(block) else ", decoder_block=llama2,"
    yield (
        needs,
        f"{here}: decoder_block={block} needs {' '.join(f'{n}={x}' for n, x in needs.items())}"
        f"{such}; give that{others} or the model_name of a file in configs/models",
    )
    heads = keys.base_num_query_heads * keys.head_dim
    yield (
        block == "olmoe" and heads != keys.base_emb_dim,
        f"base_num_query_heads x head_dim = {heads}: decoder_block=olmoe has base_emb_dim="
        f"{keys.base_emb_dim} numbers of all heads together; change one of them",
    )
    if is_of_experts(block):
        yield from _check_experts(keys)


def is_of_experts(block: str) -> bool:
    return block in FAMILIES and "num_experts" in FAMILIES[block].keys


def _check_experts(keys: ModelKeys) -> Relations:
    experts, chosen = keys.num_experts, keys.num_experts_per_tok
    groups, open_groups = keys.n_routing_groups, keys.topk_routing_group
    yield (
        experts < 2,
        f"num_experts={experts}: decoder_block={keys.decoder_block} has experts; give 2 or more, "
        "or decoder_block=llama2",
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
        "lora_targets=[q_proj,k_proj,v_proj,o_proj]",
    )


def family_choices() -> dict[str, tuple[str, ...]]:
    """The keys that only some families read, by the condition (`keys.choices`)."""
    read = {block: (*family.keys, *family.fixed) for block, family in FAMILIES.items()}
    found: dict[str, tuple[str, ...]] = {}
    for name in dict.fromkeys(name for names in read.values() for name in names):
        readers = (block for block, names in read.items() if name in names)
        condition = f"decoder_block={'|'.join(readers)}"
        found[condition] = (*found.get(condition, ()), name)
    return found
