"""The families by the values of `decoder_block`."""

from maxramp.model.families.family import Family
from maxramp.model.families.llama import LLAMA
from maxramp.model.families.mistral import MISTRAL
from maxramp.model.families.qwen2 import QWEN2
from maxramp.model.families.qwen3 import QWEN3

FAMILIES: dict[str, Family] = {"llama2": LLAMA, "mistral": MISTRAL, "qwen2": QWEN2, "qwen3": QWEN3}
