"""What Muon's step costs beyond AdamW's, as the compilers of TPUs and GPUs see both.

python benchmarks/muon.py [--json FILE] [key=value ...]
(needs both compilers: pip install -e '.[tpu,cuda13-compiler]')

Llama 3 8B on 64 chips: fsdp 64, two rows of 8,192 tokens on each, remat full, arithmetic in
bfloat16. Memory is what the compiler counts at its peak; "receives" is what a device gets from
others in a step, "waits" the time of it that nothing runs beside.
"""

from typing import Any

from figures import ROOT, parser, save

from maxramp.commandline import print_table
from maxramp.config.load import load
from maxramp.planning.compiled import compile_stages

KEYS = (
    *("model_name=llama3-8b", "dtype=bfloat16", "remat_policy=full", "max_target_length=8192"),
    *("per_device_batch_size=2", "enable_rampup_batch_size=false", "steps=1"),
    *("dataset_type=synthetic", "eval_interval=-1"),
)


def compiled_figures(topology: str, optimizer: str, keys: list[str]) -> dict[str, Any]:
    """Compiles the step of an optimizer, and returns its figures."""
    step_keys = (f"compile_topology={topology}", f"opt_type={optimizer}")
    line = [str(ROOT / "configs" / "base.yml"), *KEYS, *step_keys, *keys]
    (stage,) = compile_stages(load(line))["stages"]
    return {
        "seconds": stage["step_seconds"],
        "waits": stage["collective_seconds"],
        "receives": sum(
            sum(stage[name].values()) for name in ("collective_gib", "network_gib") if stage[name]
        ),
        "memory": stage["memory_gib"]["peak"],
    }


def main() -> None:
    options = parser("muon", __doc__)
    options.add_argument("keys", nargs="*", help="key=value")
    arguments = options.parse_intermixed_args()
    rows, figures = [], {}
    for topology in ("v5p:4x4x4", "h200:8x8"):
        adamw = compiled_figures(topology, "adamw", arguments.keys)
        muon = compiled_figures(topology, "muon", arguments.keys)
        figures[topology] = {"adamw": adamw, "muon": muon}
        ratio = muon["seconds"] / adamw["seconds"]
        more = {name: muon[name] - adamw[name] for name in ("waits", "receives")}
        rows.append(
            [
                topology,
                f"{adamw['seconds']:.3f} s",
                f"{muon['seconds']:.3f} s ({ratio - 1:+.1%})",
                f"{1e3 * more['waits']:+.1f} ms",
                f"{more['receives']:+.2f} GiB",
                f"{adamw['memory']:.1f} and {muon['memory']:.1f} GiB",
            ]
        )
    heads = ("AdamW's step", "Muon's", "waits longer for", "receives more", "peak memory of both")
    print_table(["", *heads], rows)
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
