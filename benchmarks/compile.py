"""Our step beside MaxText's, both as a TPU pod's compiler sees them, on 64 v5p chips.

python benchmarks/compile.py [--json FILE] [key=value ...]  (needs libtpu: pip install -e '.[tpu]')

Each chip has 2 rows of 4,096 tokens unless a row of the table says otherwise. Weights are in
float32, arithmetic is in bfloat16, with AdamW and splash attention.
Both programs' texts are counted alike: the compiler's cycles at 1.75 GHz, and 600 GB/s for the
bytes that nothing runs beside. The compiler does not look into kernels: for Qwen3 8B both sides
count those of attention by the blocks that their masks leave, at the chip's peak, and elsewhere
both leave out all, those of experts too. Memory is what the compiler allocates on a chip
(`device_memory.compiled_bytes`), which jax says from 0.12 on. A smaller base_num_decoder_layers
shows in less time where ours stands.
"""

import importlib.metadata

from figures import ROOT, parser, save

from maxramp.commandline import print_table
from maxramp.config.load import load
from maxramp.planning import compile_target
from maxramp.planning.compiled import compile_stages
from maxramp.training.device_memory import bytes_by_parts, compiled_bytes

GIB = 2.0**30
GIGABYTES = 600e9  # a second into a v5p chip
_LLAMA = ("model_name=llama3-8b",)
_MIXTRAL = ("model_name=mixtral-8x7b", "load_balance_loss_weight=0.01")
_QWEN3_MOE = ("model_name=qwen3-30b-a3b", "load_balance_loss_weight=0.01")
_QWEN35_MOE = ("model_name=qwen3.5-35b-a3b", "load_balance_loss_weight=0.01")
_NEXT = ("model_name=qwen3-next-80b-a3b", "load_balance_loss_weight=0.01")
_AIR = ("model_name=glm4.5-air-106b",)
_GPT_OSS = ("model_name=gpt-oss-20b", "load_balance_loss_weight=0.01")
_DEEPSEEK = ("model_name=deepseek-v3-671b", "override_model_config=true")
_DEEPSEEK += ("base_num_decoder_layers=16",)
_EXPERT = "ici_expert_parallelism=4"
_LONG = ("max_target_length=131072", "per_device_batch_size=0.25")
# MaxText with its defaults otherwise, compiled by jax 0.12 and libtpu 0.0.50.1: seconds of a step
# without attention kernels, GiB that it waits for, GiB that it allocates, seconds to compile. The
# memory is that of MaxText 0.2.5, the rest that of commit e591f30; the two take the same time.
CONFIGURATIONS = {
    "Llama 3 8B, fsdp 64, remat full": (_LLAMA, (1.457, 54.2, 8.6, 42)),
    "fsdp 64, remat minimal": ((*_LLAMA, "remat_policy=minimal"), (1.376, 54.2, 27.6, 64)),
    "tensor 4 x fsdp 16, full": ((*_LLAMA, "ici_tensor_parallelism=4"), (1.559, 56.3, 8.4, 99)),
    "fsdp 64, full, accumulation 4": (
        (*_LLAMA, "gradient_accumulation_steps=4"),
        (5.804, 217, 9.2, 53),
    ),
    "data 4 x fsdp 16, full, accumulation 4": (
        (*_LLAMA, "ici_data_parallelism=4", "gradient_accumulation_steps=4"),
        (5.768, 163, 15.4, 40),
    ),
    # From here on MaxText 0.2.5. Qwen3 8B's memory, on both sides, is arguments, results and
    # temporaries added up, and its attention kernels take 0.133 s.
    "Qwen3 8B, fsdp 64, full": (("model_name=qwen3-8b",), (1.674, 54.5, 12.1, 67)),
    "Mixtral 8x7B, fsdp 64, full": (_MIXTRAL, (1.611, 343.9, 19.4, 65)),
    "Mixtral 8x7B, expert 4 x fsdp 16, full": ((*_MIXTRAL, _EXPERT), (1.798, 72.2, 23.6, 143)),
    "Qwen3 30B-A3B, fsdp 64, full": (_QWEN3_MOE, (1.204, 222.8, 13.0, 84)),
    "Qwen3 30B-A3B, expert 4 x fsdp 16, full": ((*_QWEN3_MOE, _EXPERT), (2.586, 52.4, 17.0, 147)),
    # Kernels of attention and of gated delta rules are counted. A triangular solve of MaxText that
    # the compiler does not price counts nothing. It has no Qwen3.5 without experts: its layers with
    # its own MLP in their place.
    "Qwen3.5 9B, fsdp 64, full": (("model_name=qwen3.5-9b",), (2.909, 66.1, 17.7, 107)),
    "Qwen3.5 35B-A3B, fsdp 64, full": (_QWEN35_MOE, (2.854, 252.2, 28.9, 210)),
    "Qwen3-Next 80B-A3B, fsdp 64, full": (_NEXT, (4.349, 584.5, 31.7, 349)),
    "GLM-4.5 Air, fsdp 64, full": (_AIR, None),  # MaxText has no GLM
    "gpt-oss 20B, fsdp 64, full": (_GPT_OSS, (1.260, 149.3, 14.4, 643)),
    "DeepSeek-V3, 16 of 61 layers, fsdp 64, full": (_DEEPSEEK, (4.878, 1119.8, 70.3, 784)),
    "Gemma 3 12B, fsdp 64, full, loss_block_tokens 1,024": (
        ("model_name=gemma3-12b", "loss_block_tokens=1024"),
        (2.973, 101.5, 12.8, 125),
    ),
    "Llama 3 8B, 16 rows of 131,072, context 4 x fsdp 16": (
        (*_LLAMA, *_LONG, "ici_context_parallelism=4"),
        (6.143, 105.0, 26.5, 98),
    ),
}
_WITH_ATTENTION = ("Qwen3.5", "Qwen3-Next", "GLM", "gpt-oss", "DeepSeek")
COMMON = (
    *("compile_topology=v5p:4x4x4", "max_target_length=4096", "steps=100"),
    *("enable_rampup_batch_size=false", "per_device_batch_size=2", "remat_policy=full"),
)


