"""Measures how large the batch may be at a checkpoint of a run: the critical batch size.

python -m maxramp.branch RUN --at STEP --sizes 8,16,32,64 [--tokens N] [--tolerance 0.01]
    [--json] [key=value ...]

From checkpoint STEP of RUN each size trains on the same rows, at the learning rate that the run had
there times sqrt(size / its batch), and is evaluated on all held-out rows. The answer is the largest
size up to which no loss is more than the tolerance above that of a smaller size. Branches are runs
in RUN/branches. If it is interrupted, run the same command again to continue. key=value goes to
each of them: hardware=gpu, per_device_batch_size=16 (docs/noise.md).
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.outlive_readers()

import json
import math
import sys
from typing import Any

from maxramp.commandline import Parser, command, print_table, short
from maxramp.errors import ConfigError
from maxramp.measuring.branches import Experiment
from maxramp.measuring.noise import KINDS
from maxramp.processes.backend import take_hardware
from maxramp.run.metrics import as_json


@command
def main(arguments: list[str]) -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="its folder, or its address in an object storage")
    add("--at", type=int, required=True, metavar="STEP", help="the step of the checkpoint")
    add("--sizes", required=True, help="global batch sizes, comma-separated: 8,16,32,64")
    text = "tokens that each branch trains on, such as 20M (a tenth of the run's)"
    add("--tokens", default="", metavar="N", help=text)
    text = "nats per token that a loss may be above a smaller size's (0.01)"
    add("--tolerance", type=float, default=0.01, metavar="NATS", help=text)
    add("--json", action="store_true", help="print the result as JSON when all is done")
    add("keys", nargs="*", metavar="key=value", help="for every branch")
    options = parser.parse_intermixed_args(arguments)
    if not 0 <= options.tolerance < math.inf:
        raise ConfigError(f"--tolerance {options.tolerance:g} must be 0 nats or more")
    take_hardware("cpu")  # the devices are for the branches
    experiment = Experiment(options.run, options.at, options.sizes, options.tokens, options.keys)
    if status := experiment.train(sys.stderr if options.json else sys.stdout):
        return status
    result = experiment.result(options.tolerance)
    print(json.dumps(as_json(result))) if options.json else print_result(result)
    return 0


def print_result(result: dict[str, Any]) -> None:
    """Prints what `Experiment.result` returns: the table of sizes, the largest that costs nothing,
    and what it rests on."""
    columns = (
        *("batch", "steps", "learning\nrate", "held-out\nloss", "above the\nbest smaller"),
        *("90% interval", "within"),
    )
    rows = [
        [
            f"{size['rows']:,}",
            f"{size['steps']:,}",
            f"{size['learning_rate']:.3g}",
            f"{size['loss']:.4f}",
            f"{size['above']:+.4f}",
            "-" if size["low"] is None else f"{size['low']:+.4f} to {size['high']:+.4f}",
            "yes" if size["within"] else "no",
        ]
        for size in result["sizes"]
    ]
    rows[0][4:6] = "-", "-"  # the smallest size is compared with none
    print_table(columns, rows, ["steps", "learning\nrate"])
    print(
        f"window    {short(result['samples'] * result['row_tokens'])} tokens from step "
        f"{result['step']:,} on (sample {result['first_sample']:,}), where the run's batch is "
        f"{result['batch']:,}: {result['share_of_run']:.0%} of the run"
    )
    if result["surely"] is None:
        interval = (
            "no interval: fewer than 8 evaluation batches; use a smaller eval_per_device_batch_size"
        )
    else:
        interval = f"interval {result['surely']:,} to {result['possibly']:,}"
    hint = ""
    if result["sizes"][-1]["within"]:
        hint = "; no larger one was tried"
    elif result["largest"] == result["sizes"][0]["rows"]:
        hint = "; every larger one costs something: try smaller ones"
    print(
        f"largest   batch {result['largest']:,} within {result['tolerance']:g} nats "
        f"({interval}){hint}"
    )
    for kind, name in KINDS.items():
        if noise := result["noise"].get(f"{kind}noise_scale"):
            print(
                f"noise     {noise['noise_scale']:.3g} rows ({name}): the largest batch is "
                f"{noise['factor']:.3g} times that"
            )
    print(
        "caution   in a short window at a constant learning rate a large batch shows its smaller "
        "noise at once, and what it has not learned only later: branch over longer windows "
        "(--tokens) and at several places before you take its largest batch"
    )
    print(f"file      {result['file']}")


if __name__ == "__main__":
    sys.exit(main())
