"""Gated MLPs. Shapes: B rows, T tokens, D model width, F MLP width."""

import jax
from flax import nnx

from maxramp.model.keys import ModelKeys
from maxramp.model.parts.aux import Aux
from maxramp.model.parts.weights import dense, normal
from maxramp.parallel.sharding import MLP_IN_DF, MLP_OUT_FD, STREAM_BTD, X_BTD, X_BTF

ACTIVATIONS = {"silu": jax.nn.silu, "gelu": jax.nn.gelu, "relu": jax.nn.relu, "linear": lambda x: x}


class MLP(nnx.Module):
    """Gated MLP (Shazeer, arXiv 2002.05202): out(f(gate(x)) * g(up(x)))."""

    def __init__(self, keys: ModelKeys, key: jax.Array, width: int = 0):
        D, F, dtype = keys.base_emb_dim, width or keys.base_mlp_dim, keys.weight_dtype
        gate, up, out = jax.random.split(key, 3)
        self.activations = tuple(keys.mlp_activations)
        self.gate_DF = normal("matrix", "D F", gate, (D, F), MLP_IN_DF, D**-0.5, dtype)
        self.up_DF = normal("matrix", "D F", up, (D, F), MLP_IN_DF, D**-0.5, dtype)
        self.out_FD = normal("matrix", "F D", out, (F, D), MLP_OUT_FD, F**-0.5, dtype)

    def __call__(self, x_BTD: jax.Array, token_weight_BT: jax.Array | None = None):
        x_BTD = jax.reshard(x_BTD, X_BTD)
        f, g = (ACTIVATIONS[name] for name in self.activations)
        gate_BTF = f(dense(x_BTD, self.gate_DF, X_BTF))
        up_BTF = g(dense(x_BTD, self.up_DF, X_BTF))
        return dense(gate_BTF * up_BTF, self.out_FD, STREAM_BTD), Aux()