def main() -> None:
    options = parser("compile", __doc__)
    options.add_argument("keys", nargs="*", help="key=value")
    arguments = options.parse_args()
    rows, figures = [], {}
    for name, (keys, maxtext) in CONFIGURATIONS.items():
        base = str(ROOT / "configs" / "base.yml")
        is_qwen3 = name.startswith("Qwen3 8B")
        compile_target.compiled_bytes = bytes_by_parts if is_qwen3 else compiled_bytes
        stage = compile_stages(load([base, *COMMON, *keys, *arguments.keys]))["stages"][0]
        kernels = stage["experts_seconds"]
        if not name.startswith(_WITH_ATTENTION):
            kernels += stage["attention_seconds"]
        ours = (
            stage["step_seconds"] - (0 if is_qwen3 else kernels),
            stage["collective_seconds"] * GIGABYTES / GIB,
            stage["memory_gib"]["peak"],
            stage["compile_seconds"],
        )
        ratio = f"{ours[0] / maxtext[0]:.3f}" if maxtext else "-"
        rows.append([name, *_cells(maxtext), *_cells(ours), ratio])
        figures[name] = {"ours": ours, "maxtext": maxtext, "experts_s": stage["experts_seconds"]}
        print(*rows[-1], sep="  ", flush=True)
    heads = ("step", "waits for", "memory", "compile")
    print_table(["", *(f"MaxText {head}" for head in heads), *heads, "ratio"], rows)
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    print(f"jax {versions['jax']}, libtpu {versions['libtpu']}; MaxText: 0.12, 0.0.50.1")
    save(arguments.json, {"libtpu": versions["libtpu"], "configurations": figures})


def _cells(figures: tuple[float, ...] | None) -> list[str]:
    if figures is None:
        return ["-"] * 4
    step, waits, memory, seconds = figures
    return [f"{step:.3f} s", f"{waits:.1f} GiB", f"{memory:.1f} GiB", f"{seconds:.0f} s"]


if __name__ == "__main__":
    main()
