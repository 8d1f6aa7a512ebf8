"""What XLA is told beyond its defaults."""

import os

import jax

# What XLA leaves off on GPUs by default and large runs want, communication that runs beside the
# arithmetic: the compiler's own effort level O1. Its single options change names between versions.
# Not the unrolling of loops by two that belongs to it: XLA then fails at a schedule of its own
# ("not scheduled after its control predecessor") for some loops of more than two layers.
_GPU_OPTIONS = {
    "optimization_level": 19,
    "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_NO_UNROLL",
}
# With rows and heads both sharded XLA would turn products into loops that each gather a part of the
# weight. They take longer than gathering it first, and five times as long to compile.
_TPU_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}


def compiler_options(on: str | None) -> dict[str, int | str]:
    """Options beyond XLA's defaults, by platform ("cpu", "cuda", "tpu", ...). What the user sets in
    LIBTPU_INIT_ARGS, XLA_FLAGS or JAX_OPTIMIZATION_LEVEL stays as it is."""
    set_by_user = os.environ.get("XLA_FLAGS", "") + os.environ.get("LIBTPU_INIT_ARGS", "")
    if jax.config.jax_optimization_level != "UNKNOWN":
        set_by_user += " --optimization_level"
    ours = {"gpu": _GPU_OPTIONS, "cuda": _GPU_OPTIONS, "tpu": _TPU_OPTIONS}.get(on, {})
    return {name: value for name, value in ours.items() if f"--{name}" not in set_by_user}
