"""Qwen3-Next: three layers of a gated delta rule before each of attention, all with experts.
Queries rotate in a quarter of a head, which a gate multiplies (Qwen3-Next's model card)."""

import dataclasses
from collections.abc import Mapping

from maxramp.keys.section import Relations
from maxramp.model.families import sparse
from maxramp.model.families.family import Released, ReleasedDrafts
from maxramp.model.families.llama import LAYER
from maxramp.model.families.qwen3 import QWEN3
from maxramp.model.families.qwen3_moe import QWEN3_MOE
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import Layer, Mixing, Pattern
from maxramp.stage import RopeKeys

PERIOD = 4
GDN_NAMES = {
    "gdn_num_key_heads": "linear_num_key_heads",
    "gdn_num_value_heads": "linear_num_value_heads",
    "gdn_key_head_dim": "linear_key_head_dim",
    "gdn_value_head_dim": "linear_value_head_dim",
}
GDN_DEFAULTS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "head_dim": 256,
    "max_position_embeddings": 32_768,
}
DRAFTS = ReleasedDrafts(
    "mtp.layers.{}",
    {
        "embedding_norm.scale_D": "mtp.pre_fc_norm_embedding.weight",
        "hidden_norm.scale_D": "mtp.pre_fc_norm_hidden.weight",
        "join_CD": "mtp.fc.weight",
        "norm.scale_D": "mtp.norm.weight",
    },
    "mtp_num_hidden_layers",
)
ONLY = {"linear_conv_kernel_dim": 4, "full_attention_interval": PERIOD, "hidden_act": "silu"}


def _mix_in_order(keys: RopeKeys) -> Mixing:
    return Mixing()


def pattern_around(full: Layer, keys: ModelKeys) -> Pattern:
    """Makes the last of every four layers `full`, and the others a gated delta rule with its
    MLP."""
    delta = dataclasses.replace(full, kind="delta", mixing=_mix_in_order, mixer="gated_delta")
    return Pattern.repeat((*(delta,) * (PERIOD - 1), full), keys.base_num_decoder_layers)


def check_heads(keys: ModelKeys) -> Relations:
    K, H = keys.gdn_num_key_heads, keys.gdn_num_value_heads
    yield (
        H % K,
        f"gdn_num_value_heads={H} is not a multiple of gdn_num_key_heads={K}: each key head has "
        f"as many value heads; give {K} or {2 * K}",
    )
    yield (
        keys.head_dim % 8,
        f"head_dim={keys.head_dim} is not a multiple of 8: positions turn the pairs of a quarter "
        "of it",
    )
    activation = keys.mlp_activations[0]
    yield (
        activation != "silu",
        f"mlp_activations={list(keys.mlp_activations)}: decoder_block={keys.decoder_block} needs "
        "[silu, linear]",
    )


def add_delta(full: Mapping[str, str], kind: str, names: Mapping[str, str]) -> dict[str, str]:
    """Adds tensors of layers with a gated delta rule to `full`, those of a model whose layers of
    attention have this `Layer.kind`. `names` has the tensors, below `linear_attn`, of the rule's
    weights that read the residual stream, by the names of these weights."""
    own = {
        **names,
        "taps_1tKx": "conv1d.weight",
        "log_rate_Kx": "A_log",
        "step_bias_Kx": "dt_bias",
        "norm.scale_D": "norm.weight",
        "out_KxD": "out_proj.weight",
    }
    layers = {
        path.replace(f".{kind}.", ".delta."): tensor
        for path, tensor in full.items()
        if path.startswith("layers.") and ".mixer." not in path
    }
    own = {f"layers.delta.mixer.{n}": f"{LAYER}.linear_attn.{x}" for n, x in own.items()}
    return {**full, **layers, **own}


def sparse_tensors(names: Mapping[str, str]) -> dict[str, str]:
    """Returns the tensors of a model in which every layer has experts, and a shared one with a
    gate; `names` as in `add_delta`."""
    shared = {"gate_DF": "gate_proj", "up_DF": "up_proj", "out_FD": "down_proj"}
    full = sparse.tensors(QWEN3.tensors) | {
        f"layers.sparse.mlp.shared.{ours}": f"{LAYER}.mlp.shared_expert.{theirs}.weight"
        for ours, theirs in shared.items()
    }
    full["layers.sparse.mlp.shared_gate_DF"] = f"{LAYER}.mlp.shared_expert_gate.weight"
    return add_delta(full, "sparse", names)


def sparse_pattern(keys: ModelKeys) -> Pattern:
    (full,) = sparse.pattern(keys).period
    return pattern_around(full, keys)


def check_sparse(keys: ModelKeys) -> Relations:
    yield from sparse.check(keys)
    yield from check_heads(keys)


HYBRID = {"norm_offset": 1.0, "gates_heads": True}

QWEN3_NEXT = dataclasses.replace(
    QWEN3_MOE,
    **HYBRID,
    pattern=sparse_pattern,
    check=check_sparse,
    gates_shared=True,
    tensors=sparse_tensors({"qkvz_DKx": "in_proj_qkvz.weight", "ba_DKx": "in_proj_ba.weight"}),
    released=Released(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {**GDN_DEFAULTS, "num_key_value_heads": 2, "moe_intermediate_size": 512}
        | {"shared_expert_intermediate_size": 512, "intermediate_size": 5632}
        | {"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
        {**QWEN3_MOE.released.names, **GDN_NAMES},
        QWEN3_MOE.released.other_names,
        period=PERIOD,
        only=ONLY,
        others="linear_attention",
        rotary_share=0.25,
        same={"shared_expert_intermediate_size": "moe_intermediate_size"},
        side_prefix="mtp.",
        drafts=DRAFTS,
    ),
    keys=(*QWEN3_MOE.keys, *GDN_NAMES),
    fixed={"use_qk_norm": True, "shared_experts": 1},
)
