"""The families by the values of `decoder_block`. Imports no JAX."""

from maxramp.keys.section import Relations
from maxramp.model.families.dots1 import DOTS1
from maxramp.model.families.family import Family
from maxramp.model.families.llama import LLAMA
from maxramp.model.families.mistral import MISTRAL
from maxramp.model.families.mixtral import MIXTRAL
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
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "olmoe": OLMOE,
    "dots1": DOTS1,
}


def check_family(keys: ModelKeys) -> Relations:
    block = keys.decoder_block
    yield block not in FAMILIES, f"decoder_block={block} is not one of {', '.join(FAMILIES)}"
    for name, value in FAMILIES[block].fixed.items():
        given = getattr(keys, name)
        has = "has it" if value is True else f"has {value}"
        others = "" if is_of_experts(block) else ", or decoder_block=llama2"
        yield given != value, f"{name}={given}: decoder_block={block} {has}; use {value}{others}"
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
    yield (
        (groups == -1) != (open_groups == -1),
        f"n_routing_groups={groups} and topk_routing_group={open_groups}: give both, or neither "
        "(-1)",
    )
    yield (
        groups > 0 and experts % groups,
        f"n_routing_groups={groups} does not divide num_experts={experts}; use a divisor",
    )
    yield (
        open_groups > groups,
        f"topk_routing_group={open_groups} of n_routing_groups={groups}; give {groups} or fewer",
    )
    yield (
        groups > 0 and (experts // groups < 2 or open_groups * experts // groups < chosen),
        f"n_routing_groups={groups}, topk_routing_group={open_groups}: groups of "
        f"{experts // groups} of the num_experts={experts}, compared by their best two, must leave "
        f"num_experts_per_tok={chosen}; use fewer groups, or a larger topk_routing_group",
    )
    adapted = {"gate_proj", "up_proj", "down_proj"}.intersection(keys.lora_modules)
    yield (
        keys.lora_rank and adapted,
        f"lora_targets={list(keys.lora_targets)}: experts have no adapters; use "
        "lora_targets=[q_proj, k_proj, v_proj, o_proj]",
    )
    rate = f"routed_bias_update_rate={keys.routed_bias_update_rate:g}"
    yield (
        keys.routed_bias_update_rate and not keys.routed_bias,
        f"{rate} moves the biases of routed_bias=True; give it, or leave the rate out",
    )
    yield (
        keys.routed_bias_update_rate and keys.lora_rank,
        f"{rate} with lora_rank={keys.lora_rank}: the biases belong to the model below the "
        "adapters, which stays as it is; use 0",
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
