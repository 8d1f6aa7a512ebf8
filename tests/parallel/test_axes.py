"""Arrays lie on the mesh as the table of its axes says."""

import re

import jax
import pytest
from conftest import make_config, make_mesh

from maxramp.errors import ConfigError
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.axes import AXES, BATCH_AXES, COPY_AXES, ROW_AXES, TABLE
from maxramp.parallel.keys import MeshKeys
from maxramp.parallel.sharding import BATCH_ABT, TOKENS_BT
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import lower_step
from maxramp.training.state import abstract_state


def divided(array, mesh):
    """Which of an array's dimensions the two devices of a mesh share out."""
    indices = jax.NamedSharding(mesh, array.sharding.spec).devices_indices_map(array.shape)
    first, second = indices.values()
    return [n for n, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]


@pytest.mark.parametrize("axis", TABLE, ids=AXES)
def test_what_an_axis_divides(axis):
    """Two devices along one axis: their parts of a batch and of every weight of products."""
    experts = ("decoder_block=mixtral", "num_experts=4", "num_experts_per_tok=2")
    keys = experts if "experts" in axis.divides else ()
    keys += (f"ici_{axis.key}_parallelism=2", "per_device_batch_size=2")
    config = make_config(*keys, devices=2)
    mesh = make_mesh(config)
    for spec, kinds in ((BATCH_ABT, ("", "rows", "")), (TOKENS_BT, ("rows", "tokens"))):
        shape = (4,) * len(kinds)
        array = jax.ShapeDtypeStruct(shape, "int32", sharding=jax.NamedSharding(mesh, spec))
        assert [kinds[n] for n in divided(array, mesh)] == [
            kind for kind in kinds if kind in axis.divides
        ]
    assert config.mesh.ranks == (2 if "rows" in axis.divides else 1)
    assert config.mesh.ranks * config.mesh.model_parallel_size == 2

    model = abstract_state(config.recipe, mesh).model
    for weight in (model.embedding_VD, model.head_DV):
        (array,) = jax.tree.leaves(weight)
        assert bool(divided(array, mesh)) == ("widths" in axis.divides)
        assert (axis.name in COPY_AXES) == (axis.name in BATCH_AXES and not divided(array, mesh))
    if "experts" in axis.divides:
        (array,) = jax.tree.leaves(model.layers["sparse"].mlp.out_EFD)
        assert divided(array, mesh) == [1]  # of [L, E, F, D]
        return
    for weight in (model.layers["dense"].mixer.query_DHh, model.layers["dense"].mlp.out_FD):
        (array,) = jax.tree.leaves(weight)
        expected = {"layers": 0 in divided(array, mesh)}
        expected["widths"] = any(divided(array, mesh)[-1:])
        assert expected == {kind: kind in axis.divides for kind in expected}


def test_devices_that_hold_a_row_together_are_neighbours():
    """By their number in the mesh a process finds which rows they need (`data.order.Share`)."""
    assert AXES[: len(ROW_AXES)] == ROW_AXES


@pytest.mark.parametrize(
    ("devices", "sizes", "remedy"),
    [
        (32, {"data": 2, "pipeline": 4, "expert": 8}, {"data": 1, "pipeline": 2, "expert": 4}),
        (8, {"tensor": 3}, {"tensor": 2}),
        (12, {"expert": 8, "tensor": 5}, {}),
    ],
)
def test_a_mesh_that_is_too_large_names_each_size_that_fits(devices, sizes, remedy):
    def keys(sizes):
        return {f"ici_{axis}_parallelism": size for axis, size in sizes.items()}

    sizes_by_key = keys({axis.key: 1 for axis in TABLE} | {"fsdp": -1} | sizes)
    sizes_by_key |= {name.replace("ici", "dcn"): 1 for name in sizes_by_key}
    last = " or ".join(f"{name}={size}" for name, size in keys(remedy).items())
    with pytest.raises(ConfigError) as error:
        MeshKeys(**sizes_by_key).resolve(devices)
    assert str(error.value).endswith(f"use {last}" if last else f"product divides {devices}")
    for name, size in keys(remedy).items():
        MeshKeys(**sizes_by_key | {name: size}).resolve(devices)
    with pytest.raises(ConfigError, match="dcn_data_parallelism=2: .* do not divide over 2 slices"):
        MeshKeys(**sizes_by_key | {"dcn_data_parallelism": 2}).resolve(devices + 1)


def test_the_error_of_one_device_says_how_a_cpu_gets_more():
    with pytest.raises(ConfigError, match="; hardware=cpu devices_per_node=6 makes 6 "):
        make_config("ici_tensor_parallelism=2", "ici_context_parallelism=3", devices=1)


SENDS = r"stablehlo\.(all_gather|all_reduce|all_to_all|collective_\w+|reduce_scatter)"


@pytest.mark.parametrize("devices", [1, 2])
def test_one_device_sends_nothing(devices):
    config = make_config("log_gradient_noise_scale=True", devices=devices)
    ramp = RampupBatchManager(config.batch, devices)
    rate, spec = LearningRate.from_keys(config.learning_rate, ramp), ramp.stages[0].spec
    spec = spec.resize(2, 4 * devices)
    mesh = mesh_lib.make_mesh(config.mesh, jax.devices()[:devices])
    text = lower_step(config.recipe, rate, spec, mesh).as_text()
    assert bool(re.search(SENDS, text)) == (devices > 1)
