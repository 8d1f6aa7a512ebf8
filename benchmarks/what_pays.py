"""What pays beside a ramp? Half-lives in samples, Muon, and rows that lengthen.

The protocol, fixed before the runs. Model, data, cosine and evaluation are those of ramp_pays.py.
B0 and the learning rate of A are the ones it found (8 rows, 4.24e-3), at half of its tokens. Every
arm has the same seeds, which are those of the weights and of the order of rows, and differences are
paired by seed.

  A       the constant B0 with AdamW
  D       B0, doubled at 1/4, 1/2 and 3/4 of the samples, rate times sqrt(batch / B0)
  F       rampup_policy=seesaw from B0 to 8 B0
  Dh, Fh  D and F with half_lives_in_samples of adam_b1, adam_b2 and adam_weight_decay
  M       the constant B0 with opt_type=muon, muon_consistent_rms=0.2 and AdamW's weight decay; the
          rate is tuned with seed 0 as ramp_pays.py tunes that of a constant
  MD, MF  D and F with M's optimizer and rate
  MB      M's optimizer with a constant batch of as many steps as MF takes, its rate tuned
  L       A with rows of 32 bytes, of 64 from 1/4 and of 128 from 1/2 of the samples on
  LD      L's rows and D's batches
  L+, LD+ L and LD with as many more samples as A's FLOPs allow

Claims, made before the runs, each by the 90% t-interval of the mean paired difference:

  Half-lives pay in a ramp if Dh is below D, or Fh below F.
  With Muon a ramp costs nothing if MD or MF is within 0.01 nats of M.
  With Muon no ramp is needed (as Qwen found, arXiv 2608.30320) if MB, of as many steps as MF, is
  not above MF. AdamW's answer is that of F against B in ramp_pays.py.
  Length and batch together cost nothing if LD is within 0.01 nats of A. They beat each alone at
  equal FLOPs if LD+ is below both L+ and D, whose FLOPs are A's.

It takes an hour or two on 2 cores. Stop it whenever you like: the same command continues.

python benchmarks/what_pays.py [--tokens 2M] [--seeds 5] [--most_rates 6] [--folder DIR]
                               [--json FILE] [key=value ...]
"""

import pathlib
import sys
from typing import Any

from experiment import MODEL, ROW, Experiment, at_once, paired, print_figures, tuned
from figures import ROOT, parser, save

from maxramp.config.keys import Config
from maxramp.keys.base import base
from maxramp.keys.numbers import parse_count
from maxramp.model.size import training_flops_per_token

B0, RATE = 8, 4.242640687119286e-3  # of ramp_pays.py's A
EQUAL = 0.01  # nats
ROWS = (32, 64, ROW, ROW)  # bytes of a row in each quarter of L
HALF_LIVES = {"half_lives_in_samples": "[adam_b1, adam_b2, adam_weight_decay]"}
MUON = {"opt_type": "muon", "muon_consistent_rms": 0.2, "muon_weight_decay": 0.1}


def lengthened(samples: int) -> int:
    """Returns how many samples L may take for the FLOPs of `samples` whole rows."""
    model = Config.from_values({**base(), **MODEL, "dataset_type": "text"}).model
    whole = training_flops_per_token(model, ROW)
    mean = sum(training_flops_per_token(model, tokens) for tokens in ROWS) / len(ROWS)
    return round(samples * whole / mean) // (16 * B0) * 16 * B0


