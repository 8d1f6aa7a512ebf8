"""A pipeline makes one device's update, in the ticks of arithmetic. R rows of S = T + 1 tokens."""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import BASE, TINY, make_config, make_mesh, refused, table
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from one_step import assert_same_update, packed_batch, update_of

from maxramp.config.load import load
from maxramp.errors import ConfigError
from maxramp.model import pipeline
from maxramp.model.families.table import FAMILIES, has_experts
from maxramp.model.parts import attention
from maxramp.model.parts.aux import Aux
from maxramp.model.parts.weights import dense, new_weight, relabel
from maxramp.model.size import pass_bytes, pipeline_bubble, pipeline_ticks
from maxramp.parallel.sharding import BATCH_ABT, X_BTD
from maxramp.planning import hlo, topology
from maxramp.planning.plan import make_plan
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.training.state import initial_state

ROWS = 32


# Without epsilons a stage on zeros makes NaN.
KEYS = ("base_num_decoder_layers=4", "normalization_layer_epsilon=0")
trained = functools.partial(update_of, *KEYS, rows=ROWS)


def config_of(*arguments, devices=8):
    constant = ("enable_rampup_batch_size=False", f"per_device_batch_size={ROWS // devices}")
    return make_config(*constant, *KEYS, *arguments, devices=devices)


def place(config, mesh, accumulation, packed):
    batch = packed_batch(config, ROWS, accumulation, packed)
    return jax.device_put(batch, NamedSharding(mesh, BATCH_ABT))


def matrices(weights_LDF):
    return relabel(new_weight(weights_LDF, "matrix", "D F"), "", "L")


def first(weights_LSDF):
    return relabel(jax.tree.map(lambda w: w[0], weights_LSDF), "L", "")


# What composes with a pipeline, as docs/mesh.md lists it: keys behind two stages, accumulation,
# whether rows are packed. A case is some ten seconds of compiling.
DATA, TENSOR = "ici_data_parallelism=2", "ici_tensor_parallelism=2"
CIRCULAR, FOUR = "num_pipeline_repeats=2", "num_pipeline_microbatches=4"
STAGES, EIGHT = "ici_pipeline_parallelism=4", "num_pipeline_microbatches=8"
ONCE, LOOP = "pipeline_fsdp_ag_once=True", "scan_layers=False"
TIED = "logits_via_embedding=True"
MESHES = {
    "fsdp, tensor": ((TENSOR,), 1, True),
    "data, circular, accumulation": ((DATA, CIRCULAR, FOUR, "remat_policy=full"), 2, True),
    "several micro batches a stage": ((STAGES, EIGHT, "remat_policy=minimal"), 1, False),
    "data, weights gathered once": ((DATA, FOUR, ONCE, "remat_policy=full"), 1, False),
    "tensor, circular, gathered once, unrolled": ((TENSOR, CIRCULAR, FOUR, ONCE, LOOP), 1, False),
    # Gradients from both ends of it travel between copies and stages after the last pass.
    "a tied embedding, data, accumulation": ((DATA, TIED), 2, False),
}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=[pytest.mark.slow] * (x != "fsdp, tensor")) for x in MESHES]
)
def test_one_update_on_any_mesh(name):
    """Weights, losses, held-out sums and rows of a step are those of one device."""
    keys, accumulation, packed = MESHES[name]
    stages, one = "ici_pipeline_parallelism=2", ("ici_fsdp_parallelism=1", *{TIED} & {*keys})
    actual = trained(stages, *keys, accumulation=accumulation, packed=packed)
    assert_same_update(actual, trained(*one, devices=1, packed=packed))


