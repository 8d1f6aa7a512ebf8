"""Keys that no run can train with: one line says why, and what to change."""

import pytest
from conftest import check_refused_keys, table

GEMMA3 = """decoder_block=gemma3 use_qk_norm=True sliding_window_size=6
mlp_activations=[gelu,linear] logits_via_embedding=True dataset_type=synthetic
enable_rampup_batch_size=False per_device_batch_size=1 ici_pipeline_parallelism=2"""
CONTEXT = "ici_context_parallelism=4"
EXPERTS = "decoder_block=mixtral num_experts=4 num_experts_per_tok=2"
DOTS1 = """decoder_block=dots1 use_qk_norm=True routed_score_func=sigmoid routed_bias=True
num_experts=4 first_num_dense_layers=1"""
PHASES = "global_batch_size=16 phases_unit=samples total_samples=4000"


def cases(keys: str, text: str) -> list[list[str]]:
    """The cases of a table whose keys stand behind these."""
    return [[f"{' '.join(keys.split())} {more}", *parts] for more, *parts in table(text)]


CASES = [
    *cases(
        GEMMA3,
        """
base_num_decoder_layers=26 | repeat after 6, | no 2 parts | ; use no pipeline
base_num_decoder_layers=18 | make no 2 parts that are alike; use 3 parts
sliding_window_size=0 | decoder_block=gemma3 needs sliding_window_size=4096
""",
    ),
    *cases(
        CONTEXT,
        """
max_target_length=30 | use 28 or 32 tokens
phases={0: {row_length: 8}, 64: {row_length: 2}} | its 2 tokens
""",
    ),
    *cases(
        f"{CONTEXT} base_num_query_heads=6 base_num_kv_heads=2 context_parallel_strategy=ulysses",
        "head_dim=8 | use 1, 2, 3, 6 of them, or context_parallel_strategy=all_gather",
    ),
    *cases(
        f"{CONTEXT} {EXPERTS} context_parallel_strategy=all_gather",
        "capacity_factor=1.0 | context_parallel_load_balance=False",
    ),
    *cases(
        "lora_rank=2",
        """
lora_targets=[lm_head] | lora_targets= | lm_head | must be some of matrix
trainable_parameters_mask=[scale] | only adapters train
log_gradient_noise_scale=True | frozen under lora_rank=2
lora_dropout=1 | lora_dropout=1 | below 1
load_full_state_path=a | load_full_state_path=a with lora_rank=2: | load_parameters_path
load_in_4bit=True | QLoRA
trainable_layers=[0] allow_changed=[trainable_layers] | handed over
""",
    ),
    *cases(
        "quantization=fp8_full",
        """
decoder_block=mixtral num_experts=4 | with num_experts=4: | leave one of them out
lora_rank=2 | with lora_rank=2:
trainable_layers=[0] | with trainable_layers=[0]:
log_gradient_noise_scale=True | with log_gradient_noise_scale=True:
quantization=int8 | gains on v5p alone
quantization=te_fp8_delayedscaling | from passes | use quantization=fp8_full
quantization=aqt_int8 | is not one of "", fp8_full
""",
    ),
    *cases(
        "trainable_layers=[0]",
        """
trainable_layers=[0,2] | 2 is not one of the model's layers 0 to 1
trainable_layers=[1-2] | 1-2 | must be numbers of layers
trainable_layers=[1,0] | must be numbers of layers from 0 up, rising
log_gradient_noise_scale=True | frozen under trainable_layers
"""
        + f"{' '.join(DOTS1.split())} trainable_parameters_mask=[router]"
        + " | layers of trainable_layers have no such weights",
    ),
    *cases(
        PHASES,
        """
phases.320.ici_tensor_parallelism=3 | phases.320: | ici_tensor_parallelism=3 makes no mesh of 8
phases.320.ici_tensor_parallelism=4 base_num_kv_heads=2 | phases.320: | over the tensor axis of 4
phases.320.ici_data_parallelism=-1 | ici_fsdp_parallelism=-1 and ici_data_parallelism=-1: one
phases.320.ici_pipeline_parallelism=2 | no phase can change it, as other stages hold
phases.320.dcn_data_parallelism=2 | no phase can change it, as the state moves
program=grpo max_completion_length=8 phases.320.ici_tensor_parallelism=2 | one for the whole run
""",
    ),
    *cases(
        "opt_type=optax.lion",
        """
opt_arguments={weigth_decay: 1} | =1 is not | mean weight_decay? it takes
opt_arguments={learning_rate: 1} | give the key learning_rate
opt_arguments={mask: [scales]} | must be a list of some of matrix
opt_arguments={b1: high} | opt_arguments={'b1': 'high'}: unsupported
half_lives_in_samples=[adam_b2] | optax counts steps: leave it out
adam_b2=0.9 | is read only with opt_type=adamw or muon, and
opt_type=muon opt_arguments={b1: 0.9} | is read only with opt_type=optax.*, and
opt_type=optax.loin | opt_type=optax.loin is not an optimizer of | mean optax.lion
opt_type=optax.adopt | did you mean optax.contrib.adopt
opt_type=optax.contrib.muon | as layers are stacked; use opt_type=muon
opt_type=optax.polyak_sgd | that takes a learning rate
opt_type=optax.contrib.momo | argument: 'value'; a step gives gradients, weights and
opt_type=lion | is not one of adamw, sgd, muon, or | such as optax.lion
opt_type=adamw half_lives_in_samples=[adam_b1, muon_beta] | is not a half-life of opt_type=adamw
""",
    ),
    *table("""
adamw_mask=[".*norm.*"] | adamw_mask=['.*norm.*'] must be some of matrix
trainable_parameters_mask=[norms] | norms | must be some of matrix
trainable_parameters_mask=[bias] | no such weights; use some of embedding
"""),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0][-60:])
def test_keys_that_cannot_train_are_refused_in_one_line(case):
    check_refused_keys(*case)
