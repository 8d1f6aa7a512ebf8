"""A mixture of experts through the compiler of a TPU pod: what its plan estimates, and what a step
exchanges."""

import pytest
from compilers import needs_libtpu
from conftest import BASE
from test_pipelines import MODEL

from maxramp.config.load import load
from maxramp.planning.compiled import compile_stages
from maxramp.planning.plan import make_plan


@pytest.mark.slow
@needs_libtpu
def test_a_step_of_experts():
    """Tokens travel to their experts and back, and the plan's memory is the compiler's within a
    half."""
    keys = (*MODEL, "decoder_block=mixtral", "num_experts=8", "num_experts_per_tok=2")
    pod = ("compile_topology=v5p:2x2x2", "ici_expert_parallelism=4", "per_device_batch_size=4")
    config = load([BASE, *keys, *pod])
    compiled, planned = compile_stages(config)["stages"][0], make_plan(config)["stages"][0]
    assert compiled["fits"] and compiled["mesh"]["expert"] == 4
    assert compiled["collective_gib"]["ragged-all-to-all"] > 0
    assert 2 / 3 < planned["memory_gib"]["total"] / compiled["memory_gib"]["peak"] < 3 / 2
