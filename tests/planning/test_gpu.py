"""The preflight on the GPU's compiler; the step of every shipped model by it and by the TPU's."""

import dataclasses
import json

import pytest
from compilers import needs_cuda, needs_libtpu
from conftest import BASE, TINY, check_refusal, table
from in_process import run_here

from maxramp.config.load import load
from maxramp.model.size import training_flops_per_token
from maxramp.planning import gpu
from maxramp.planning.compiled import compile_stages

CLUSTER = [
    *(*TINY, "base_emb_dim=256", "base_mlp_dim=512", "head_dim=64", "vocab_size=512"),
    *("base_num_query_heads=4", "base_num_kv_heads=4", "base_num_decoder_layers=3"),
    *("max_target_length=512", "dtype=bfloat16", "run_name=cluster", "loss_block_tokens=0"),
    *("compile_topology=h200:2x4", "enable_rampup_batch_size=False", "steps=10"),
    *("per_device_batch_size=2", "dataset_type=synthetic", "eval_interval=-1"),
]


def arguments(*more: str) -> list[str]:
    return [BASE, *CLUSTER, *more]


def compiled(*more: str):
    """The one stage of the cluster's config, and the config."""
    config = load(arguments(*more))
    result = compile_stages(config)
    assert len(result["stages"]) == 1
    return result["stages"][0], result, config


def expected_flops(config, tokens_per_device: float, again: int = 1) -> float:
    """The analytic count; cuDNN's kernel makes the scores once more in the backward pass."""
    m, T = config.model, config.model.max_target_length
    W = min(m.sliding_window_size or T, T)
    seen = W * (2 * T - W) / T  # twice the keys that a token sees on average
    extra = again * m.base_num_decoder_layers * m.base_num_query_heads * m.head_dim * seen
    return tokens_per_device * (training_flops_per_token(m, T) + extra)


@needs_cuda
def test_a_cluster_that_shards_over_all_of_its_gpus():
    """With two passes a step, which 0.12's compiler makes a loop that does not say its turns."""
    s, result, config = compiled("gradient_accumulation_steps=2")
    assert (result["compile_topology"], result["devices"]) == ("h200:2x4", 8)
    assert result["device"] == "GPU"
    sizes = {"data": 1, "stage": 1, "fsdp": 8, "expert": 1, "context": 1, "tensor": 1}
    assert result["mesh"] == sizes
    assert s["flops_per_device"] == pytest.approx(expected_flops(config, 2 * 2 * 512), rel=0.02)
    # Each of 8 GPUs receives from 7, of which 6 parts come over NVLink and one from the other node.
    nvlink, network = s["collective_gib"], s["network_gib"]
    for kind in ("all-gather", "reduce-scatter", "all-reduce"):
        assert nvlink[kind] == pytest.approx(6 * network[kind])
    # Every weight that is sharded is gathered forward and backward, its gradient scattered once a
    # pass; twice the parts that a GPU does not have itself, in bfloat16.
    weights = 3 * (4 * 256 * 4 * 64 + 3 * 256 * 512) + 2 * 512 * 256
    received = 2 * weights * 2 * 7 / 8 / 2**30
    assert received <= nvlink["all-gather"] + network["all-gather"] <= 2.2 * received
    memory = s["memory_gib"]
    assert s["fits"] and memory["limit"] == pytest.approx(0.75 * 141)
    assert 0 < memory["arguments"] + memory["temporaries"] <= memory["peak"] * 1.01
    assert s["step_seconds"] == pytest.approx(s["compute_seconds"] + s["collective_seconds"])
    assert s["step_seconds"] >= s["flops_per_device"] / (0.75 * 989.4e12)
    assert s["tokens_per_second"] == pytest.approx(2 * 16 * 512 / s["step_seconds"])


@needs_cuda
def test_experts_compute_their_own_rows_alone():
    """Dense, each of the 8 experts would compute all rows: 4 times these FLOPs."""
    s, result, config = compiled(
        *("compile_topology=h200:1x4", "decoder_block=mixtral", "base_num_decoder_layers=1"),
        *("num_experts=8", "num_experts_per_tok=2"),
    )
    assert result["grouped_matmul"] == "triton"
    assert s["flops_per_device"] == pytest.approx(expected_flops(config, 2 * 512), rel=0.02)


@needs_cuda
@pytest.mark.parametrize("window", ((), ("decoder_block=mistral", "sliding_window_size=128")))
def test_our_attention_kernel_is_counted(window):
    """Its two backward kernels make the scores twice more, and once more what they follow from."""
    s, _, config = compiled("compile_topology=h200:1x4", "head_dim=256", *window)
    assert s["flops_per_device"] == pytest.approx(expected_flops(config, 2 * 512, 3), rel=0.005)


