"""How well `compile --meshes` ranks meshes: the model's order beside what compilers say.

python benchmarks/meshes.py [--json FILE] [--seconds N] [case ...]  (needs '.[cuda13-compiler]')

For Llama 3 8B, Mixtral 8x7B, Gemma 3 12B and Llama 3 8B with rows of 131,072 tokens, on 8 and 64
H200, compiles meshes with remat_policy=full, each once, in the passes that the model chooses: the
first ones and some from far behind, then all others, until --seconds are over. FILE keeps all
figures, and what it has is not compiled again, so that a later run with more time goes on. On 8
GPUs Mixtral has 8 of its layers.
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

_SMALL, _LARGE = "compile_topology=h200:1x8", "compile_topology=h200:8x8"
_LLAMA = ("model_name=llama3-8b",)
_MIXTRAL = ("model_name=mixtral-8x7b", "load_balance_loss_weight=0.01")
_GEMMA = ("model_name=gemma3-12b", "loss_block_tokens=1024")
_LONG = (*_LLAMA, "max_target_length=131072")
_PASS = "micro_batch_size=256"
CASES = {
    "llama3-8b on 8": (*_LLAMA, _SMALL, "global_batch_size=32", _PASS),
    "mixtral-8x7b on 8": (
        *_MIXTRAL,
        "base_num_decoder_layers=8",
        _SMALL,
        "global_batch_size=32",
        _PASS,
    ),
    "gemma3-12b on 8": (*_GEMMA, _SMALL, "global_batch_size=32", _PASS),
    "rows of 131,072 on 8": (*_LONG, _SMALL, "global_batch_size=4", _PASS),
    "llama3-8b on 64": (*_LLAMA, _LARGE, "global_batch_size=256", _PASS),
    "mixtral-8x7b on 64": (*_MIXTRAL, _LARGE, "global_batch_size=256", _PASS),
    "gemma3-12b on 64": (*_GEMMA, _LARGE, "global_batch_size=256", _PASS),
    "rows of 131,072 on 64": (*_LONG, _LARGE, "global_batch_size=32", _PASS),
}
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
    near, far = [0, 1, 2, 4, 6, 8], [4 * 2**n + 1 for n in range(20)]
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
