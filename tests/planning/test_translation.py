"""`maxramp.plan --trainer`: another trainer's file becomes a command for maxramp, and its plan."""

import json
import shlex

import pytest
from conftest import table

from maxramp import plan
from maxramp.config.load import load
from maxramp.keys.megatron import translate_flags
from maxramp.keys.yamlfile import parse


@pytest.fixture
def planned(tmp_path, capsys):
    def run(trainer, text, *keys):
        """The plan as JSON with what was `printed` without --json, or the line of the error."""
        (tmp_path / "file").write_text(text)
        line = [str(tmp_path / "file"), "--trainer", trainer, *keys]
        status = plan.main([*line, "--json"])
        out, error = capsys.readouterr()
        if status:
            assert error.count("error: ") == 1 and "Traceback" not in error
            return error
        assert plan.main(line) == 0
        return json.loads(out) | {"printed": capsys.readouterr().out}

    return run


def batches(plan):
    return [(stage["first_step"], stage["global_batch_size"]) for stage in plan["stages"]]


@pytest.mark.parametrize(
    ("trainer", "text", "wanted"),
    [
        (
            "maxtext",
            "base_config: base.yml\nenable_rampup_batch_size: true\n"
            "per_device_batch_size_start: 1\n"
            "per_device_batch_size_increment: 1\nper_device_batch_size: 4\n"
            "global_rampup_samples: 60\n",
            [(0, 4), (5, 8), (8, 12), (10, 16)],
        ),
        (
            "nemo",
            "model: {rampup_batch_size: [16, 16, 96], global_batch_size: 32}\n"
            "trainer: {max_steps: 100}\nmodel.optim.sched.unknown: 3\n",
            [(0, 16), (6, 32)],
        ),
    ],
)
def test_files_of_maxtext_and_nemo_become_commands(trainer, text, wanted, planned):
    plan = planned(trainer, text, "devices_per_node=4")
    assert batches(plan) == wanted and plan["arguments"][-1] == "devices_per_node=4"
    assert plan["left_out"] == (["model.optim.sched.unknown"] if trainer == "nemo" else [])


MEGATRON = """
torchrun --nproc_per_node 8 -m pretrain_gpt.py --num-layers 32 \\
    --rampup-batch-size 16 16 96 --global-batch-size 32 \\
    --seq-length=10 --train-samples 1000  # a test
"""


def test_megatrons_command_line_becomes_ours(planned):
    """The command that is printed is that of the plan below it; what has no key here is named."""
    more = "--hidden-size 512 --num-attention-heads 8 --ffn-hidden-size 1408 --bf16 --lr 3e-4"
    more += " --min-lr 3e-5 --lr-warmup-samples 20 --tensor-model-parallel-size 2 --swiglu"
    more += " --eod-mask-loss $EXTRA"
    more += " --micro-batch-size 2 --untie-embeddings-and-output-weights --optimizer adam"
    plan = planned("megatron", MEGATRON.replace("#", f"{more} #"), "devices_per_node=4")
    assert plan["left_out"] == ["--eod-mask-loss", "$EXTRA"]
    line = next(x for x in plan["printed"].splitlines() if x.startswith("python -m"))
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
    assert "fsdp 2 x tensor 2" in plan["printed"] and "left out" in plan["printed"]
    assert batches(plan) == [(0, 16), (6, 32)]


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


FLAGS = {"QWEN3_30B": QWEN3_30B, "DEEPSEEK": DEEPSEEK}
# Flags, their keys, and what is left out. Megatron adds up the losses of layers, we take the mean.
EXPERTS = table("""
QWEN3_30B | decoder_block=qwen3_moe num_experts=128 num_experts_per_tok=8 base_moe_mlp_dim=768 \
    norm_topk_prob=True ici_expert_parallelism=8 load_balance_loss_scope=pass \
    load_balance_loss_weight=0.048
QWEN3_30B --moe-router-pre-softmax --moe-expert-capacity-factor 1.0 | decoder_block=qwen3_moe \
    norm_topk_prob=False | --moe-expert-capacity-factor (capacity_factor counts within a row, and \
    keeps the first tokens)
DEEPSEEK | decoder_block=dots1 first_num_dense_layers=3 shared_experts=1 n_routing_groups=8 \
    topk_routing_group=4 routed_scaling_factor=2.5 routed_score_func=sigmoid routed_bias=True \
    norm_topk_prob=True routed_bias_update_rate=0.001 load_balance_loss_scope=row \
    load_balance_loss_weight=0.0058
DEEPSEEK --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --v-head-dim 96 \
    --kv-channels 128 --mtp-num-layers 1 --rotary-scaling-factor 40 --mscale 1.0 \
    --mscale-all-dim 1.0 | decoder_block=deepseek_v3 q_lora_rank=1536 kv_lora_rank=512 \
    qk_nope_head_dim=128 qk_rope_head_dim=64 v_head_dim=96 mtp_num_layers=1 rope_type=yarn \
    rope_factor=40.0 mscale=1.0 rope_attention_factor=1.0 original_max_position_embeddings=4096
--num-experts 8 --multi-latent-attention | decoder_block=mixtral | --multi-latent-attention
--num-experts 8 --moe-router-load-balancing-type sinkhorn --moe-router-pre-softmax \
    --moe-layer-freq 2 --ffn-hidden-size 100 --moe-shared-expert-intermediate-size 150 | \
    decoder_block=mixtral num_experts_per_tok=2 | --moe-router-load-balancing-type sinkhorn | \
    --moe-router-pre-softmax | --moe-layer-freq | --moe-shared-expert-intermediate-size
--num-layers 2 --qk-layernorm | | --qk-layernorm (decoder_block=qwen3 use_qk_norm=True)
--split 99,1 --tokenizer-model a | | --split (eval_fraction) | --tokenizer-model (tokenizer_path)
""")


