"""Lists the commands, and runs any of them by its name.

python -m maxramp [COMMAND ARGUMENTS ...]
"""

import difflib
import runpy
import sys
from collections.abc import Sequence

import maxramp
from maxramp.errors import ConfigError, report

COMMANDS = {
    "train": "trains a model, or continues a run",
    "plan": "shows what a run will do: stages, nodes, cost, memory",
    "prepare": "tokenizes documents into a data set for training",
    "launch": "starts a run here, under SLURM or on GKE, and restarts it until it is done",
    "compile": "compiles every stage for a TPU pod or GPU cluster, without one",
    "generate": "writes text with the weights of a run",
    "evaluate": "evaluates a model on tasks of lm-eval",
    "grpo": "trains a model by reinforcement learning (GRPO)",
    "convert": "exports a trained model in Hugging Face's format",
    "report": "shows where the wall time of runs went, and what they cost",
    "noise": "shows the gradient noise scale of a run",
    "suggest": "suggests a ramp for a run, or none, from what was measured",
    "branch": "measures the critical batch size at a checkpoint, by training at several sizes",
    "checkpoint": "lists, shows and verifies the checkpoints of a run",
}


def main(arguments: Sequence[str] | None = None) -> int:
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "help"):
        print("usage: python -m maxramp COMMAND ...   or   maxramp COMMAND ...\n")
        for command, what in COMMANDS.items():
            print(f"  {command:<12}{what}")
        print("\nmaxramp COMMAND --help explains one. A first run, in about a minute:\n")
        print("  maxramp train configs/base.yml")
        return 0
    if name == "--version":
        print(f"maxramp {maxramp.__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        return report(ConfigError(f"{name} is not a command of maxramp; {hint}"))
    sys.argv[1:] = rest
    # As `python -m maxramp.NAME`, processes that it starts included: they run its module again.
    runpy.run_module(f"maxramp.{name}", run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
