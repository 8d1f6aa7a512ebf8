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
    "prepare": "tokenizes documents into files that training reads by row number",
    "launch": "starts a run here, under SLURM or on GKE, and restarts it until it is done",
    "compile": "compiles every stage for a TPU pod, without a TPU",
    "generate": "writes text with the weights of a run",
    "evaluate": "evaluates a model on the tasks of lm-eval, the field's harness",
    "grpo": "improves a model by rewards: reinforcement learning",
    "convert": "writes a trained model as a folder that transformers opens",
    "report": "shows where the wall time of runs went, and what they cost",
    "noise": "shows how noisy a run's gradients are, and for how large a batch",
    "suggest": "suggests a ramp for a run, or none, from what was measured",
    "branch": "measures how large the batch may be at a checkpoint, by training at several sizes",
    "checkpoint": "lists, shows and verifies the checkpoints of a run",
}


def main(arguments: Sequence[str] | None = None) -> int:
    name, *rest = list(sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "help"):
        print("usage: python -m maxramp COMMAND ...   or   maxramp COMMAND ...\n")
        for command, what in COMMANDS.items():
            print(f"  {command:<12}{what}")
        print("\nmaxramp COMMAND --help says more of one. A first run, in about a minute:\n")
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
