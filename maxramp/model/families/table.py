"""The families by the values of `decoder_block`."""

from maxramp.model.families.family import Family
from maxramp.model.families.llama import LLAMA

FAMILIES: dict[str, Family] = {"llama2": LLAMA, "mistral": LLAMA}
