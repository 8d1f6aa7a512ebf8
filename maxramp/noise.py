"""Shows the gradient noise scale of a run, as a table and a picture.

python -m maxramp.noise RUN [--blocks N] [--plot FILE] [--json]

RUN is the folder of a run that was trained with log_gradient_noise_scale=true.

The noise scale is the batch at which the noise of a step's gradient is as large as the gradient
itself. A ramp should have its shape, but may be higher, by a factor that only training can tell:
maxramp.branch measures it (docs/noise.md).
"""

if __name__ == "__main__":  # before the imports that take a second
    from maxramp import console

    console.end_with_readers()

import dataclasses
import json
import sys

from maxramp.commandline import Parser, command, print_table, short
from maxramp.files.place import place
from maxramp.measuring.noise import KINDS, Block, draw_noise, noise_curves

_COLUMNS = (
    *("samples", "steps", "batch\nrows", "noise scale\nrows", "90% interval\nrows"),
    *("batch\ntargets", "noise scale\ntargets"),
)


@command
def main(arguments: list[str]) -> int:
    parser = Parser(__doc__)
    add = parser.add_argument
    add("run", metavar="RUN", help="its folder, or its address in an object storage")
    add("--blocks", type=int, default=12, metavar="N", help="rows of the table (12)")
    add("--plot", metavar="FILE", help="where to draw the picture (RUN/noise.png)")
    add("--json", action="store_true", help="print the curves as JSON")
    options = parser.parse_args(arguments)
    run = place(options.run)
    curves = noise_curves(run, options.blocks)
    if options.json:
        named = {f"{kind}noise_scale": curve for kind, curve in curves.items()}
        print(json.dumps(named, default=dataclasses.asdict))
    else:
        for kind, curve in curves.items():
            print(f"noise scale, {KINDS[kind]}")
            print_table(_COLUMNS, map(_row, curve), ["batch\ntargets", "steps"])
    plot = place(options.plot) if options.plot else run / "noise.png"
    draw_noise({KINDS[kind]: curve for kind, curve in curves.items()}, plot)
    if not options.json:
        print(f"picture   {plot}")
    return 0


def _row(block: Block) -> list[str]:
    scale, low, high = block.rows
    return [
        f"{short(block.first_sample)} - {short(block.last_sample)}",
        f"{block.steps:,}",
        f"{block.batch_rows:,.3g}",
        "-" if scale is None else f"{scale:,.3g}",
        f"{low:,.3g} - {'no end' if high is None else f'{high:,.3g}'}",
        short(float(f"{block.batch_target_tokens:.3g}")),
        "-" if scale is None else short(float(f"{block.noise_scale:.3g}")),
    ]


if __name__ == "__main__":
    sys.exit(main())
