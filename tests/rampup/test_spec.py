"""What a stage says that its steps are."""

import math

from conftest import make_config

from maxramp.parallel.mesh import make_mesh
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.stage import text_fields


def ramp_of(*arguments, fields=text_fields):
    keys = ("rampup_batch_size=[8,8,100]", "global_batch_size=32", "micro_batch_size=2")
    config = make_config(*keys, "ici_tensor_parallelism=2", *arguments)
    return RampupBatchManager(config.batch, 8, fields=fields)


def test_a_stage_is_all_of_its_shape():
    for stage in ramp_of("max_target_length=48", "remat_policy=minimal").stages:
        spec = stage.spec
        assert spec.samples == stage.global_batch_size and spec.rows == stage.spec.rows
        assert spec.accumulation == stage.gradient_accumulation_steps
        assert (spec.tokens, spec.remat_policy) == (48, "minimal")
        assert math.prod(spec.mesh.sizes.values()) == stage.devices
        assert spec.mesh.ranks == stage.devices // spec.mesh.model_parallel_size == 4
        assert [field.suffix for field in spec.fields] == [(48,), (48,), (2,)]


def test_equal_stages_share_a_program_and_others_do_not():
    """And by nothing else: what is equal shares its programs."""
    first = ramp_of().stages
    assert [stage.spec for stage in first] == [stage.spec for stage in ramp_of().stages]
    others = [
        ramp_of("max_target_length=32"),
        ramp_of("remat_policy=minimal_with_context"),
        ramp_of("ici_data_parallelism=2"),
        ramp_of(fields=lambda tokens: text_fields(tokens, separate=True)),
    ]
    assert len({ramp.stages[0].spec for ramp in others} | {s.spec for s in first}) == 8


def test_a_mesh_of_equal_sizes_is_the_same():
    first, second = (ramp_of().stages[0].spec.mesh for _ in range(2))
    assert make_mesh(first) is make_mesh(second)
