"""Steps of GRPO and of DPO, by the compilers of TPUs and GPUs, on a machine without one."""

import jax
import pytest
from compilers import prepare_compile

from maxramp.data import tokenizers
from maxramp.handover.opening import PromptTokenizer
from maxramp.objectives.rewards import REWARDS
from maxramp.rampup.schedule import RampupBatchManager
from maxramp.rl.programs import PolicyPrograms
from maxramp.rl.trainer import generation_config
from maxramp.training.background_compiler import BackgroundCompiler
from maxramp.training.learning_rate import LearningRate
from maxramp.training.programs import lower_step
from maxramp.training.state import abstract_state

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("topology", ["v5e:2x2", "h200:1x4"])]
MESH = ("ici_fsdp_parallelism=2", "ici_tensor_parallelism=2", "dtype=bfloat16")
MESH += ("skip_step_on_spikes=True",)
ANSWERS = (
    *("program=grpo", "grpo_beta=0.1", "num_generations=4", "max_completion_length=6"),
    *("global_batch_size=4", "num_iterations=2"),
)
PAIRS = (
    *("use_dpo=True", "packing=False", "dataset_type=grain", "grain_train_files=f"),
    *("tokenizer_type=huggingface", "tokenizer_path=t.json", "max_target_length=512"),
    *("base_emb_dim=256", "head_dim=128", "base_num_query_heads=4", "base_num_kv_heads=2"),
    *("gradient_accumulation_steps=2", "per_device_batch_size=2", "remat_policy=full"),
    "enable_rampup_batch_size=False",
)


def test_compilers_take_the_step_of_pairs(topology):
    config, mesh, platforms, check_compile = prepare_compile(topology, *MESH, *PAIRS)
    ramp = RampupBatchManager(config.batch, 4, fields=config.data.fields)
    rate = LearningRate.from_keys(config.learning_rate, ramp)
    check_compile(lower_step(config.recipe, rate, ramp.stages[0].spec, mesh, platforms))


def test_compilers_take_every_program(topology):
    config, mesh, platforms, check_compile = prepare_compile(topology, *MESH, *ANSWERS)
    ramp = RampupBatchManager(config.batch, 4, fields=REWARDS.fields)
    bytes_ = PromptTokenizer(tokenizers.load("bytes", "", True, True))
    with jax.set_mesh(mesh):
        state = abstract_state(config.recipe, mesh)
        how = generation_config(config, bytes_)
        rate = LearningRate.from_keys(config.learning_rate, ramp)
        programs = PolicyPrograms(config, rate, state, how, BackgroundCompiler(0, print, print), {})
        traces = programs.trace_functions(ramp.stages[0].spec)
        for trace in traces.values():
            check_compile(trace().lower(lowering_platforms=platforms))
    assert len(traces) == 9
