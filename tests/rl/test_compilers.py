"""The programs of a step of GRPO, by the compilers of TPUs and GPUs, on a machine without one."""

import importlib.util

import jax
import pytest
from conftest import make_config

from maxramp.config.resolve import resolve
from maxramp.data import tokenizers
from maxramp.handover.opening import PromptTokenizer
from maxramp.parallel import mesh as mesh_lib
from maxramp.planning import machine
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.rl.programs import PolicyPrograms
from maxramp.rl.trainer import policy_fields, writing
from maxramp.training.ahead import Ahead
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import compiler_options
from maxramp.training.state import abstract_state

KEYS = (
    *("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "dtype=bfloat16", "grpo_beta=0.1"),
    *("num_generations=4", "max_completion_length=6", "global_batch_size=4", "num_iterations=2"),
)
NO_TPU = importlib.util.find_spec("libtpu") is None
NO_GPU = importlib.util.find_spec("jax_cuda13_plugin") is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology",
    [
        pytest.param("v5e:2x2", marks=pytest.mark.skipif(NO_TPU, reason="no libtpu")),
        pytest.param("h200:1x4", marks=pytest.mark.skipif(NO_GPU, reason="no GPU compiler")),
    ],
)
def test_compilers_take_every_program(topology):
    config = make_config(*KEYS, f"compile_topology={topology}", devices=4)
    there = machine.find(config.planning)
    config = resolve(config, len(there.devices), there.slices, 1)
    mesh = mesh_lib.make_mesh(config.mesh, there.devices)
    ramp = RampupBatchManager(config.batch, 4, fields=policy_fields)
    bytes_ = PromptTokenizer(tokenizers.load("bytes", "", True, True))
    options = compiler_options(mesh.devices.flat[0].platform) | there.options
    with jax.set_mesh(mesh):
        state = abstract_state(config.recipe, mesh)
        how = writing(config.rollout, config.policy, config.model, bytes_)
        rate = LearningRate.of(config.learning_rate, ramp)
        programs = PolicyPrograms(
            config.recipe, config.policy, rate, state, how, Ahead({}, 0, print, print), {}
        )
        found = programs.traced(ramp.stages[0].spec)
        for (name, _), trace in found.items():
            lowered = trace().lower(lowering_platforms=there.platforms)
            compiled = lowered.compile(options)
            assert compiled.memory_analysis().output_size_in_bytes > 0, name
    assert len(found) == 9
