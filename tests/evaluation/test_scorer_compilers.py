"""The program that scores rows, by the compilers of TPUs and GPUs, on a machine without one."""

import importlib.util

import jax
import pytest
from conftest import make_config

from maxramp.config.resolve import resolve
from maxramp.data import tokenizers
from maxramp.evaluation.scorer import Scorer
from maxramp.handover.opening import PromptTokenizer
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.compiler import compiler_options
from maxramp.planning import machine
from maxramp.training.background_compiler import BackgroundCompiler
from maxramp.training.state import abstract_state


def needs(package):
    return pytest.mark.skipif(not importlib.util.find_spec(package), reason=f"no {package}")


NEEDS_TPU, NEEDS_GPU = needs("libtpu"), needs("jax_cuda13_plugin")


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, mesh",
    [
        pytest.param("v5e:2x2", "ici_pipeline_parallelism=2", marks=NEEDS_TPU),
        pytest.param("h200:1x4", "ici_tensor_parallelism=2", marks=NEEDS_GPU),
        pytest.param("v5e:2x2", "ici_tensor_parallelism=2", marks=[NEEDS_TPU, pytest.mark.long]),
        pytest.param("h200:1x4", "ici_pipeline_parallelism=2", marks=[NEEDS_GPU, pytest.mark.long]),
    ],
)
def test_compilers_of_tpus_and_gpus_compile_the_scores(topology, mesh):
    """Of short rows and of long ones, which take another kernel."""
    keys = ("ici_fsdp_parallelism=2", mesh, "dtype=bfloat16", "max_target_length=256")
    keys += ("loss_block_tokens=64", f"compile_topology={topology}")
    config = make_config(*keys, devices=4)
    target = machine.describe_machine(config.planning)
    config = resolve(config, len(target.devices), target.slices, 1)
    devices = mesh_lib.make_mesh(config.mesh, target.devices)
    options = compiler_options(devices.devices.flat[0].platform) | target.options
    with jax.set_mesh(devices):
        model = abstract_state(config.recipe, devices).model
        tokenizer = PromptTokenizer(tokenizers.load("bytes", "", True, True))
        scorer = Scorer(config.recipe, model, tokenizer, BackgroundCompiler(0, print, print))
        for B, T in ((8, 48), (8, 256)):
            lowered = scorer.trace(B, T).lower(lowering_platforms=target.platforms)
            assert lowered.compile(options).memory_analysis().output_size_in_bytes > 0
