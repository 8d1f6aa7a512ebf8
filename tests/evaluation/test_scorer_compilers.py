"""The program that scores rows, by the compilers of TPUs and GPUs, on a machine without one."""

import jax
import pytest
from compilers import prepare_compile

from maxramp.data import tokenizers
from maxramp.evaluation.scorer import Scorer
from maxramp.handover.opening import PromptTokenizer
from maxramp.training.background_compiler import BackgroundCompiler
from maxramp.training.state import abstract_state


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, mesh",
    [
        ("v5e:2x2", "ici_pipeline_parallelism=2"),
        ("h200:1x4", "ici_tensor_parallelism=2"),
        pytest.param("v5e:2x2", "ici_tensor_parallelism=2", marks=pytest.mark.long),
        pytest.param("h200:1x4", "ici_pipeline_parallelism=2", marks=pytest.mark.long),
    ],
)
def test_compilers_of_tpus_and_gpus_compile_the_scores(topology, mesh):
    """Of short rows and of long ones, which take another kernel."""
    keys = ("ici_fsdp_parallelism=2", mesh, "dtype=bfloat16", "max_target_length=256")
    keys += ("loss_block_tokens=64",)
    config, devices, platforms, check_compile = prepare_compile(topology, *keys)
    with jax.set_mesh(devices):
        model = abstract_state(config.recipe, devices).model
        tokenizer = PromptTokenizer(tokenizers.load("bytes", "", True, True))
        scorer = Scorer(config.recipe, model, tokenizer, BackgroundCompiler(0, print, print))
        for B, T in ((8, 48), (8, 256)):
            check_compile(scorer.trace(B, T).lower(lowering_platforms=platforms))
