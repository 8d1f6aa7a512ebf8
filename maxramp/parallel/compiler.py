"""The compiler options that differ from XLA's defaults."""

import os

import jax

# On GPUs XLA overlaps communication and arithmetic only from its effort level O1 on, and large runs
# want that. (The single options change names between versions.) O1 also unrolls loops by two, which
# is turned off: for some loops of more than two layers XLA then fails at its own schedule ("not
# scheduled after its control predecessor").
_GPU_OPTIONS = {
    "optimization_level": 19,
    "xla_gpu_enable_while_loop_unrolling": "WHILE_LOOP_UNROLLING_NO_UNROLL",
}
# Triton's products would take numbers of 8 bits for those of 16.
_GPU_OPTIONS_IN_8_BITS = {"xla_gpu_enable_triton_gemm": False}
# With rows and heads both sharded, XLA would turn products into loops that each gather a part of
# the weight. They take longer than gathering all of it first, and five times as long to compile.
_TPU_OPTIONS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}


def compiler_options(platform: str | None, in_8_bits: object = False) -> dict[str, int | str]:
    """Returns the options for a platform ("cpu", "gpu", "cuda", "tpu", ...), and for products in 8
    bits if `in_8_bits` is true. Those that the user sets in LIBTPU_INIT_ARGS, XLA_FLAGS or
    JAX_OPTIMIZATION_LEVEL are left out."""
    set_by_user = os.environ.get("XLA_FLAGS", "") + os.environ.get("LIBTPU_INIT_ARGS", "")
    if jax.config.jax_optimization_level != "UNKNOWN":
        set_by_user += " --optimization_level"
    gpu = _GPU_OPTIONS | (_GPU_OPTIONS_IN_8_BITS if in_8_bits else {})
    options = {"gpu": gpu, "cuda": gpu, "tpu": _TPU_OPTIONS}.get(platform, {})
    return {name: value for name, value in options.items() if f"--{name}" not in set_by_user}
