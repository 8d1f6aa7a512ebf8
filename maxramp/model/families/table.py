"""The families, by `decoder_block`."""

from maxramp.model.families import llama2, mistral

FAMILIES = {"llama2": llama2, "mistral": mistral}
