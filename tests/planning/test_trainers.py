"""`maxramp.plan --trainer`: what other trainers do with a ramp, by hand and by their arithmetic."""

import json
import math
import shlex

import pytest

from maxramp import plan
from maxramp.config.load import load
from maxramp.keys.megatron import translate_flags
from maxramp.planning.trainers import TRAINERS, side_by_side

MAXTEXT = """
base_config: base.yml
enable_rampup_batch_size: true
per_device_batch_size_start: 1
per_device_batch_size_increment: 1
per_device_batch_size: 4
global_rampup_samples: 60
learning_rate: 3.e-5
"""


@pytest.fixture
def compared(tmp_path, capsys):
    def run(trainer, text, *keys):
        (tmp_path / "theirs").write_text(text)
        line = [str(tmp_path / "theirs"), "--trainer", trainer, *keys]
        status = plan.main([*line, "--json"])
        out, error = capsys.readouterr()
        if status:
            assert error.count("\n") == 1
            return error
        assert plan.main(line) == 0
        return json.loads(out) | {"printed": capsys.readouterr().out}

    return run


def test_maxtext(compared):
    """5 steps of 4, 3 of 8 and 2 of 12 are 68 rows of 5 loaded batches of 16."""
    found = compared("maxtext", MAXTEXT, "devices_per_node=4")
    batches = [[0, 4], [5, 8], [8, 12], [10, 16]]
    assert found["theirs"] == found["ours"] == batches
    assert "trains on 68 of the 80 rows that its ramp loads" in found["printed"]
    assert "the same batches from the same steps" in found["printed"]


def test_maxtext_forgets_the_accumulation(compared):
    """Of a loaded batch of 32 its ramp takes 16; maxramp's batches are twice as large: 20 samples
    an increment are 3 steps of 8, 2 of 16, 1 of 24."""
    found = compared("maxtext", MAXTEXT + "gradient_accumulation_steps: 2\n", "devices_per_node=4")
    assert found["theirs"] == [[0, 4], [5, 8], [8, 12], [10, 32]]
    assert found["ours"] == [[0, 8], [3, 16], [5, 24], [6, 32]]
    assert "68 of the 160 rows" in found["printed"]
    assert side_by_side(found)[:3] == [(0, 4, 8), (3, 4, 16), (5, 8, 24)]


@pytest.mark.parametrize(("devices", "samples"), [(4, 61), (8, 500), (3, 100)])
def test_maxtext_by_its_own_loop(devices, samples, compared):
    """Step by step, as its manager counts."""
    keys = f"global_rampup_samples: {samples}"
    text = MAXTEXT.replace("global_rampup_samples: 60", keys)
    wanted, batch, count, step = [], devices, 0, 0
    while batch < 4 * devices:
        if not wanted or wanted[-1][1] != batch:
            wanted.append([step, batch])
        count, step = count + batch, step + 1
        if count >= samples / 3:
            batch, count = batch + devices, 0
    found = compared("maxtext", text, f"devices_per_node={devices}")
    assert found["theirs"] == found["ours"] == [*wanted, [step, 4 * devices]]


@pytest.mark.parametrize(
    ("changed", "devices", "said"),
    [
        ({"samples: 60": "samples: 0"}, 4, "a constant batch of 16"),
        ({"increment: 1": "increment: 0"}, 4, "stops with a ZeroDivisionError"),
        ({"increment: 1": "increment: 0.125"}, 4, "less than a row on all devices"),
        # 1.1, 1.3, 1.5, 1.7
        ({"start: 1": "start: 1.1", "increment: 1": "increment: 0.2", "size: 4": "size: 1.7"}, 10,
         "stops with a ValueError: 0.59999999999999987 % 0.2"),
    ],
)  # fmt: skip
def test_what_maxtext_takes_otherwise_or_not_at_all(changed, devices, said, compared):
    text = MAXTEXT
    for old, new in changed.items():
        text = text.replace(old, new)
    found = compared("maxtext", text, f"devices_per_node={devices}")
    assert said in found["printed"]
    if devices == 10:
        assert [batch for _, batch in found["ours"]] == [11, 13, 15, 17]


MEGATRON = """
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 32 \\
    --rampup-batch-size 16 16 96 --global-batch-size 32 \\
    --seq-length=10 --train-samples 1000  # a test
"""


def test_megatron_reads_the_old_flag_no_more(compared):
    """96 samples over one increment: 6 steps of 16."""
    found = compared("megatron", MEGATRON)
    assert found["theirs"] == [[0, 32]] and found["ours"] == [[0, 16], [6, 32]]
    assert '--step-batch-size-schedule "0:16 960:32" ramps there' in found["printed"]
    ramp = '--step-batch-size-schedule "0:16 960:32"'
    text = MEGATRON.replace("--rampup-batch-size 16 16 96 --global-batch-size 32", ramp)
    assert compared("megatron", text)["theirs"] == [[0, 16], [6, 32]]
    text = text.replace(ramp, f"{ramp} --global-batch-size 32")
    assert "stops with a ValueError" in compared("megatron", text)["printed"]


