"""What the commands say when they are asked: --help, --help-keys and --version."""

import argparse
from collections.abc import Sequence

import maxramp
from maxramp.keys.base import CONFIGS

_OF_ALL = """
  --help           show this
  --help-keys      list every key with its default, its unit and what it is for (docs/keys.md)
  --version        show the version

A value is YAML: steps=100, learning_rate=3e-4, rampup_batch_size=[16,16,800], packing=false."""


def answer(arguments: Sequence[str], doc: str) -> None:
    """Answers a command line that asks about a command which takes a config.

    Args:
      arguments: after the program's name.
      doc: of the command's module: what it does, `usage`, its options.

    Raises:
      SystemExit: it asked, and has its answer.
    """
    asked = set(arguments)
    if {"-h", "--help", "help"} & asked:
        own = doc.strip("\n")
        print(own + ("" if own.splitlines()[-1].startswith("  ") else "\n") + _OF_ALL)
    elif "--help-keys" in asked:
        print(keys())
    elif "--version" in asked:
        print(f"maxramp {maxramp.__version__}")
    else:
        return
    raise SystemExit(0)


def usage(doc: str) -> str:
    """The command line that a module's doc shows."""
    return next(line for line in doc.splitlines() if line.startswith("python -m"))


def keys() -> str:
    """Every key with its default and its comment: configs/base.yml."""
    return (CONFIGS / "base.yml").read_text()


def list_keys(parser: argparse.ArgumentParser) -> None:
    """Has a parser of options, with key=value beside them, take --help-keys."""
    text = "list every key with its default"
    parser.add_argument("--help-keys", action="version", version=keys(), help=text)
