"""Muon through the compilers of TPU pods and GPU clusters: what it sends and computes beyond AdamW,
held against arithmetic."""

import pytest
from compilers import skip_without
from conftest import BASE
from test_pipelines import MODEL, D, F, H, K, L, h

from maxramp.config.load import load
from maxramp.planning.compiled import compile_stages

TPUS, GPUS = "compile_topology=v5p:2x2x2", "compile_topology=h200:2x4"
CASES = {
    "copies": [TPUS, "ici_data_parallelism=2"],
    "stages": [TPUS, "ici_pipeline_parallelism=2", "num_pipeline_microbatches=4"],
    "GPUs, tensor": [GPUS, "ici_tensor_parallelism=2"],
}


def compiled(*more):
    result = compile_stages(load([BASE, *MODEL, "per_device_batch_size=2", *more]))
    return result["stages"][0], result["mesh"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[pytest.mark.long] * (x == "stages")) for x in CASES]
)
def test_muon_sends_and_computes_what_arithmetic_says(case):
    """A device's part of every matrix leaves it and comes back, in bfloat16, along each axis that
    matrices are sharded on; copies gather the results. Matrices of one shape are shared by all."""
    gpus = GPUS in CASES[case]
    skip_without("h200" if gpus else "v5p")
    (adamw, mesh), (muon, _) = (compiled(*CASES[case], f"opt_type={o}") for o in ("adamw", "muon"))

    def received(stage, kind):
        sent = stage["collective_gib"], stage["network_gib"]
        return sum(by_kind.get(kind, 0) for by_kind in sent) * 2**30

    d, S, f, t = (mesh[axis] for axis in ("data", "stage", "fsdp", "tensor"))
    flops, travelled, gathered = 0, 0, 0
    # Queries and outputs, keys and values, the MLP's three.
    for count, M, N in ((2, D, H * h), (2, K * h, D), (3, D, F)):
        M, N, matrices = min(M, N), max(M, N), count * L // S  # of a stage
        copies = d if matrices > f * t else 1  # that share them
        own = -(-matrices // (copies * f * t))  # matrices that a device makes orthogonal
        flops += own * 5 * (4 * M * M * N + 2 * M * M * M)
        part = own * M * N * 2
        travelled += 2 * part * ((f - 1) / f + (t - 1) / t)
        gathered += part * (copies - 1)
    more = received(muon, "all-to-all") - received(adamw, "all-to-all")
    assert more == pytest.approx(travelled, rel=0.05)
    more = received(muon, "all-gather") - received(adamw, "all-gather")
    assert more == pytest.approx(gathered, rel=0.05, abs=0.01 * travelled)
    more = muon["flops_per_device"] - adamw["flops_per_device"]
    assert more == pytest.approx(flops, rel=0.02, abs=0.001 * adamw["flops_per_device"])
    # A mean for each matrix that is not there.
    matrices = L / S * (D * h * (2 * H + 2 * K) + 3 * D * F) * 4 / (f * t) / 2**30
    less = adamw["memory_gib"]["arguments"] - muon["memory_gib"]["arguments"]
    assert less == pytest.approx(matrices, rel=0.05)
