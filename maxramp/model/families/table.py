"""The families by the values of `decoder_block`. Imports no JAX."""

from collections.abc import Iterator

from maxramp.keys.section import Relations
from maxramp.model.families.family import Family
from maxramp.model.families.llama import LLAMA
from maxramp.model.families.mistral import MISTRAL
from maxramp.model.families.qwen2 import QWEN2
from maxramp.model.families.qwen3 import QWEN3
from maxramp.model.keys import ModelKeys

FAMILIES: dict[str, Family] = {"llama2": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}


def check_family(keys: ModelKeys) -> Relations:
    block = keys.decoder_block
    yield block not in FAMILIES, f"decoder_block={block} is not one of {', '.join(FAMILIES)}"
    for name in FAMILIES[block].keys:
        yield (
            getattr(keys, name) is False,
            f"{name}=False: decoder_block={block} has it; use True, or decoder_block=llama2",
        )


def family_choices() -> Iterator[tuple[str, tuple[str, ...]]]:
    """The keys that only some families read, each with the condition (`keys.choices`)."""
    for name in dict.fromkeys(name for family in FAMILIES.values() for name in family.keys):
        readers = (block for block, family in FAMILIES.items() if name in family.keys)
        yield f"decoder_block={'|'.join(readers)}", (name,)
