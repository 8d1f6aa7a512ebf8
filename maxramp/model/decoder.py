"""The decoder: Flax NNX modules used as plain pytrees of weights.

Shapes: B rows, T tokens, D model width, V vocabulary, L layers.
"""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxramp.model import adapters, layers, pipeline
from maxramp.model.block import Block
from maxramp.model.draft import Draft
from maxramp.model.families.table import FAMILIES, layer_pattern
from maxramp.model.keys import Execution, ModelKeys
from maxramp.model.parts.aux import Aux, await_sums, sum_rows
from maxramp.model.parts.embedding import look_up_several
from maxramp.model.parts.norm import RMSNorm
from maxramp.model.parts.positions import Pass, Positions
from maxramp.model.parts.weights import map_products, normal, relabel, weights_of
from maxramp.model.pattern import DRAFT, Pattern
from maxramp.parallel.mesh import axis_size
from maxramp.parallel.sharding import EMBEDDING_VD, HEAD_DV, LAYERS_L, X_BTD, X_BTF, weight_spec

_IN_ORDER = Positions()


class Decoder(nnx.Module):
    """Token ids -> logits. Build it under `jax.set_mesh` (or an abstract mesh)."""

    def __init__(self, keys: ModelKeys, key: jax.Array):
        V, D, L = keys.vocab_size, keys.base_emb_dim, keys.base_num_decoder_layers
        embedding, head, layers_key = jax.random.split(key, 3)
        family, dtype = FAMILIES[keys.decoder_block], keys.weight_dtype
        # Static fields are compared at every call of a compiled step: keep them few and small.
        self.pattern = layer_pattern(keys)
        self.rotary_dim = family.rotary_dim(keys)
        self.tied = keys.logits_via_embedding
        self.logits_cap = keys.final_logits_soft_cap
        self.embedding_scale = D**0.5 if family.scales_embedding else 1.0
        self.embedding_VD = normal(
            "embedding", "V D", embedding, (V, D), EMBEDDING_VD, D**-0.5, dtype
        )
        main, drafts = self.pattern.main, self.pattern.drafts
        keys_L, stacks, ordered = jax.random.split(layers_key, L), {}, [*main]
        for kind in main.kinds:
            own = [i for i, layer in enumerate(ordered) if layer.kind == kind]
            make_block = functools.partial(Block, family, ordered[own[0]], keys)
            if keys.lora_rank:
                make_block = adapters.add_adapters(make_block, kind, keys)
            keys_l = keys_L if len(own) == L else keys_L[jnp.array(own)]
            stacks[kind] = _stack(make_block, keys_l, keys.num_pipeline_repeats)
        if drafts:
            keys_N = jax.random.split(jax.random.fold_in(layers_key, L), len(drafts))
            make_draft = functools.partial(Draft, family, drafts[0], keys)
            stacks[DRAFT] = relabel(jax.vmap(make_draft)(keys_N), "", "N")
        self.layers = nnx.data(stacks)  # by kind of layer: a stack of weights, in order
        form = keys.normalization_layer_epsilon, dtype
        self.norm = RMSNorm((D,), *form, offset=family.norm_offset)
        if not self.tied:
            self.head_DV = normal("head", "D V", head, (D, V), HEAD_DV, D**-0.5, dtype)

    def __call__(
        self, tokens_BT: jax.Array, execution: Execution, positions: Positions = _IN_ORDER
    ) -> jax.Array:
        """Returns float32 logits [B, T, V] of the token after each one."""
        return self.logits(self.hidden(tokens_BT, execution, positions)[0])

    def logits(self, x_BTD: jax.Array) -> jax.Array:
        """Computes float32 logits [B, T, V] from the vectors of `hidden` or `read`."""
        logits_BTV = jnp.einsum(
            "BTD,DV->BTV",
            x_BTD,
            self.head(x_BTD.dtype),
            out_sharding=X_BTF,
            preferred_element_type=jnp.float32,
        )
        return soft_cap(logits_BTV, self.logits_cap)

    def hidden(
        self, tokens_BT: jax.Array, execution: Execution, positions: Positions = _IN_ORDER
    ) -> tuple[jax.Array, Aux]:
        """Returns vectors [B, T, D] for `logits`, and the layers' sums. Padding (below 0) counts as
        token 0; other tokens are below V."""
        return self.run(*self.embed(execution.dtype, tokens_BT), execution, positions)

    def run(
        self, x_BTD: jax.Array, execution: Execution, positions: Positions
    ) -> tuple[jax.Array, Aux]:
        """As `hidden`, of the tokens' embeddings."""
        with jax.named_scope("layers"):
            run = functools.partial(layers.run, rotary_dim=self.rotary_dim, execution=execution)
            if axis_size("stage") > 1:
                layers_per_stage = execution.num_layers_per_pipeline_stage
                run = functools.partial(run, self.pattern.stage_pattern(layers_per_stage))
                stacks = {kind: self.layers[kind] for kind in self.pattern.main.kinds}
                x_BTD, aux = pipeline.run(execution, run, stacks, x_BTD, positions)
            else:
                x_BTD, aux = run(self.pattern.main, self.layers, x_BTD, positions)
                aux = sum_rows(aux)
        return jax.reshard(self.norm(await_sums(x_BTD, aux)), X_BTD), aux

    def draft(
        self,
        number: int,
        x_BTD: jax.Array,
        ahead_BTD: jax.Array,
        execution: Execution,
        positions: Positions,
    ) -> tuple[jax.Array, Aux]:
        """Returns the vectors [B, T, D] of a draft for `logits`, and its sums. `x_BTD` are the
        vectors of the draft before, or of `hidden`, `ahead_BTD` the embeddings of the tokens
        number + 1 further on."""
        with jax.named_scope("draft"):
            stack = jax.tree.map(lambda w_N: w_N[number : number + 1], self.layers[DRAFT])
            draft = relabel(jax.tree.map(lambda w_N: w_N[0], stack), "N", "")
            pattern, blocks = Pattern(self.pattern.drafts[:1], 1), relabel(stack.block, "N", "L")
            how = {"execution": execution, "rotary_dim": self.rotary_dim}
            x_BTD = draft.join(x_BTD, ahead_BTD)
            x_BTD, aux = layers.run(pattern, {DRAFT: blocks}, x_BTD, positions, **how)
            aux = sum_rows(aux)
            return jax.reshard(draft.norm(await_sums(x_BTD, aux)), X_BTD), aux

    def read(
        self,
        tokens_BT: jax.Array,
        first_B: jax.Array,
        states: Sequence[Any],
        execution: Execution,
        valid_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Reads T more tokens of every row, from position first_B on, after those in the layers'
        states. Returns their vectors [B, T, D], and the next states; `states` stay as they are. T
        is all slots from position 0 on, or one, or a few, of which each state's `keep` then keeps
        the accepted ones. For `valid_BT` see `Pass`. The model is from `one_by_one`; a draft's
        state, the last, stays."""
        shared = self._pass(tokens_BT, first_B, execution, valid_BT)
        states = jax.tree.map(lambda x: x, tuple(states))  # a copy, which this pass changes
        (x_BTD,) = self.embed(execution.dtype, tokens_BT)
        for layer, block, state in zip(self.pattern.main, self.layers, states, strict=False):
            x_BTD, _ = block(x_BTD, layer.mixing(execution), shared, state)
        return jax.reshard(self.norm(x_BTD), X_BTD), states

    def read_draft(
        self,
        x_BTD: jax.Array,
        ahead_BT: jax.Array,
        first_B: jax.Array,
        states: Sequence[Any],
        execution: Execution,
        valid_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Reads with the first draft alone, as `read`, the vectors of T tokens (from `read`, or its
        own) and the tokens after these. Returns its vectors, for the `logits` of the tokens after
        those, and the next states."""
        shared = self._pass(ahead_BT, first_B, execution, valid_BT)
        *others, state = jax.tree.map(lambda x: x, tuple(states))
        layer, draft = self.pattern.drafts[0], self.layers[-1]
        x_BTD = draft.join(x_BTD, *self.embed(execution.dtype, ahead_BT))
        x_BTD, _ = draft.block(x_BTD, layer.mixing(execution), shared, state)
        return jax.reshard(draft.norm(x_BTD), X_BTD), (*others, state)

    def _pass(
        self,
        tokens_BT: jax.Array,
        first_B: jax.Array,
        execution: Execution,
        valid_BT: jax.Array | None,
    ) -> Pass:
        positions_BT = first_B[:, None] + jnp.arange(tokens_BT.shape[1])
        angles = layers.find_angles(self.pattern, execution, positions_BT, self.rotary_dim)
        return Pass(execution, _IN_ORDER, angles, first_B=first_B, valid_BT=valid_BT)

    def one_by_one(self, with_draft: bool = False) -> "Decoder":
        """Returns the model with a tuple of layers instead of stacks, to read tokens one by one:
        slicing a stack copies the layer, which takes as long as reading a token with it. The first
        draft is the last of them, or none is there. Not in a pipeline."""
        assert axis_size("stage") == 1, "a pipeline's layers lie on several stages"
        copy = jax.tree.map(lambda x: x, self)
        copy.layers = layers.one_by_one(self.pattern, self.layers)
        if with_draft:
            copy.layers += (layers.layer_at(self.layers[DRAFT], 0, "N"),)
        return copy

    def head(self, dtype: str) -> jax.Array:
        """Returns the output weights [D, V], sharded as HEAD_DV."""
        weight_DV = self.embedding_VD[...].T if self.tied else self.head_DV[...]
        return weight_DV.astype(dtype)

    def cast(self, dtype: str, apart: Iterable[str] = ()) -> "Decoder":
        """Returns the model with products' weights cast; their gradients stay apart over axes
        `apart` (`sharding.weight_spec`)."""

        def cast(x: jax.Array) -> jax.Array:
            return jax.reshard(x.astype(dtype), weight_spec(jax.typeof(x).sharding.spec, apart))

        return map_products(cast, self)

    def embed(self, dtype: str, *tokens: jax.Array) -> tuple[jax.Array, ...]:
        """Looks up the vectors [B, T, D] of each array of `tokens` [B, T], all at once: the table
        has one gradient. Padding (below 0) counts as token 0."""
        with jax.named_scope("embedding"):
            table_VD = self.embedding_VD[...].astype(dtype)
            parts = look_up_several(table_VD, [jnp.maximum(x_BT, 0) for x_BT in tokens])
            return tuple(x_BTD * jnp.asarray(self.embedding_scale, dtype) for x_BTD in parts)


def kind_at(path: Any) -> str | None:
    """Returns the kind of the layers that a weight at this path is of; None outside of layers."""
    names = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
    return names[1] if names[0] == "layers" else None


def _stack(make_block, keys_L: jax.Array, repeats: int):
    make_block = jax.vmap(make_block)
    if axis_size("stage") > 1:
        keys_L = pipeline.split_repeats(jax.reshard(keys_L, LAYERS_L), repeats)
        if repeats > 1:
            return relabel(jax.vmap(make_block)(keys_L), "", "RL")
    return relabel(make_block(keys_L), "", "L")


def soft_cap(logits: jax.Array, cap: float) -> jax.Array:
    """Returns cap * tanh(logits / cap), or with cap 0 the logits (Gemma 2, arXiv 2408.00118,
    section 2).
    """
    return cap * jnp.tanh(logits / cap) if cap else logits


def soft_cap_backward(gradient: jax.Array, capped: jax.Array, cap: float) -> jax.Array:
    """Returns the gradient with respect to the logits, from that with respect to `soft_cap`'s."""
    return gradient * (1 - (capped / cap) ** 2) if cap else gradient


def num_parameters(model: Decoder) -> int:
    return sum(x.size for x in jax.tree.leaves(model))


def num_active_parameters(model: Decoder, keys: ModelKeys) -> int:
    """Counts the parameters that are active for one token: a few of the experts, and all others."""
    experts = sum(w.size for w in weights_of(model) if "E" in w.leading)
    return num_parameters(model) - experts + experts // keys.num_experts * keys.num_experts_per_tok