OWN_KEYS = {
    name: (f"decoder_block={name}", *(f"{key}={value}" for key, value in own.items()))
    for name, family in FAMILIES.items()
    if (own := dict.fromkeys(family.keys, 5) | family.fixed)
    and not has_experts(name)
    and "gdn_num_key_heads" not in own  # test_families_on_meshes
}
OF_FAMILIES = {
    "pipeline": (
        *("ici_pipeline_parallelism=2", "ici_tensor_parallelism=2", "num_pipeline_repeats=2"),
        *("num_pipeline_microbatches=4", "remat_policy=minimal"),
    ),
    "none": ("ici_data_parallelism=2", "ici_tensor_parallelism=2", "remat_policy=full"),
}
REPEAT = ("gemma2", "gemma3", "olmo3")  # layers that differ make no four parts that are alike
CHOSEN = dict.fromkeys(OWN_KEYS, "pipeline")  # the other one is a long test
CHOSEN |= dict.fromkeys(("qwen2", *REPEAT), "none")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"),
    [
        pytest.param(family, mesh, marks=[pytest.mark.long] * (mesh != CHOSEN.get(family)))
        for family, mesh in itertools.product(OWN_KEYS, OF_FAMILIES)
        if mesh == "none" or family not in REPEAT
    ],
)
def test_one_update_for_any_family(family, mesh):
    """Biases, norms of heads and windows, with all axes, accumulation and packed rows."""
    keys = OWN_KEYS[family]
    actual = trained(*OF_FAMILIES[mesh], *keys, accumulation=2)
    assert_same_update(actual, trained("ici_fsdp_parallelism=1", *keys, devices=1))


@pytest.mark.slow
@pytest.mark.parametrize("kernel, length", [("splash", 128), ("packed", 32)])
def test_a_kernel(monkeypatch, kernel, length):
    """TPUs' and GPUs', interpreted, with segments; test_compiled_steps.py compiles cuDNN's."""
    small = ("base_num_decoder_layers=2", "base_num_query_heads=2", "base_num_kv_heads=2")
    small += (f"max_target_length={length}",)
    one = trained("ici_fsdp_parallelism=1", *small, devices=1)
    monkeypatch.setattr(attention, "select", lambda *_: f"{kernel}_interpreted")
    keys = ("ici_pipeline_parallelism=2", "num_pipeline_microbatches=4")
    keys += ("remat_policy=minimal_with_context",)
    assert_same_update(trained(*keys, *small, devices=2), one)


def execution_of(microbatches):
    keys = {"num_pipeline_microbatches": microbatches, "num_pipeline_repeats": 1}
    keys["remat_policy"] = "full"
    return dataclasses.replace(make_config().model, **keys, num_layers_per_pipeline_stage=1)


def test_layers_are_reordered_by_one_program(monkeypatch):
    """A run saves often: the program that puts layers in their own order is made once."""
    config = config_of("ici_pipeline_parallelism=2", "num_pipeline_repeats=2", devices=2)
    reordered, traced = pipeline.merge_repeats, []
    with jax.set_mesh(make_mesh(config)):
        model = initial_state(config.recipe).model
        monkeypatch.setattr(
            pipeline, "merge_repeats", lambda *arguments: traced.append(1) or reordered(*arguments)
        )
        for _ in range(2):
            pipeline.order_by_layer(model)
    assert len(traced) <= len(jax.tree.leaves(model.layers))


def test_micro_batches_are_added_in_float32():
    """Rounded once, 256 and 15 times 1 make 272, where bfloat16 would lose every 1."""
    mesh = make_mesh(config_of("ici_pipeline_parallelism=2", devices=2))

    def layer(weights, x_BTD, segments):
        return dense(x_BTD, first(weights), X_BTD), Aux()

    def total(weights_LDF, x_BTD):
        y_BTD, _ = pipeline.run(execution_of(16), layer, weights_LDF, x_BTD, None)
        return y_BTD.astype(jnp.float32).sum()

    with jax.set_mesh(mesh):
        weights_LDF = matrices(jax.reshard(jnp.ones((2, 1, 1), jnp.bfloat16), P("stage")))
        # Backward the last row comes first.
        x_BTD = jax.reshard(jnp.ones((16, 1, 1), jnp.bfloat16).at[-1].set(256), X_BTD)
        gradient = jax.jit(jax.grad(total))(weights_LDF, x_BTD)[...]
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(gradient, np.float32).ravel(), [272, 272])


@pytest.fixture(
    scope="module",
    params=[pytest.param(1, id="straight", marks=pytest.mark.slow), pytest.param(2, id="circular")],
)
def program(request):
    """The forward and backward pass of the layers, compiled, and their config."""
    config = config_of(
        *("ici_pipeline_parallelism=2", "num_pipeline_microbatches=4"),
        f"num_pipeline_repeats={request.param}",
    )
    mesh = make_mesh(config)
    with jax.set_mesh(mesh):
        model, batch = initial_state(config.recipe).model, place(config, mesh, 1, True)

        def layers(model, batch):
            batch = jax.tree.map(lambda x: x[0], batch)
            execution = config.model
            x_BTD, _ = model.hidden(batch.tokens, execution, batch.token_positions)
            return (x_BTD**2).sum()

        text = jax.jit(jax.grad(layers)).lower(model, batch).compile().as_text()
    return config, mesh, text


