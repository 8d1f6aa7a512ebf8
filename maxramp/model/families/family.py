"""The record of a model family: all that other rooms know of it. Imports no JAX."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from maxramp.keys.section import Relations
from maxramp.model.keys import ModelKeys
from maxramp.model.pattern import Pattern


class ReleasedDrafts(NamedTuple):
    """How a folder names the draft layers of a family (`model.draft`)."""

    layer: str  # how tensors of a layer begin
    # path of a weight beside those of the layer -> tensor; {} is the layer's number
    tensors: Mapping[str, str]
    key: str  # in config.json: how many there are
    copies: Mapping[
        str, str
    ] = {}  # path of a weight of the model -> tensor that each layer has too


class Released(NamedTuple):
    """A family's config.json, as far as it differs from the others' (`huggingface.config_json`)."""

    model_type: str
    architecture: str  # the class of transformers that opens it
    defaults: Mapping[str, Any]  # transformers' values for keys that config.json leaves out
    names: Mapping[str, str] = {}  # our key -> theirs
    other_names: Mapping[str, str] = {}  # alternative name -> theirs
    activation: str = "hidden_act"
    # If layers with a window have a rope_theta of their own: its key ("" = none), and its value if
    # config.json leaves it out.
    local_rope: tuple[str, float] | None = None
    period: int = 1  # in layer_types: the last of these layers is full_attention, ...
    others: str = "sliding_attention"  # ... the others this
    only: Mapping[str, Any] = {}  # values of keys that have no others here
    same: Mapping[str, str] = {}  # a key of theirs -> the one whose value it must have
    # how names of tensors begin that an export has as they came; {} is the number of layers
    side_prefix: str = ""
    drafts: ReleasedDrafts | None = None  # what `side_prefix` begins, where they train
    rotary_share: float = 1  # of a head's numbers, those that positions turn
    # whether a layer's experts lie in one tensor with inputs as rows, gates and ups in turn
    interleaves_experts: bool = False
    model_types: tuple[str, ...] = ()  # names of other models that are this family's too
    scales_scores: bool = False  # whether yarn's mscale_all_dim scales attention's scores


@dataclasses.dataclass(frozen=True)
class Family:
    """All facts of a family of models."""

    pattern: Callable[[ModelKeys], Pattern]
    # path of a weight -> tensor of a Hugging Face folder; {} is the layer's number
    tensors: Mapping[str, str]
    released: Released
    keys: tuple[str, ...] = ()  # keys that other families may not read
    unread: tuple[str, ...] = ()  # keys that other families read, and this one does not
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # keys with only one value
    check: Callable[[ModelKeys], Relations] = lambda keys: iter(())  # relations between its keys
    norms: str = "before"  # where layers have them: "before", "after" or on "both" sides
    norm_offset: float = 0.0  # norms multiply by this + their weights
    heads_together: bool = False  # whether norms of queries and keys are of all heads together
    # keys that its experts have, whatever those of the model
    expert_keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    gates_heads: bool = False  # whether each head's result is gated by as many numbers of its query
    gates_shared: bool = False  # whether its shared expert is gated by a number
    has_sinks: bool = False  # whether each head's softmax has one more score, of no token
    has_out_bias: bool = False  # whether attention adds a bias to its result
    has_expert_biases: bool = False  # whether router and experts have biases that train
    # Where experts' gates and ups are cut, so that they compute gpt-oss's (1 + up) gate
    # sigmoid(1.702 gate); 0 = mlp_activations
    gate_limit: float = 0.0
    scales_embedding: bool = False  # multiplies the embedding by the root of the width
    latent: bool = False  # whether keys and values are made of latents (`mixers.latent_attention`)

    def head_widths(self, keys: ModelKeys) -> tuple[int, int]:
        """Returns the numbers of a head's query or key, and of its value."""
        if self.latent:
            return keys.qk_nope_head_dim + keys.qk_rope_head_dim, keys.v_head_dim
        return keys.head_dim, keys.head_dim

    def rotary_dim(self, keys: ModelKeys) -> int:
        """Returns how many numbers of a head's query positions turn."""
        share = self.released.rotary_share
        return keys.qk_rope_head_dim if self.latent else int(keys.head_dim * share)
