"""The families by the values of `decoder_block`. Imports no JAX."""

from maxramp.keys.section import Relations
from maxramp.model.families.family import Family
from maxramp.model.families.llama import LLAMA
from maxramp.model.families.mistral import MISTRAL
from maxramp.model.families.qwen2 import QWEN2
from maxramp.model.families.qwen3 import QWEN3
from maxramp.model.keys import ModelKeys

FAMILIES: dict[str, Family] = {"llama2": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}


def check_family(keys: ModelKeys) -> Relations:
    """What keys must not be together because of the family."""
    block = keys.decoder_block
    yield block not in FAMILIES, f"decoder_block={block} is not one of {', '.join(FAMILIES)}"
    for name in dict.fromkeys(name for family in FAMILIES.values() for name in family.keys):
        value, families = getattr(keys, name), [n for n, x in FAMILIES.items() if name in x.keys]
        yield (
            value and block not in families,
            f"{name}={value} is not part of decoder_block={block}; use "
            f"decoder_block={' or '.join(families)}, or leave it out",
        )
        yield (
            value is False and block in families,
            f"{name}=False: decoder_block={block} has it; use True, or decoder_block=llama2",
        )