def lengths(samples: int) -> dict[str, Any]:
    """Returns keys of rows that lengthen."""
    later = {i * samples // 4: {"row_length": ROWS[i]} for i in (1, 2)}
    return {"row_length": ROWS[0], "phases": later, "phases_unit": "samples"}


def doubling(samples: int) -> dict[str, Any]:
    """Returns keys of a batch that doubles with each quarter."""
    return {
        "step_batch_size_schedule": " ".join(f"{i * samples // 4}:{B0 * 2**i}" for i in range(4)),
        "step_batch_size_unit": "samples",
        "batch_size_lr_scaling": "sqrt",
        "batch_size_lr_reference": "initial",
    }


def experiment_of(experiment: Experiment, seeds: int, most_rates: int) -> dict[str, Any]:
    """Runs the protocol; returns its figures."""
    samples, constant = experiment.samples, {"global_batch_size": B0}
    seesaw = {
        "rampup_policy": "seesaw",
        "rampup_ladder": str([round(B0 * 2 ** (i / 2)) for i in range(7)]),
    }
    d, more = doubling(samples), lengthened(samples)
    longer = {"total_samples": more}
    arms: dict[str, list[dict[str, Any]]] = {}

    def train(rate: float, **several: dict[str, Any]) -> None:
        runs = [(name, seed, rate, keys) for name, keys in several.items() for seed in range(seeds)]
        for (name, *_), result in zip(
            runs, at_once(lambda run: experiment.run(*run), runs), strict=True
        ):
            arms.setdefault(name, []).append(result)

    train(RATE, A=constant, D=d, F=seesaw, Dh=d | HALF_LIVES, Fh=seesaw | HALF_LIVES)
    m = tuned(experiment, B0, most_rates, "muon", **MUON)
    train(m["rate"], M=constant | MUON, MF=seesaw | MUON, MD=d | MUON)
    as_long = round(samples / arms["MF"][0]["steps"])
    mb = tuned(experiment, as_long, most_rates, "muon", **MUON)
    train(mb["rate"], MB={"global_batch_size": as_long} | MUON)
    train(
        RATE,
        L=constant | lengths(samples),
        LD=d | lengths(samples),
        **{"L+": constant | lengths(more) | longer, "LD+": doubling(more) | lengths(more) | longer},
    )

    pairs = ("Dh-D", "Fh-F", "MD-M", "MF-M", "MB-MF", "M-A", "L-A", "LD-A", "LD-D", "LD-L")
    pairs += ("D-A", "F-A", "L+-A", "LD+-A", "LD+-L+", "LD+-D")
    apart = {pair: paired(*(arms[name] for name in pair.split("-"))) for pair in pairs}

    def below(pair: str) -> bool:
        return apart[pair]["high"] is not None and apart[pair]["high"] < 0

    def equal(pair: str) -> bool:
        low, high = apart[pair]["low"], apart[pair]["high"]
        return low is not None and low > -EQUAL and high < EQUAL

    return {
        "tokens": samples * ROW,
        "samples_at_equal_flops": more,
        "muon": [m, mb],
        "arms": arms,
        "apart": apart,
        "claims": {
            "half-lives pay: Dh is below D": below("Dh-D"),
            "half-lives pay: Fh is below F": below("Fh-F"),
            "with Muon doubling is free: MD is within 0.01 of M": equal("MD-M"),
            "with Muon Seesaw is free: MF is within 0.01 of M": equal("MF-M"),
            "with Muon no ramp is needed: MB is not above MF": apart["MB-MF"]["low"] is not None
            and apart["MB-MF"]["low"] <= 0,
            "length and batch together are free: LD is within 0.01 of A": equal("LD-A"),
            "at equal FLOPs together beats each alone": below("LD+-L+") and below("LD+-D"),
        },
    }


def main() -> None:
    options = parser("what_pays", __doc__)
    options.add_argument("--tokens", default="2M", help="of every run (2M)")
    options.add_argument("--seeds", type=int, default=5, help="of every arm (5)")
    options.add_argument("--most_rates", type=int, default=6, help="learning rates tried for Muon")
    options.add_argument("--folder", type=pathlib.Path, default=ROOT / "output" / "what_pays")
    options.add_argument("keys", nargs="*", help="key=value of every run")
    arguments = options.parse_intermixed_args()
    samples = (parse_count(arguments.tokens) or 0) // ROW // (16 * B0) * 16 * B0
    if not samples or arguments.seeds < 1 or arguments.most_rates < 3:
        sys.exit("error: too few --tokens, --seeds or --most_rates")
    expected = 13 * arguments.seeds + 2 * min(4, arguments.most_rates)
    experiment = Experiment(arguments.folder.absolute(), samples, arguments.keys, expected)
    figures = experiment_of(experiment, arguments.seeds, arguments.most_rates)
    print_figures(figures)
    save(arguments.json, figures)


if __name__ == "__main__":
    main()
