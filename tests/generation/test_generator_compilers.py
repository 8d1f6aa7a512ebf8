"""The programs that generate text, by the compilers of TPUs and GPUs, on a machine without one."""

import jax
import pytest
from compilers import prepare_compile
from test_generator import LATENT, QWEN3_5

from maxramp.generation.generator import GenerationConfig, Generator
from maxramp.generation.sampling import Sampling
from maxramp.training.state import abstract_state

# Widths that tiles of a GPU's products divide.
WIDTHS = ("base_emb_dim=128", "base_mlp_dim=256", "base_num_query_heads=4", "base_num_kv_heads=4")
DELTA = (*QWEN3_5, *WIDTHS, "head_dim=64", "gdn_key_head_dim=64", "gdn_value_head_dim=64")
LATENTS = (*LATENT, *WIDTHS, "kv_lora_rank=64", "q_lora_rank=64", "qk_nope_head_dim=64")
LATENTS += ("qk_rope_head_dim=32", "v_head_dim=64")


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, family",
    [
        ("v5e:2x2", DELTA),
        ("h200:1x4", DELTA),
        pytest.param("v5e:2x2", LATENTS, marks=pytest.mark.long),
        pytest.param("h200:1x4", LATENTS, marks=pytest.mark.long),
    ],
)
def test_compilers_of_tpus_and_gpus_compile_passes_over_proposed_tokens(topology, family):
    """Of every kind of state, rolled back where a proposal was wrong."""
    keys = ("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "dtype=bfloat16")
    keys += ("max_target_length=256", "mtp_num_layers=1", *family)
    config, devices, platforms, check_compile = prepare_compile(topology, *keys)
    with jax.set_mesh(devices):
        model = abstract_state(config.recipe, devices).model
        generation = GenerationConfig(64, Sampling(0.7, top_p=0.9), num_speculative_tokens=2)
        generator = Generator(config.model, model, generation)
        programs = generator.trace_programs(model, 8, 128)
        for name in ("reading prompts", "writing answers"):
            check_compile(programs[name]().lower(lowering_platforms=platforms))