@needs_cuda
def test_axes_and_the_links_they_cross():
    """Tensor inside a node, fsdp between nodes: activations over NVLink, weights over the other."""
    s, _, config = compiled("ici_tensor_parallelism=4")
    assert s["flops_per_device"] == pytest.approx(expected_flops(config, 2 * 512), rel=0.02)
    # A GPU fetches the other half of its quarter of every product's weights, and of the embedding.
    weights = (3 * (4 * 256 * 4 * 64 + 3 * 256 * 512) + 2 * 512 * 256) / 4
    gathered = weights * 2 / 2 / 2**30
    assert gathered <= sum(s["network_gib"].values()) <= 4.5 * gathered
    # Each layer sums its two results over tensor, forward and backward: 8 rows of 512 tokens.
    summed = 3 * 4 * (8 * 512 * 256 * 2) * 2 * 3 / 4 / 2**30
    assert 0.7 * summed <= sum(s["collective_gib"].values()) <= 2 * summed


@needs_cuda
@pytest.mark.parametrize(
    "kind", ["h100", "file", *(pytest.param(x, marks=pytest.mark.long) for x in ("a100", "b200"))]
)
def test_every_kind_of_gpu(kind, tmp_path):
    if kind == "file":
        fields = dataclasses.asdict(gpu.GPUS["h200"]) | {"name": "mine", "cores": 120}
        path = tmp_path / "mine.yml"
        path.write_text(json.dumps(fields))
        kind = str(path)
    s, result, config = compiled(f"compile_topology={kind}:1x2")
    assert s["fits"] and not s["network_gib"] and s["collective_gib"]["all-gather"] > 0
    assert s["flops_per_device"] == pytest.approx(expected_flops(config, 2 * 512), rel=0.02)
    assert result["compile_topology"] == f"{kind}:1x2"


# Of every family, tied and not, and what is large.
MODELS = (
    *("llama2-7b", "llama3-8b", "llama3-405b", "llama3.2-1b", "mistral-7b", "qwen2.5-7b"),
    *("qwen3-8b", "smollm2-360m"),
)
TWO = ("llama3.2-1b", "qwen3-8b")  # tied weights, and scales of queries and keys


def some_layers_of(name, layers, topology):
    """A model's config, and what the compiler says: real width, kernels and options of a run."""
    keys = (f"base_num_decoder_layers={layers}", "max_target_length=2048", "dtype=bfloat16")
    keys += ("sliding_window_size=512",) if name == "mistral-7b" else ()
    model = (f"model_name={name}", *CLUSTER_KEYS, f"compile_topology={topology}")
    config = load([BASE, *model, *keys])
    (stage,) = compile_stages(config)["stages"]
    return config, stage


@needs_cuda
@pytest.mark.parametrize(
    "name",
    [x if x in (*TWO, "mistral-7b") else pytest.param(x, marks=pytest.mark.long) for x in MODELS],
)
def test_shipped_models_compile_for_gpus(name):
    config, stage = some_layers_of(name, 4, "h200:8x8")  # XLA failed from 3 on
    assert stage["flops_per_device"] == pytest.approx(expected_flops(config, 2048), rel=0.02)


@needs_libtpu
@pytest.mark.parametrize(
    "name", [x if x == TWO[0] else pytest.param(x, marks=pytest.mark.long) for x in MODELS]
)
def test_shipped_models_compile_for_tpus(name):
    _, stage = some_layers_of(name, 2, "v5p:4x4x4")
    assert stage["fits"] and stage["flops_per_device"] > 0


CLUSTER_KEYS = [
    *("learning_rate=1e-4", "enable_rampup_batch_size=False", "steps=10", "loss_block_tokens=0"),
    *("per_device_batch_size=1", "dataset_type=synthetic", "eval_interval=-1"),
]


REFUSED = table("""
h200:16 | h200:16 | h200:16x8
h200 | compile_topology=h200 | h200:16x8
h200:0x8 | h200:0x8 | nodes x GPUs
h200:2x2x2 | h200:2x2x2 | nodes x GPUs
h300:2x8 | h300:2x8 | a100, h100, h200, b200 | v5p-2048
gone.yml:2x8 | gone.yml | no such config file
{f}/bad.yml:2x8 | bad.yml | clock_ghz | missing or unknown
{f}/low.yml:2x8 | low.yml | cores: 0 | above 0
h200:2x4 compile_topology_num_slices=2 | compile_topology_num_slices=2
""")


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case[0])
def test_refused(case, tmp_path):
    fields = dataclasses.asdict(gpu.GPUS["h200"])
    for name, change in (("bad", {"clock_ghz": None}), ("low", {"cores": 0})):
        kept = {key: value for key, value in (fields | change).items() if value is not None}
        (tmp_path / f"{name}.yml").write_text(json.dumps(kept))
    topology, *parts = case
    keys = f"compile_topology={topology}".replace("{f}", str(tmp_path)).split()
    line = arguments(*keys, f"base_output_directory={tmp_path}")
    check_refusal(run_here(*line, module="compile"), *parts)