def test_ticks_and_what_travels(program):
    """Forward and backward every tick moves an x down the ring and one up it, and no more; stages
    exchange segment ids and the gradients of what they all hold: no layer's."""
    config, _, text = program
    ticks = pipeline_ticks(4, 2, config.model.num_pipeline_repeats)
    assert f'"n":"{ticks}"' in text
    rows_of_a_tick = ROWS // 4 // 4  # micro batches, fsdp
    x_bytes = rows_of_a_tick * 16 * 32 * 4
    moved = hlo.count(text, topology.CHIPS["v5p"]).collective_bytes["collective-permute"]
    # Of two stages one sends down the ring, unless it is circular; the ring up has one sender.
    assert moved == 2 * ticks * 2 * x_bytes
    joined = set()
    for line in re.findall(r"= .* (?:all-gather|all-reduce|reduce-scatter|all-to-all)\(.*", text):
        if hlo.groups(line, 8).shape[1] != 4:  # of the fsdp axis: a stage's own
            joined |= set(re.findall(r"[a-z]+[0-9]+\[[0-9,]*\]", line.partition("all-")[0]))
    segments, embedding, norm = "s32[2,2,2,16]", "f32[264,8]", "f32[32]"
    assert joined == {segments, embedding, norm}


@pytest.mark.parametrize(
    ("microbatches", "stages", "repeats", "expected"),
    [(4, 4, 1, 3 / 7), (8, 4, 1, 3 / 11), (8, 4, 2, 3 / 19), (16, 2, 1, 1 / 17)],
)
def test_bubble(microbatches, stages, repeats, expected):
    config = make_config(
        *(f"ici_pipeline_parallelism={stages}", f"num_pipeline_microbatches={microbatches}"),
        *(f"num_pipeline_repeats={repeats}", "base_num_decoder_layers=8"),
        *("enable_rampup_batch_size=False", "per_device_batch_size=8"),
    )
    spec = RampupBatchManager(config.batch).stages[0].spec
    assert pipeline_bubble(config.model, spec) == pytest.approx(expected)


def test_the_estimated_bytes_of_a_pass():
    """remat_policy=none keeps as minimal_with_context between ticks, in a tick all its layers."""

    def estimated(policy, *arguments, length=512):
        keys = ("num_pipeline_microbatches=4", f"remat_policy={policy}", "vocab_size=264")
        keys += ("ici_pipeline_parallelism=2", f"max_target_length={length}", *arguments)
        config = config_of(*keys, "ici_fsdp_parallelism=1", devices=2)
        spec = RampupBatchManager(config.batch, 2).stages[0].spec
        return pass_bytes(config.model, spec.resize(1, 8), 1)

    policies = ("none", "minimal_with_context")
    assert len({estimated(policy, "num_pipeline_repeats=2") for policy in policies}) == 1
    # Of 4 rows 2 are in a tick, and the arrays with the most elements are the scores.
    rows, heads, T = 2, 8, 512
    more = estimated("none") - estimated("minimal")
    assert more == pytest.approx(rows * heads * T * T * (4 + 4), rel=0.2)


NEAREST = {"fixed": "16 or 32", "best": "16 or 24", "nemo": "16 or 24"}


@pytest.mark.parametrize("schedule", NEAREST)
def test_a_plan_names_the_nearest_sizes(schedule):
    """Four ranks a node, two rows each: multiples of 8 on one node, of 16 on two."""
    keys = ("ici_pipeline_parallelism=2", "num_pipeline_microbatches=4", "micro_batch_size=2")
    keys += ("rampup_batch_size=[16,4,100]", "global_batch_size=32", "steps=100", "num_nodes=2")
    keys += ("devices_per_node=4", f"node_schedule={schedule}")
    with pytest.raises(ConfigError, match="stage 1 with a global batch of 20") as error:
        make_plan(load([BASE, *TINY, *keys]))
    assert NEAREST[schedule] in str(error.value)


