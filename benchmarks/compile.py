"""What a preflight costs: seconds to lower and compile every stage of Llama 3 8B for 1,024 v5p
chips.

python benchmarks/compile.py [--json FILE] [key=value ...]  (needs libtpu: pip install -e '.[tpu]')
"""

import os
import time

from figures import ROOT, parser, save

from maxramp.compile import compile_stages
from maxramp.config.load import load

CONFIG = ROOT / "configs" / "pods" / "llama3-8b.yml"


def main() -> None:
    options = parser("compile", __doc__)
    options.add_argument("keys", nargs="*", help="key=value")
    arguments = options.parse_args()
    loaded = load([str(CONFIG), *arguments.keys])
    wall, cpu = time.perf_counter(), time.process_time()
    result = compile_stages(loaded)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    for stage in result["stages"]:
        print(
            f"stage {stage['index']}: global batch {stage['global_batch_size']} = "
            f"{stage['per_device_batch_size']:g} x {result['devices']} x "
            f"{stage['gradient_accumulation_steps']}, {stage['compile_seconds']:.1f} s"
        )
    print(
        f"all       {wall:.0f} s, {cpu:.0f} s of processor time, on {os.cpu_count()} cores "
        f"({result['compile_topology']}, load average {os.getloadavg()[0]:.1f})"
    )
    stages = [{"seconds": s["compile_seconds"], **_kept(s)} for s in result["stages"]]
    save(arguments.json, {"seconds": wall, "processor_seconds": cpu, "stages": stages})


def _kept(stage: dict) -> dict:
    names = ("global_batch_size", "per_device_batch_size", "step_seconds", "mfu")
    return {name: stage[name] for name in names} | {"peak_gib": stage["memory_gib"]["peak"]}


if __name__ == "__main__":
    main()
