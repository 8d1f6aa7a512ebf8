"""GLM-4.5 and 4.6: DeepSeek-V3's mixtures of experts after some dense layers, and attention that
rotates half of a head, has biases, and perhaps norms of queries and keys (arXiv 2508.06471)."""

import dataclasses

from maxramp.keys.section import Relations
from maxramp.model.families import sparse
from maxramp.model.families.dots1 import DOTS1, NAMES
from maxramp.model.families.family import Released, ReleasedDrafts
from maxramp.model.families.llama import LAYER
from maxramp.model.families.qwen2 import QWEN2
from maxramp.model.keys import ModelKeys

# DeepSeek-V3's draft layers.
APPENDED = ReleasedDrafts(
    LAYER,
    {
        "embedding_norm.scale_D": f"{LAYER}.enorm.weight",
        "hidden_norm.scale_D": f"{LAYER}.hnorm.weight",
        "join_CD": f"{LAYER}.eh_proj.weight",
        "norm.scale_D": f"{LAYER}.shared_head.norm.weight",
    },
    "num_nextn_predict_layers",
    {"embedding_VD": f"{LAYER}.embed_tokens.weight", "head_DV": f"{LAYER}.shared_head.head.weight"},
)
_NAMES = {**NAMES, **{name: name for name in ("use_qk_norm", "attention_bias")}}
_BIASES = {path: name for path, name in QWEN2.tensors.items() if "_bias_" in path}


def _check(keys: ModelKeys) -> Relations:
    yield (
        keys.head_dim % 4,
        f"head_dim={keys.head_dim} is not a multiple of 4: positions turn the pairs of half of it",
    )
    yield from sparse.check(keys)


GLM4_MOE = dataclasses.replace(
    DOTS1,
    check=_check,
    tensors={
        **DOTS1.tensors,
        **_BIASES,
        **{path.replace(".dense.", ".sparse."): name for path, name in _BIASES.items()},
    },
    released=Released(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {"num_key_value_heads": 8, "moe_intermediate_size": 1408, "norm_topk_prob": True}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1}
        | {"n_shared_experts": 1, "n_routed_experts": 128, "num_experts_per_tok": 8}
        | {"use_qk_norm": False, "attention_bias": False, "rms_norm_eps": 1e-5}
        | {"max_position_embeddings": 131_072},
        _NAMES,
        DOTS1.released.other_names,
        rotary_share=0.5,
        side_prefix=f"{LAYER}.",  # behind its last layer
        drafts=APPENDED,
    ),
    keys=(*DOTS1.keys, "use_qk_norm", "attention_bias"),
    fixed={name: x for name, x in DOTS1.fixed.items() if name != "use_qk_norm"},
)