# Keys, and parts of the error; all but the first lines have two stages.
REFUSED = table("""
ici_pipeline_parallelism=8 | base_num_decoder_layers=4 | 8 stages | ici_pipeline_parallelism=8
ici_pipeline_parallelism=1 num_pipeline_microbatches=4 | num_pipeline_microbatches=4 | parallelism=1
ici_pipeline_parallelism=-1 ici_fsdp_parallelism=1 num_nodes=2 devices_per_node=4 | num_nodes=2
num_pipeline_repeats=3 | base_num_decoder_layers=4 | num_pipeline_repeats=3
num_layers_per_pipeline_stage=3 | base_num_decoder_layers=4 | num_layers_per_pipeline_stage=3
num_layers_per_pipeline_stage=12 decoder_block=gemma3 use_qk_norm=True sliding_window_size=64 \
    base_num_decoder_layers=12 | num_layers_per_pipeline_stage=12
num_pipeline_microbatches=3 | num_pipeline_microbatches=3 | 2 stages | use 2 or 4
num_pipeline_microbatches=0 | num_pipeline_microbatches=0
log_gradient_noise_scale=True | log_gradient_noise_scale=True | ici_pipeline_parallelism=2
""")
# With four micro batches.
REFUSED_ROWS = table("""
eval_per_device_batch_size=3 | eval_per_device_batch_size=3 | use a multiple of 2
enable_rampup_batch_size=True per_device_batch_size_start=2 per_device_batch_size_increment=1 \
| per_device_batch_size 3 (stage 1) | multiples of 2 rows | 2 or 4
per_device_batch_size=-1 rampup_batch_size=[16,8,100] global_batch_size=32 micro_batch_size=2 \
| stage 1 | 24 | in multiples of 2 rows | 16 or 32
per_device_batch_size=-1 global_batch_size=32 micro_batch_size=1 \
| stage 0 | micro_batch_size=1 is too little | use micro_batch_size=2
""")
REFUSED += [[f"num_pipeline_microbatches=4 {keys}", *parts] for keys, *parts in REFUSED_ROWS]


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_a_pipeline_of_other_sizes_is_refused_in_one_line(case):
    keys, *parts = case
    with refused(*parts):
        config = config_of("ici_pipeline_parallelism=2", *keys.split())
        ramp = RampupBatchManager(config.batch, 8)
        ramp.check(ramp.stages)


# Keys of the batch alone, and parts of the error.
REFUSED_BATCHES = table("""
ici_pipeline_parallelism=-2 | must be 1 or more
ici_pipeline_parallelism=-1 | num_pipeline_microbatches=4 | =-1 leaves their number open
global_batch_size=64 | per_device_batch_size=1 is too little | use per_device_batch_size=2
per_device_batch_size=3 | per_device_batch_size 3 | nearest are 2 or 4 | or use fewer micro batches
global_batch_size=7 micro_batch_size=2 per_device_batch_size=-1 devices_per_node=1 \
| any number of nodes from 1 to num_nodes=1 in multiples of 2 rows \
| use 6 or 8, or another multiple | or fewer micro batches
""")


@pytest.mark.parametrize("case", REFUSED_BATCHES, ids=lambda case: case[0])
def test_the_schedule_refuses_by_itself(case):
    changes, *parts = case
    keys = {"ici_pipeline_parallelism": 2, "num_pipeline_microbatches": 4}
    keys |= {"per_device_batch_size": 1, "devices_per_node": 4}
    for change in changes.split():
        name, value = change.split("=")
        keys[name] = int(value)
    with refused(*parts):
        ramp = RampupBatchManager(keys)
        ramp.check(ramp.stages)


def test_every_pass_has_whole_shares():
    """Rows of a rank and pass are multiples of a stage's share, and no pass is too large."""
    config = config_of(
        *("ici_pipeline_parallelism=2", "num_pipeline_microbatches=6", "micro_batch_size=8"),
        *("per_device_batch_size=-1", "rampup_batch_size=[24,24,2000]", "global_batch_size=240"),
    )
    ramp = RampupBatchManager(config.batch, 8)
    ramp.check(ramp.stages)
    assert len(ramp.stages) == 10
    for stage in ramp.stages:
        rows = stage.spec.rows // 8
        assert rows % 3 == 0 and rows <= 8
        assert stage.gradient_accumulation_steps * rows * 8 == stage.global_batch_size
    assert config.evaluation.eval_per_device_batch_size % 3 == 0
