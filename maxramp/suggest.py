"""Suggests a ramp for a run, or none, from what other runs have measured.

python -m maxramp.suggest CONFIG.yml [key=value ...] [options]

It compares the suggestion with the config as it is, and prints the keys that make it
(docs/noise.md).
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import json
import sys
from typing import Any

from maxramp.commandline import command, config_parser, print_progress, print_table, show_keys
from maxramp.config.load import load
from maxramp.measuring.suggestion import suggest
from maxramp.planning.run_length import with_length


@command
def main(arguments: list[str]) -> int:
    parser = config_parser(__doc__)
    text = "a run with log_gradient_noise_scale=true, which gives the shape of the ramp"
    parser.add_argument("--noise", metavar="RUN", help=text)
    text = "a run that maxramp.branch has measured, which gives its height"
    parser.add_argument("--branch", metavar="RUN", help=text)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    options = parser.parse_intermixed_args(arguments)
    config = with_length(load(options.arguments, "suggest"), print_progress)
    suggestion = suggest(config, options.noise, options.branch)
    print(json.dumps(suggestion, indent=2)) if options.json else print_suggestion(suggestion)
    return 0


def print_suggestion(suggestion: dict[str, Any]) -> None:
    """Prints what `suggest` returns: the comparison, what was measured, and the keys."""
    batches, first = suggestion["batches"], suggestion["rows"][0]
    rows = [
        [
            row["name"],
            f"{row['steps']:,}",
            f"{row['steps'] / first['steps']:.2f}x",
            f"{row['node_time'] / first['node_time']:.2f}x",
            {True: "yes", False: "no", None: "-"}[row.get("within")],
            row["batches"],
        ]
        if row["steps"]
        else [row["name"], "-", "-", "-", "-", "cannot run, see below"]
        for row in suggestion["rows"]
    ]
    heads = ("", "steps", "steps,\nrelative", "node-time,\nrelative", "within what\nwas measured")
    print_table([*heads, "batches"], rows)
    for line in suggestion["evidence"]:
        print(f"measured  {line}")
    limits = list(suggestion["limits"])
    for row in suggestion["rows"]:
        if not row["steps"]:
            limits.append(f"{row['name']} cannot run: {row['why']}")
    for line in limits:
        print(f"limit     {line}")
    if batches is None:
        why = "what was measured does not tell (see the limits)"
        if not suggestion["evidence"]:
            why = "no measurement is given. Train with log_gradient_noise_scale=true and give "
            why += "--noise RUN, or run maxramp.branch and give --branch RUN"
        print(f"suggested nothing: {why}")
        return
    if len(batches) == 1:
        print(
            f"suggested no ramp: a constant batch of {batches[0][1]} does as well, as far as was "
            "measured"
        )
    else:
        print("suggested a ramp; its learning rate is that of its first batch, at the peak")
    print(f"steps     {suggestion['saves']}")
    print(show_keys(suggestion["keys"]))


if __name__ == "__main__":
    sys.exit(main())
