"""What is wrong with keys of experts, in one line that says what can."""

import pytest
from conftest import make_config

from maxramp.errors import ConfigError

MIXTRAL = "decoder_block=mixtral num_experts=8 num_experts_per_tok=2"
DOTS = "decoder_block=dots1 use_qk_norm=True routed_score_func=sigmoid routed_bias=True "
DOTS += "num_experts=8 num_experts_per_tok=2"
REFUSED = {
    "experts of a dense model": ("num_experts=8", "decoder_block=llama2 here; give decoder_block"),
    "a balance loss of a dense model": (
        "load_balance_loss_weight=0.1",
        "decoder_block=llama2 here",
    ),
    "no experts": ("decoder_block=mixtral", "num_experts=1: .* has experts; give 2 or more"),
    "more experts of a token than there are": (
        f"{MIXTRAL} num_experts_per_tok=9",
        "num_experts_per_tok=9 of num_experts=8: .* give 8 or fewer",
    ),
    "experts over the axis": (
        f"{MIXTRAL} num_experts=6 ici_expert_parallelism=4",
        "num_experts=6 does not divide over the expert axis of 4 devices; .*ici_expert_parallelism",
    ),
    "an axis without experts": (
        "ici_expert_parallelism=2",
        "ici_expert_parallelism=2 .*: decoder_block=llama2 has no experts .*ici_fsdp_parallelism",
    ),
    "the axis of a phase": (
        f"{MIXTRAL} phases_unit=samples phases.80.ici_expert_parallelism=16",
        "phases.80: .*ici_expert_parallelism=16",
    ),
    "groups that do not divide": (
        f"{DOTS} n_routing_groups=3 topk_routing_group=1",
        "n_routing_groups=3 topk_routing_group=1: give both or neither",
    ),
    "heads that olmoe's norms do not fit": (
        "decoder_block=olmoe use_qk_norm=True num_experts=8 head_dim=6",
        "base_num_query_heads x head_dim = .*decoder_block=olmoe has base_emb_dim=.*change one",
    ),
    "no layer of experts": (
        f"{DOTS} first_num_dense_layers=2",
        "first_num_dense_layers=2 of .*fewer",
    ),
    "dense layers in a pipeline": (
        f"{DOTS} first_num_dense_layers=1 ici_pipeline_parallelism=2 base_num_decoder_layers=4",
        "first_num_dense_layers=1: the 2 stages of a pipeline .* use 0, or no pipeline",
    ),
    "biases below adapters": (
        f"{DOTS} routed_bias_update_rate=0.001 lora_rank=4 lora_targets=[q_proj]",
        "routed_bias_update_rate=0.001 moves .* frozen under lora_rank=4; use 0",
    ),
    "biases of routers that do not train": (
        f"{DOTS} routed_bias_update_rate=0.001 trainable_parameters_mask=[matrix]",
        r"routed_bias_update_rate=0.001 moves .* frozen under .*mask=\['matrix'\]; use 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_one_line(case):
    arguments, says = REFUSED[case]
    with pytest.raises(ConfigError, match=f"^.*{says}.*$") as error:
        make_config(*arguments.split())
    assert "\n" not in str(error.value)