def test_megatrons_command_line_becomes_ours(compared):
    """The command that is printed is that of the plan below it; what has no key here is named."""
    more = "--hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1408 --bf16 --lr 3e-4"
    more += " --min-lr 3e-5 --lr-warmup-samples 20 --tensor-model-parallel-size 2 --swiglu"
    more += " --eod-mask-loss $EXTRA"
    more += " --micro-batch-size 2 --untie-embeddings-and-output-weights --optimizer adam"
    found = compared("megatron", MEGATRON.replace("#", f"{more} #"), "devices_per_node=4")
    assert found["left_out"] == ["--eod-mask-loss", "$EXTRA"]
    line = next(x for x in found["printed"].splitlines() if x.startswith("python -m"))
    _, _, _, *arguments = shlex.split(line)
    config = load(arguments)
    model, batch = config.model, config.batch
    assert (model.base_num_decoder_layers, model.base_emb_dim, model.head_dim) == (32, 512, 64)
    assert (model.base_num_kv_heads, model.base_mlp_dim) == (8, 1408)
    words = ["--num-layers", "2", "--hidden-size", "4096", "--num-attention-heads", "32"]
    assert translate_flags(words)[0]["base_mlp_dim"] == 16384
    assert translate_flags([*words, "--swiglu"])[0]["base_mlp_dim"] == 10880
    assert not model.logits_via_embedding and model.dtype == "bfloat16"
    assert (batch.rampup_batch_size, batch.micro_batch_size) == ([16, 16, 96], 2)
    assert (batch.global_batch_size, batch.total_samples) == (32, 1000)
    assert (batch.max_target_length, config.mesh.ici_tensor_parallelism) == (10, 2)
    rate = config.learning_rate
    assert (rate.warmup_steps_fraction, rate.learning_rate_final_fraction) == (0.02, 0.1)
    assert "fsdp 2 x tensor 2" in found["printed"] and "left out" in found["printed"]
    assert "num_nodes=N devices_per_node=N" in compared("megatron", MEGATRON)["printed"]


QWEN3_30B = """--num-layers 48 --hidden-size 2048 --num-attention-heads 32 --qk-layernorm
--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --moe-aux-loss-coeff 1e-3
--moe-token-dispatcher-type alltoall --moe-grouped-gemm --moe-layer-freq ([1]*48)
--expert-model-parallel-size 8"""
DEEPSEEK = """--num-layers 61 --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048
--qk-layernorm --moe-layer-freq ([0]*3+[1]*58) --moe-shared-expert-intermediate-size 2048
--moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-topk-scaling-factor 2.5
--moe-router-score-function sigmoid --moe-router-enable-expert-bias
--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4
--moe-router-dtype fp32"""


