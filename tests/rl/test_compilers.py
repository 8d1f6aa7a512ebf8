"""Steps of GRPO and of DPO, by the compilers of TPUs and GPUs, on a machine without one."""

import importlib.util

import jax
import pytest
from conftest import make_config

from maxramp.config.resolve import resolve
from maxramp.data import tokenizers
from maxramp.handover.opening import PromptTokenizer
from maxramp.objectives.rewards import REWARDS
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.compiler import compiler_options
from maxramp.planning import machine
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.rl.programs import PolicyPrograms
from maxramp.rl.trainer import generation_config
from maxramp.training.background_compiler import BackgroundCompiler
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import lower_step
from maxramp.training.state import abstract_state

KEYS = (
    *("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "dtype=bfloat16", "grpo_beta=0.1"),
    *("skip_step_on_spikes=True", "program=grpo"),
    *("num_generations=4", "max_completion_length=6", "global_batch_size=4", "num_iterations=2"),
)
NO_TPU = importlib.util.find_spec("libtpu") is None
NO_GPU = importlib.util.find_spec("jax_cuda13_plugin") is None


TOPOLOGIES = [
    pytest.param("v5e:2x2", marks=pytest.mark.skipif(NO_TPU, reason="no libtpu")),
    pytest.param("h200:1x4", marks=pytest.mark.skipif(NO_GPU, reason="no GPU compiler")),
]
PAIRS = (
    *("use_dpo=True", "packing=False", "dataset_type=grain", "grain_train_files=f"),
    *("tokenizer_type=huggingface", "tokenizer_path=t.json", "max_target_length=512"),
    *("base_emb_dim=256", "head_dim=128", "base_num_query_heads=4", "base_num_kv_heads=2"),
    *("gradient_accumulation_steps=2", "per_device_batch_size=2", "dtype=bfloat16"),
    *("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "remat_policy=full"),
    "skip_step_on_spikes=True",
)


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_compilers_take_the_step_of_pairs(topology):
    keys = (*PAIRS, "enable_rampup_batch_size=False", f"compile_topology={topology}")
    config = make_config(*keys, devices=4)
    target = machine.describe_machine(config.planning)
    config = resolve(config, len(target.devices), target.slices, 1)
    ramp = RampupBatchManager(config.batch, 4, fields=config.data.fields)
    rate = LearningRate.from_keys(config.learning_rate, ramp)
    mesh = mesh_lib.make_mesh(config.mesh, target.devices)
    lowered = lower_step(config.recipe, rate, ramp.stages[0].spec, mesh, target.platforms)
    compiled = lowered.compile(compiler_options(target.devices[0].platform) | target.options)
    assert compiled.memory_analysis().output_size_in_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_compilers_take_every_program(topology):
    config = make_config(*KEYS, f"compile_topology={topology}", devices=4)
    target = machine.describe_machine(config.planning)
    config = resolve(config, len(target.devices), target.slices, 1)
    mesh = mesh_lib.make_mesh(config.mesh, target.devices)
    ramp = RampupBatchManager(config.batch, 4, fields=REWARDS.fields)
    bytes_ = PromptTokenizer(tokenizers.load("bytes", "", True, True))
    options = compiler_options(mesh.devices.flat[0].platform) | target.options
    with jax.set_mesh(mesh):
        state = abstract_state(config.recipe, mesh)
        how = generation_config(config, bytes_)
        rate = LearningRate.from_keys(config.learning_rate, ramp)
        programs = PolicyPrograms(config, rate, state, how, BackgroundCompiler(0, print, print), {})
        traces = programs.trace_functions(ramp.stages[0].spec)
        for (name, _), trace in traces.items():
            lowered = trace().lower(lowering_platforms=target.platforms)
            compiled = lowered.compile(options)
            assert compiled.memory_analysis().output_size_in_bytes > 0, name
    assert len(traces) == 9