@pytest.mark.parametrize("case", EXPERTS, ids=lambda case: case[0])
def test_megatrons_experts(case):
    flags, wanted, *without = case
    for name, text in FLAGS.items():
        flags = flags.replace(name, text)
    keys, left_out = translate_flags(shlex.split(flags))
    pairs = (word.split("=") for word in wanted.split())
    assert {(name, parse(value)) for name, value in pairs} <= keys.items()
    assert {*left_out} == {*without}
    if wanted and "sinkhorn" not in flags:
        model = load(["configs/base.yml", *(f"{name}={value}" for name, value in keys.items())])
        assert {n: x for n, x in model.values.items() if n in keys} == keys


@pytest.mark.parametrize("form", ["ARGS=({})", "ARGS=(\n{}\n)", 'ARGS="{}"'])
def test_megatrons_scripts_keep_flags_in_variables(planned, form):
    """In an array, or in a text, before the script that takes them; and values in others."""
    flags = "--rampup-batch-size $RAMP --global-batch-size ${TWO}2 --train-samples 1000 --bf16"
    use = "${ARGS[@]}" if "(" in form else "$ARGS"
    plan = planned(
        "megatron",
        f'S=16 TWO=3\nRAMP="$S 16 96"\n{form.format(flags)}\ntorchrun pretrain.py {use}\n',
    )
    assert batches(plan) == [(0, 16), (6, 32)] and plan["left_out"] == []
    assert "dtype=bfloat16" in plan["arguments"]


@pytest.mark.parametrize(
    ("trainer", "text", "message"),
    [
        ("megatron", MEGATRON.replace("16 16 96", "$RAMP"), "must be three integers"),
        ("megatron", "--num-experts 8 --moe-shared-expert-intermediate-size\n", "has no value"),
        ("nemo", "rampup_batch_size: [1, 1, 2]\nglobal_batch_size: ${N}\n", "must be an integer"),
        ("megatron", "echo 'unclosed", "cannot be read as a command line"),
        (
            "megatron",
            "--num-experts 8 --qk-layernorm --multi-latent-attention --rotary-scaling-factor 0",
            "file: --rotary-scaling-factor 0 must be above 0",
        ),
        ("nemo", "train: {global_batch_size: 4}\ndata: {global_batch_size: 8}\n", "keep one"),
        ("others", "", "must be one of maxtext, megatron, nemo"),
        ("maxtext", "steps: 9\n", "nothing in it is MaxText's alone"),
        ("megatron", "base_config: base.yml\nsteps: 9\n", "--trainer maxtext reads MaxText's"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_in_one_line(trainer, text, message, planned):
    assert message in planned(trainer, text)


def test_refusals_come_first_and_together(tmp_path, capsys):
    (tmp_path / "file").write_text("base_config: base.yml\neval_steps: 20\nweight_sparsity_n: 2\n")
    assert plan.main(["nowhere", "--trainer", "megatron"]) == 2
    assert plan.main([str(tmp_path / "file"), "--trainer", "maxtext"]) == 2
    out, error = capsys.readouterr()
    assert not out and "eval_steps=20 (MaxText's)" in error and "weight_sparsity_n=2" in error


LEFT_OUT = table("""
--lr 1e-4 2e-4 | learning_rate | 1e-4 | --lr 2e-4
--lr 1e-3 --min-lr 1e-4 1e-5 | learning_rate_final_fraction | 0.1 | --min-lr 1e-5
--rampup-batch-size 8 8 99 5 | rampup_batch_size | [8, 8, 99] | --rampup-batch-size 5
--num-experts 8 --moe-router-load-balancing-type aux_loss seq_aux_loss | load_balance_loss_scope \
    | pass | --moe-router-load-balancing-type seq_aux_loss
--num-experts 8 --num-layers 2 --moe-aux-loss-coeff 1e-2 1e-3 | load_balance_loss_weight | 0.02 | \
    --moe-aux-loss-coeff 1e-3
""")
LEFT_OUT.append(["--lr 1e-4 $MORE --bf16 2>&1 | tee log", "learning_rate", "1e-4", "$MORE"])
LEFT_OUT.append(["--lr 1e-4 2>&1 | tee log", "learning_rate", "1e-4"])


@pytest.mark.parametrize("case", LEFT_OUT, ids=lambda case: case[0])
def test_a_value_without_a_key_is_listed_as_left_out(case):
    flags, key, value, *left_out = case
    keys, without = translate_flags(flags.split())
    assert keys[key] == parse(value) and without == left_out
