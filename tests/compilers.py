"""Whether the compilers for TPU pods and GPU clusters are installed."""

import importlib.util

import pytest

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


needs_libtpu = pytest.mark.skipif(is_missing(TPU), reason="pip install -e '.[test,tpu]'")
needs_cuda = pytest.mark.skipif(is_missing(GPU), reason="pip install -e '.[test,cuda13-compiler]'")
