"""How well `compile --meshes` ranks meshes: the model's order beside what compilers say.

python benchmarks/meshes.py [--json FILE] [--seconds N] [case ...]  (needs '.[tpu,cuda13-compiler]')

For Llama 3 8B, Mixtral 8x7B, Gemma 3 12B and Llama 3 8B with rows of 131,072 tokens, on 8 and 64
v5p and H200, compiles meshes with remat_policy=full, each once, in the passes that the model
chooses: the first ones and some from far behind, then all others, until --seconds are over. FILE
keeps all figures, and what it has is not compiled again, so that a later run with more time goes
on. On 8 devices Mixtral has 8 of its layers.
"""

import itertools
import json
import pathlib
import time

from figures import ROOT, parser, save

from maxramp.commandline import print_table
from maxramp.config.load import load
from maxramp.planning import compile_target
from maxramp.planning.compile_target import open_machine
from maxramp.planning.meshes import MeshSearch

_MODELS = {
    "llama3-8b": ("model_name=llama3-8b",),
    "mixtral-8x7b": ("model_name=mixtral-8x7b", "load_balance_loss_weight=0.01"),
    "gemma3-12b": ("model_name=gemma3-12b", "loss_block_tokens=1024"),
    "rows of 131,072": ("model_name=llama3-8b", "max_target_length=131072"),
}
_MACHINES = {
    "8 v5p": "v5p:2x2x2",
    "64 v5p": "v5p:4x4x4",
    "8 H200": "h200:1x8",
    "64 H200": "h200:8x8",
}


def _keys(model: str, machine: str) -> tuple[str, ...]:
    devices = int(machine.split()[0])
    batch = devices // 2 if model == "rows of 131,072" else 4 * devices
    fewer = model == "mixtral-8x7b" and devices == 8
    layers = ("base_num_decoder_layers=8",) if fewer else ()
    keys = (f"compile_topology={_MACHINES[machine]}", f"global_batch_size={batch}")
    return *_MODELS[model], *layers, *keys, "micro_batch_size=256"


CASES = {f"{x} on {y}": _keys(x, y) for y in _MACHINES for x in _MODELS}
COMMON = ("steps=100", "enable_rampup_batch_size=false", "max_target_length=4096")
_FIELDS = ("step_seconds", "collective_seconds", "collective_gib", "network_gib", "fits")


def main() -> None:
    options = parser("meshes", __doc__)
    options.add_argument("--seconds", type=float, default=3600)
    options.add_argument("cases", nargs="*", default=list(CASES))
    arguments = options.parse_args()
    end, path = time.monotonic() + arguments.seconds, pathlib.Path(arguments.json or "meshes.json")
    stored = json.loads(path.read_text())["figures"] if path.exists() else {}
    compile_target.POLICIES = ("full",)
    ranks, queues = {}, {}
    for case in arguments.cases:
        keys = [str(ROOT / "configs" / "base.yml"), *COMMON, *CASES[case]]
        config = load(keys, "compile")
        search = MeshSearch(config, open_machine(config), lambda line: None)
        ranks[case] = ways = search.rank(search.stages[-1].index)
        queues[case] = iter([ways[i] for i in _order(len(ways))])
    while queues and time.monotonic() < end:
        for case, queue in list(queues.items()):
            figures = stored.setdefault(case, {})
            way = next((way for way in queue if way.name not in figures), None)
            if way is None:
                del queues[case]
            elif time.monotonic() < end:
                entry = way.target.step(way.spec)
                figures[way.name] = {name: entry.get(name) for name in _FIELDS}
                figures[way.name] |= {"peak_gib": entry["memory_gib"]["peak"]}
                print(case, way.name, entry.get("step_seconds"), way.estimate.seconds, flush=True)
                save(str(path), stored)
    _show(ranks, stored)


def _order(number: int) -> list[int]:
    """Returns all ranks, such that the first few are the best ones and some far behind."""
    near, far = [0, 1, 2, 3, 4, 6, 8], [4 * 2**n + 1 for n in range(20)]
    first = [n for pair in itertools.zip_longest(near, far) for n in pair if n is not None]
    return [n for n in dict.fromkeys([*first, *range(number)]) if n < number]


def _show(ranks: dict, stored: dict) -> None:
    rows = []
    for case, ways in ranks.items():
        figures = stored.get(case, {})
        ordered = [way.name for way in ways if figures.get(way.name, {}).get("fits")]
        steps = {name: figures[name]["step_seconds"] for name in ordered}
        if not ordered:
            continue
        best, first = min(steps, key=steps.get), ordered[0]
        cells = [case, f"{len(ways):,}", str(len(steps)), best, f"{steps[best]:.3g} s"]
        rows.append([*cells, str(ordered.index(best) + 1), f"{steps[first] / steps[best]:.3f}"])
    heads = "case|meshes|compiled|fastest|step|its rank among them|first / fastest"
    print_table(heads.split("|"), rows)


if __name__ == "__main__":
    main()