@pytest.mark.parametrize(
    ("text", "wanted", "without"),
    [
        (
            QWEN3_30B,
            {"decoder_block": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
            | {"base_moe_mlp_dim": 768, "norm_topk_prob": True, "ici_expert_parallelism": 8}
            # Megatron adds up the losses of layers, of which we take the mean.
            | {"load_balance_loss_scope": "pass", "load_balance_loss_weight": 0.048},
            [],
        ),
        (
            f"{QWEN3_30B} --moe-router-pre-softmax --moe-expert-capacity-factor 1.0",
            {"decoder_block": "qwen3_moe", "norm_topk_prob": False},
            [
                "--moe-expert-capacity-factor (capacity_factor counts within a row, and keeps the "
                "first tokens)"
            ],
        ),
        (
            DEEPSEEK,
            {"decoder_block": "dots1", "first_num_dense_layers": 3, "shared_experts": 1}
            | {"n_routing_groups": 8, "topk_routing_group": 4, "routed_scaling_factor": 2.5}
            | {"routed_score_func": "sigmoid", "routed_bias": True, "norm_topk_prob": True}
            | {"routed_bias_update_rate": 0.001, "load_balance_loss_scope": "row"}
            | {"load_balance_loss_weight": 0.0058},
            [],
        ),
        (
            "--num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-router-pre-softmax "
            "--moe-layer-freq 2 --ffn-hidden-size 100 --moe-shared-expert-intermediate-size 150",
            {"decoder_block": "mixtral", "num_experts_per_tok": 2},
            ["--moe-router-load-balancing-type sinkhorn", "--moe-router-pre-softmax"]
            + ["--moe-layer-freq", "--moe-shared-expert-intermediate-size"],
        ),
        (
            "--num-layers 2 --qk-layernorm",
            {},
            ["--qk-layernorm (decoder_block=qwen3 use_qk_norm=True)"],
        ),
        (
            "--split 99,1 --tokenizer-model a",
            {},
            ["--split (eval_fraction)"] + ["--tokenizer-model (tokenizer_path)"],
        ),
    ],
)
def test_megatrons_experts(text, wanted, without):
    keys, left_out = translate_flags(shlex.split(text))
    assert {name: keys[name] for name in wanted} == wanted
    assert {*left_out} == {*without}
    if wanted and "sinkhorn" not in text:
        model = load(["configs/base.yml", *(f"{name}={value}" for name, value in keys.items())])
        assert {n: x for n, x in model.values.items() if n in keys} == keys


@pytest.mark.parametrize("form", ["ARGS=({})", "ARGS=(\n{}\n)", 'ARGS="{}"'])
def test_megatrons_scripts_keep_flags_in_variables(compared, form):
    """In an array, or in a text, before the script that takes them."""
    flags = "--rampup-batch-size 16 16 96 --global-batch-size 32 --train-samples 1000 --bf16"
    use = "${ARGS[@]}" if "(" in form else "$ARGS"
    found = compared("megatron", f"{form.format(flags)}\ntorchrun pretrain.py {use}\n")
    assert found["ours"] == [[0, 16], [6, 32]] and found["left_out"] == []
    assert "dtype=bfloat16" in found["arguments"]


def test_megatrons_thresholds_go_through_floats(compared):
    """8.2M becomes 8199999, a sample less in rows of one token; 8.2M / 3 rounds up to a step."""
    text = '--seq-length 1 --train-iters 9 --step-batch-size-schedule "0:3 8.2M:4"'
    found = compared("megatron", text)
    assert found["theirs"][1][0] == math.ceil(8_199_999 / 3)
    assert found["ours"][1][0] == math.ceil(8_200_000 / 3)
    assert "takes 8.2M for 8,199,999" in found["printed"]


def test_nemo(compared):
    text = "model:\n  rampup_batch_size: [16, 16, 96]\n  global_batch_size: 32\n  precision: bf16\n"
    found = compared("nemo", text)
    assert found["theirs"] == [[0, 32]] and found["ours"] == [[0, 16], [6, 32]]
    assert "warns and ignores rampup_batch_size" in found["printed"]
    text = "train:\n  rampup_batch_size: [16, 16, 96]\n  global_batch_size: 32\n"
    found = compared("nemo", text + "  train_samples: 1000\n")
    assert found["theirs"] == [] and "stops with an AssertionError" in found["printed"]


@pytest.mark.parametrize(
    ("trainer", "text"),
    [
        ("megatron", "--global-batch-size 32 --micro-batch-size 2 --train-iters 9"),
        ("nemo", "model: {global_batch_size: 32}\n"),
    ],
)
def test_a_constant_batch_is_one_here(trainer, text, compared):
    found = compared(trainer, text)
    assert found["theirs"] == found["ours"] == [[0, 32]] and not found["refused"]
    assert "trains with a constant batch of 32\n" in found["printed"]


@pytest.mark.parametrize(
    ("trainer", "text", "said"),
    [
        ("maxtext", MAXTEXT, "num_nodes=N devices_per_node=N"),
        ("maxtext", MAXTEXT.replace("true", "false"), "holds no ramp"),
        ("maxtext", MAXTEXT.replace("base.yml", "other.yml"), "is not read here"),
        ("maxtext", MAXTEXT.replace("samples: 60", "samples: many"), "must be an integer"),
        ("megatron", MEGATRON.replace("16 16 96", "$RAMP"), "must be three integers"),
        ("megatron", "--micro-batch-size 4", "holds no global_batch_size"),
        ("megatron", "--train-iters 5 --decrease-batch-size-if-needed", "leave it out"),
        ("megatron", '--step-batch-size-schedule "0:3 5:4"', "give --seq-length"),
        ("nemo", "model:\n  rampup_batch_size: [16, 16]\n", "holds no global_batch_size"),
        (
            "nemo",
            "rampup_batch_size: [1, 1, 2]\nglobal_batch_size: ${GBS}\n",
            "{GBS} must be an integer",
        ),
        ("nemo", "trainer: {}\n", "holds no global_batch_size"),
        ("nemo", "decrease_batch_size_if_needed: true\n", "changes batches by the devices"),
        (
            "nemo",
            "train: {global_batch_size: 4}\ndata: {global_batch_size: 8}\n",
            "global_batch_size=4: keep one",
        ),
        ("others", "", "must be one of maxtext, megatron, nemo"),
    ],
)
def test_what_is_not_understood_is_one_line(trainer, text, said, compared):
    assert said in compared(trainer, text)
    assert {*TRAINERS} == {"maxtext", "megatron", "nemo"}
