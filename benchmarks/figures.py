"""Where figures go: benchmarks/results/NAME.json, with what they were taken on."""

import argparse
import json
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import jax

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def parser(name: str, description: str) -> argparse.ArgumentParser:
    """Makes the options that every benchmark has."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--json", default=str(RESULTS / f"{name}.json"), help="file for figures")
    return options


def save(path: str, figures: Any, devices: Sequence[str] = ()) -> None:
    """Writes the figures, with the versions and the hardware they were taken on."""
    taken_on = {
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "devices": list(devices) or ["cpu"],
    }
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(path).write_text(json.dumps({**taken_on, "figures": figures}, indent=2) + "\n")
    print(f"written to {path}")
