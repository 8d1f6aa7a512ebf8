"""Does multi-token prediction pay at small sizes, on a ramp?

The protocol, fixed before the runs. Two models: base.yml's, and one of 4M weights. Data, cosine and
evaluation are those of ramp_pays.py, on 512 held-out rows; the batch is its D: 8 rows, doubled at
1/4, 1/2 and 3/4 of the samples, rate times sqrt(batch / 8). The learning rate is tuned for each
model without a draft, with seed 0 and a constant batch of 8. Seeds are those of the weights and of
the order of rows, and differences are paired by seed. Held-out losses are those of the next token
alone.

  N   no draft
  W   one draft, mtp_loss_scaling_factor=0.1, the default
  H   one draft, 0.3, DeepSeek-V3's first value
  F   one draft that fades, as in modded-nanogpt: 0.3, 0.15 from 1/3, 0 from 2/3 of the samples
  N+  no draft, and as many more samples as H's FLOPs allow

Claims, made before the runs, each by the 90% t-interval of the mean paired difference, per model:

  A draft pays at equal tokens if W, H or F is below N.
  It pays at equal FLOPs if one of them is below N+.
  Fading beats a constant weight if F is below H.
  A draft is accepted for at least half of the held-out tokens under W.

Expected: no draft below N at the demo's size (nanochat's d12 was worse, too); at 4M H equal to N
within 0.01 and above N+; F between H and N.

python benchmarks/drafts_pay.py [--tokens 384K,256K] [--seeds 5] [--folder DIR] [--json FILE]
"""

import pathlib
import sys
from typing import Any

from experiment import MODEL, ROW, Experiment, at_once, paired, print_figures, tuned
from figures import ROOT, parser, save
from what_pays import B0, doubling

from maxramp.config.keys import Config
from maxramp.keys.base import base
from maxramp.keys.numbers import parse_count
from maxramp.model.size import training_flops_per_token

_COMMON = {"eval_samples": 512}
DEMO = _COMMON | {
    name: base()[name]
    for name in (
        "base_emb_dim",
        "base_num_query_heads",
        "base_num_kv_heads",
        "head_dim",
        "base_mlp_dim",
        "base_num_decoder_layers",
    )
}
LARGER = _COMMON | {
    "base_emb_dim": 256,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 64,
    "base_mlp_dim": 704,
    "base_num_decoder_layers": 5,
}
DRAFT = {"mtp_num_layers": 1}
PAIRS = ("W-N", "H-N", "F-N", "N+-N", "W-N+", "H-N+", "F-N+", "F-H")


def flops_ratio(sizes: dict[str, Any]) -> float:
    """Returns the FLOPs of a token with a draft over those without."""
    without, drafted = (
        training_flops_per_token(
            Config.from_values({**base(), **MODEL, **sizes, **keys}).model, ROW
        )
        for keys in ({}, DRAFT)
    )
    return drafted / without


def compare(experiment: Experiment, sizes: dict[str, Any], seeds: int) -> dict[str, Any]:
    """Runs the protocol for a model; returns its figures."""
    samples, ratio = experiment.samples, flops_ratio(sizes)
    rate = tuned(experiment, B0, 4, **sizes)["rate"]
    more = round(samples * ratio) // (16 * B0) * 16 * B0
    fading = {i * samples // 3: {"mtp_loss_scaling_factor": x} for i, x in ((1, 0.15), (2, 0.0))}
    high = DRAFT | {"mtp_loss_scaling_factor": 0.3}
    keys = {
        "N": {},
        "W": DRAFT,
        "H": high,
        "F": high | {"phases": fading, "phases_unit": "samples"},
        "N+": {"total_samples": more} | doubling(more),
    }
    arms = {name: doubling(samples) | arm_keys | sizes for name, arm_keys in keys.items()}
    runs = [(name, seed) for seed in range(seeds) for name in arms]
    results = at_once(lambda run: experiment.run(*run, rate, arms[run[0]]), runs)
    losses: dict[str, list[dict[str, Any]]] = {}
    for (name, _), result in zip(runs, results, strict=True):
        losses.setdefault(name, []).append(result)
    apart = {pair: paired(*(losses[arm] for arm in pair.split("-", 1))) for pair in PAIRS}

    def below(*pairs: str) -> bool:
        return any(apart[p]["high"] is not None and apart[p]["high"] < 0 for p in pairs)

    accepted = [run["acceptance"] for run in losses["W"]]
    return {
        "tokens": samples * ROW,
        "rate": rate,
        "flops_ratio": ratio,
        "arms": losses,
        "apart": apart,
        "claims": {
            "pays at equal tokens": below("W-N", "H-N", "F-N"),
            "pays at equal FLOPs": below("W-N+", "H-N+", "F-N+"),
            "fading beats a constant weight": below("F-H"),
            "W's draft is accepted for half of the tokens": min(accepted) >= 0.5,
        },
    }


def main() -> None:
    options = parser("drafts_pay", __doc__)
    options.add_argument("--tokens", default="384K,256K", help="of a run of each model")
    options.add_argument("--seeds", type=int, default=5, help="of every arm (5)")
    options.add_argument("--folder", type=pathlib.Path, default=ROOT / "output" / "drafts_pay")
    arguments = options.parse_args()
    multiple = 48 * B0  # a third and a quarter of the samples are whole batches
    tokens = [parse_count(x) or 0 for x in arguments.tokens.split(",")]
    counts = [n // ROW // multiple * multiple for n in tokens]
    if len(counts) != 2 or not all(counts) or arguments.seeds < 1:
        sys.exit("error: --tokens takes two numbers; too few of them, or of --seeds")
    figures = {}
    for name, samples, sizes in zip(("demo", "4M"), counts, (DEMO, LARGER), strict=True):
        expected = 5 * arguments.seeds + 3
        experiment = Experiment(arguments.folder.absolute() / name, samples, [], expected)
        figures[name] = compare(experiment, sizes, arguments.seeds)
        print_figures(figures[name])
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
