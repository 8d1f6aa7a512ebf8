"""Metrics of a run whose noise scale is known."""

import json
import pathlib
from collections.abc import Sequence

import numpy as np


def write_noise(
    folder: pathlib.Path, scales: Sequence[float], batch: int, row_tokens: int, spread: float = 0.01
) -> pathlib.Path:
    """Writes metrics of steps of `batch` rows, whose noise scales in rows scatter by `spread`."""
    rng, lines = np.random.default_rng(0), []
    for step, scale in enumerate(scales):
        signal, variance = 1 + spread * rng.standard_normal(2)
        record = {"step": step, "loss": 1.0, "global_batch_size": batch}
        record |= {"consumed_samples": batch * (step + 1), "target_tokens": row_tokens * batch}
        record |= {"consumed_tokens": row_tokens * batch * (step + 1)}
        record |= {"norms_noise_signal": signal}
        record |= {"norms_noise_variance": row_tokens * scale * variance}
        lines.append(json.dumps(record) + "\n")
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(lines))
    return folder
