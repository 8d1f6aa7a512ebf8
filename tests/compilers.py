"""The compilers for TPU pods and GPU clusters: where they are installed, programs for them."""

import importlib.util

import pytest
from conftest import make_config

from maxramp.config.resolve import resolve
from maxramp.parallel import mesh as mesh_lib
from maxramp.parallel.compiler import compiler_options
from maxramp.planning import machine

TPU, GPU = "libtpu", "jax_plugins.xla_cuda13"


def is_missing(plugin: str) -> bool:
    try:
        return importlib.util.find_spec(plugin) is None
    except ModuleNotFoundError:  # of the package around it
        return True


def skip_without(topology: str) -> None:
    """Skips a test that compiles for this compile_topology where its compiler is missing."""
    if is_missing(TPU if topology.startswith("v") else GPU):
        pytest.skip("pip install -e '.[test,tpu]', or '.[test,cuda13-compiler]'")


def needs_libtpu(test):
    """Marks a test slow, as every one that needs more than the extra `test`, and skips it here."""
    skip = pytest.mark.skipif(is_missing(TPU), reason="pip install -e '.[test,tpu]'")
    return pytest.mark.slow(skip(test))


def needs_cuda(test):
    skip = pytest.mark.skipif(is_missing(GPU), reason="pip install -e '.[test,cuda13-compiler]'")
    return pytest.mark.slow(skip(test))


def prepare_compile(topology: str, *keys: str):
    """Returns a topology's config, mesh, platforms and compiler; skips where there is none."""
    skip_without(topology)
    config = make_config(*keys, f"compile_topology={topology}", devices=4)
    target = machine.describe_machine(config.planning)
    config = resolve(config, len(target.devices), target.slices, 1)
    mesh = mesh_lib.make_mesh(config.mesh, target.devices)
    options = compiler_options(target.devices[0].platform) | target.options

    def check_compile(lowered) -> None:
        assert lowered.compile(options).memory_analysis().output_size_in_bytes > 0

    return config, mesh, target.platforms, check_compile
