"""The section of the model, and how a pass through it is computed. Imports no JAX."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from maxramp.keys.section import (
    above_zero,
    above_zero_or_open,
    below_one,
    limit,
    minimum,
    one_of,
    positive_or_open,
    some_of,
)
from maxramp.stage import ROPE_KEYS, RopeKeys

BYTES = {"float32": 4, "bfloat16": 2}
ACTIVATIONS = ("silu", "gelu", "relu", "linear")

# Keys that decide which weights a model has, and their shapes.
SHAPE_KEYS = (
    *("decoder_block", "base_emb_dim", "base_num_query_heads", "base_num_kv_heads", "head_dim"),
    *("base_mlp_dim", "base_num_decoder_layers", "vocab_size", "logits_via_embedding"),
    *("attention_bias", "use_qk_norm", "num_experts", "base_moe_mlp_dim", "shared_experts"),
    *("first_num_dense_layers", "routed_bias", "gdn_num_key_heads", "gdn_num_value_heads"),
    *("gdn_key_head_dim", "gdn_value_head_dim", "q_lora_rank", "kv_lora_rank"),
    *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mtp_num_layers"),
)

# Keys that decide which experts a token goes to, and with which weights.
_ROUTING_KEYS = (
    *("num_experts_per_tok", "norm_topk_prob", "routed_score_func", "routed_scaling_factor"),
    *("n_routing_groups", "topk_routing_group"),
)

# Keys that decide which adapters a model has.
LORA_KEYS = ("lora_rank", "lora_alpha", "use_rslora", "lora_targets")

# Keys that decide what weights mean.
MODEL_KEYS = (
    *(*SHAPE_KEYS, "mlp_activations", "normalization_layer_epsilon"),
    *("query_pre_attn_scalar", "attn_logits_soft_cap", "final_logits_soft_cap"),
    *(*_ROUTING_KEYS, *ROPE_KEYS),
)

# The roles of weights that train: other rooms ask for these, never for a name or type. Routers'
# biases ("balance"), which `training.balance` moves, are state.
# "gate" is of few numbers for each head; "recurrence" of how a state decays and "sink" of what a
# softmax leaves out, which no optimizer's decay reaches.
ROLES = ("matrix", "embedding", "head", "scale", "bias", "router", "adapter", "gate")
ROLES += ("recurrence", "sink")
# used in `dtype`, the others in float32
ROLES_IN_PRODUCTS = ("matrix", "embedding", "head", "adapter", "gate")

# The weights that LoRA can adapt, by their names in Hugging Face's models.
LORA_MODULES = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "in_proj_qkvz"),
    *("in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
)


def dtype_of(*unset: str) -> Any:
    return one_of(
        *unset,
        "float32",
        "bfloat16",
        float16="ends at 65504, which a gradient's sum over the tokens of a pass exceeds; use "
        "KEY=bfloat16",
    )


_BY_PASS = "takes its scales from passes, so an update would depend on how many there are"
_BY_BLOCK = "takes scales by blocks, which are not built"
_ANSWERS = "is for models that answer and do not train"

# Other values of MaxText's, and why they are refused.
_QUANTIZATIONS = {
    **dict.fromkeys(("fp8", "fp8_gpu", "fp8_nanoo", "nanoo_fp8", "fp8_e4m3", "fp8_e5m2"), _BY_PASS),
    **dict.fromkeys(("te_fp8_delayedscaling", "te_fp8_currentscaling", "aqt_fp8_full"), _BY_PASS),
    **dict.fromkeys(("te_mxfp8", "te_nvfp4", "te_nvfp4_no_rht"), _BY_BLOCK),
    **dict.fromkeys(("int4", "intmp", "fp4", "serve_fp8_weight"), _ANSWERS),
}
_INT8 = (
    "is not built: it gains on v5p alone (0.76 of the time of bfloat16's products, 1.06 on v6e, "
    "1.24 on TPU7x); leave it out"
)


def _quantization() -> Any:
    refused = {name: f"{why}; use KEY=fp8_full" for name, why in _QUANTIZATIONS.items()}
    return one_of("", "fp8_full", int8=_INT8, **refused)


def key_copies(query_heads: int, key_heads: int, devices: int) -> int:
    """Returns how many copies of each key/value head give every device the heads of its queries, if
    devices share out the heads; 0 if that is impossible."""
    copies = math.lcm(key_heads, devices) // key_heads
    return 0 if query_heads % (key_heads * copies) else copies


def select_strategy(requested: str, query_heads: int, key_heads: int, devices: int) -> str:
    """Returns the requested strategy; for "autoselected" "ulysses" if heads can be shared out.
    Heads are those of a device along `tensor`, `devices` those along `context`."""
    if requested != "autoselected":
        return requested
    return "ulysses" if key_copies(query_heads, key_heads, devices) else "all_gather"


def limit_to_pairs() -> Any:
    return limit(
        lambda value: value > 0 and value % 2 == 0,
        "must be even and above 0: rotary positions turn pairs",
    )


@dataclasses.dataclass(frozen=True)
class Execution(RopeKeys):
    """How a pass is computed, and what tokens see in it; independent of the weights."""

    rope_type: str = one_of("default", "llama3.1", "yarn", "dynamic")
    dtype: str = dtype_of()
    quantization: str = _quantization()
    attention: str = one_of("autoselected", "dot_product", "cudnn_flash", "splash")
    context_parallel_strategy: str = one_of(
        *("autoselected", "ulysses", "all_gather"),
        usp="is not built: ulysses alone shares out the heads; use KEY=ulysses",
        ring="sends what all_gather sends, one device after the other; use KEY=all_gather",
    )
    context_parallel_load_balance: bool
    scan_layers: bool
    remat_policy: str = one_of("full", "minimal", "minimal_with_context", "none")
    num_pipeline_microbatches: int = positive_or_open()
    num_layers_per_pipeline_stage: int = positive_or_open()
    num_pipeline_repeats: int = positive_or_open()
    pipeline_fsdp_ag_once: bool
    expert_dispatch: str = one_of("autoselected", "ragged", "gather")
    grouped_matmul: str = one_of("autoselected", "megablox", "triton", "blocks")
    capacity_factor: float = above_zero_or_open()


@dataclasses.dataclass(frozen=True)
class ModelKeys(Execution):
    """A decoder, and how its passes are computed."""

    decoder_block: str  # one of `families.table`, which checks it (`check_family`)
    base_emb_dim: int = minimum(1)
    base_num_query_heads: int = minimum(1)
    base_num_kv_heads: int = minimum(1)
    head_dim: int = limit_to_pairs()
    base_mlp_dim: int = minimum(1)
    base_num_decoder_layers: int = minimum(1)
    vocab_size: int = minimum(1)
    mlp_activations: Sequence[str] = limit(
        lambda value: len(value) == 2 and all(name in ACTIVATIONS for name in value),
        f"must be two of {', '.join(ACTIVATIONS)}: of the gate, and of what it gates",
    )
    logits_via_embedding: bool
    attention_bias: bool
    use_qk_norm: bool
    query_pre_attn_scalar: int = positive_or_open()
    attn_logits_soft_cap: float = minimum(0)
    final_logits_soft_cap: float = minimum(0)
    normalization_layer_epsilon: float = minimum(0)
    num_experts: int = minimum(1)
    num_experts_per_tok: int = minimum(1)
    base_moe_mlp_dim: int = positive_or_open()
    shared_experts: int = minimum(0)
    gdn_num_key_heads: int = minimum(1)
    gdn_num_value_heads: int = minimum(1)
    gdn_key_head_dim: int = minimum(1)
    gdn_value_head_dim: int = minimum(1)
    q_lora_rank: int = minimum(0)
    kv_lora_rank: int = minimum(1)
    qk_nope_head_dim: int = minimum(1)
    qk_rope_head_dim: int = limit_to_pairs()
    v_head_dim: int = minimum(1)
    first_num_dense_layers: int = minimum(0)
    mtp_num_layers: int = minimum(0)
    norm_topk_prob: bool
    routed_score_func: str = one_of("softmax", "sigmoid")
    routed_scaling_factor: float = above_zero()
    routed_bias: bool
    n_routing_groups: int = positive_or_open()
    topk_routing_group: int = positive_or_open()
    routed_bias_update_rate: float = minimum(0)
    load_balance_loss_weight: float = minimum(0)
    load_balance_loss_scope: str = one_of("row", "pass", "step")
    router_z_loss_weight: float = minimum(0)
    max_target_length: int = minimum(1)
    weight_dtype: str = dtype_of()
    lora_rank: int = minimum(0)
    lora_alpha: float = above_zero()
    use_rslora: bool
    lora_dropout: float = below_one()
    lora_targets: Sequence[str] = some_of("matrix", *LORA_MODULES, fewest=1)

    @property
    def lora_scale(self) -> float:
        """The factor of the product of an adapter's matrices; rsLoRA: arXiv 2312.03732."""
        return self.lora_alpha / self.lora_rank ** (0.5 if self.use_rslora else 1)

    @property
    def lora_modules(self) -> tuple[str, ...]:
        every = "matrix" in self.lora_targets
        return tuple(name for name in LORA_MODULES if every or name in self.lora_targets)

    @property
    def score_scale(self) -> float:
        """The factor of attention's products; 0 = 1 / sqrt(head_dim)."""
        return 0.0 if self.query_pre_attn_scalar == -1 else self.query_pre_attn_scalar**-0.5

    @property
    def moe_mlp_dim(self) -> int:
        """Width of an expert."""
        return self.base_mlp_dim if self.base_moe_mlp_dim == -1 else self.base_moe_mlp_dim

    def context_strategy(self, tensor: int, devices: int) -> str:
        """Returns the strategy on this number of devices along `context`; `tensor` must divide both
        numbers of heads."""
        heads = self.base_num_query_heads // tensor, self.base_num_kv_heads // tensor
        return select_strategy(self.context_parallel_strategy, *heads, devices)
