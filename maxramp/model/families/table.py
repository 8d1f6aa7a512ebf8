"""The families by the values of `decoder_block`. Imports no JAX."""

from collections.abc import Mapping
from typing import Any

from maxramp.keys.section import Relations
from maxramp.model.families.deepseek_v3 import DEEPSEEK_V3
from maxramp.model.families.dots1 import DOTS1
from maxramp.model.families.family import Family
from maxramp.model.families.gemma2 import GEMMA2
from maxramp.model.families.gemma3 import GEMMA3
from maxramp.model.families.glm4_moe import GLM4_MOE
from maxramp.model.families.gpt_oss import GPT_OSS
from maxramp.model.families.llama import LLAMA
from maxramp.model.families.mistral import MISTRAL
from maxramp.model.families.mixtral import MIXTRAL
from maxramp.model.families.olmo2 import OLMO2
from maxramp.model.families.olmo3 import OLMO3
from maxramp.model.families.olmoe import OLMOE
from maxramp.model.families.qwen2 import QWEN2
from maxramp.model.families.qwen3 import QWEN3
from maxramp.model.families.qwen3_5 import QWEN3_5
from maxramp.model.families.qwen3_5_moe import QWEN3_5_MOE
from maxramp.model.families.qwen3_moe import QWEN3_MOE
from maxramp.model.families.qwen3_next import QWEN3_NEXT
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import Pattern

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
    "glm4_moe": GLM4_MOE,
    "gpt_oss": GPT_OSS,
    "deepseek_v3": DEEPSEEK_V3,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe": QWEN3_5_MOE,
}


def layer_pattern(keys: ModelKeys) -> Pattern:
    """Returns the layers of a model, its drafts last; `check_family` must let the keys pass."""
    return FAMILIES[keys.decoder_block].pattern(keys).add_drafts(keys.mtp_num_layers)


def unify_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a model's keys so that two models can be compared: where several values mean the
    same with one of them, and without base_mlp_dim if no layer has that width. `values` has
    decoder_block and, of a family of experts, both widths."""
    unified = dict(values)
    if has_experts(values["decoder_block"]):
        if unified["base_moe_mlp_dim"] == -1:
            unified["base_moe_mlp_dim"] = unified["base_mlp_dim"]
        if unified.get("n_routing_groups") == 1:
            unified |= {"n_routing_groups": -1, "topk_routing_group": -1}
        if not unified.get("first_num_dense_layers"):
            del unified["base_mlp_dim"]
    return unified


def check_family(keys: ModelKeys) -> Relations:
    """Yields the relations that a family asks of the keys; later ones need the first to hold."""
    block = keys.decoder_block
    yield block not in FAMILIES, f"decoder_block={block} is not one of {', '.join(FAMILIES)}"
    family = FAMILIES[block]
    needs = dict(family.fixed)
    released = family.released
    has_windows = released.period > 1 and released.others == "sliding_attention"
    if has_windows and not keys.sliding_window_size:
        needs["sliding_window_size"] = 4096
    needs = {name: value for name, value in needs.items() if getattr(keys, name) != value}
    current = ", ".join(f"{name}={getattr(keys, name)}" for name in needs)
    needed = " ".join(f"{name}={value}" for name, value in needs.items())
    window = ", or as many tokens as most layers see" if "sliding_window_size" in needs else ""
    yield (
        needs,
        f"{current}: decoder_block={block} needs {needed}{window}; give that or the "
        "model_name of a file in configs/models",
    )
    modules = lora_modules(keys)
    others = [name for name in keys.lora_targets if name not in ("matrix", *modules)]
    yield (
        keys.lora_rank and others,
        f"lora_targets={list(keys.lora_targets)}: decoder_block={block} has no "
        f"{', '.join(others)}; leave it out",
    )
    yield from family.check(keys)


def lora_modules(keys: ModelKeys) -> tuple[str, ...]:
    """Returns the matrices that get adapters, by name, of those that the family has."""
    tensors = FAMILIES[keys.decoder_block].tensors.values()
    modules = {tensor.split(".")[-2] for tensor in tensors}
    return tuple(name for name in keys.lora_modules if name in modules)


def has_experts(block: str) -> bool:
    return block in FAMILIES and "num_experts" in FAMILIES[block].keys


def family_choices() -> dict[str, tuple[str, ...]]:
    """Returns the keys that not all families read, by condition (`keys.choices`)."""
    keys = {block: (*family.keys, *family.fixed) for block, family in FAMILIES.items()}
    choices: dict[str, tuple[str, ...]] = {}
    for name in dict.fromkeys(name for names in keys.values() for name in names):
        readers = (block for block, names in keys.items() if name in names)
        condition = f"decoder_block={'|'.join(readers)}"
        choices[condition] = (*choices.get(condition, ()), name)
    unread = {f"without decoder_block={block}": x.unread for block, x in FAMILIES.items()}
    return choices | {condition: names for condition, names in unread.items() if names}
