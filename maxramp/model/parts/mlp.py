"""The MLP.

Shapes: B rows, T tokens, D model width, F MLP width.
"""

import jax
from flax import nnx

from maxramp.model.keys import ModelKeys
from maxramp.model.parts.products import dense
from maxramp.model.parts.weights import normal
from maxramp.parallel.sharding import MLP_IN_DF, MLP_OUT_FD, STREAM_BTD, X_BTD, X_BTF

_ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "relu": jax.nn.relu,
    "linear": lambda x: x,
}


class MLP(nnx.Module):
    """Gated MLP (Shazeer, arXiv 2002.05202): out(f(gate(x)) * g(up(x)))."""

    def __init__(self, keys: ModelKeys, key: jax.Array):
        D, F, dtype = keys.base_emb_dim, keys.base_mlp_dim, keys.weight_dtype
        gate, up, out = jax.random.split(key, 3)
        self.activations = tuple(keys.mlp_activations)
        self.gate_DF = normal("matrix", "DF", gate, (D, F), MLP_IN_DF, D**-0.5, dtype)
        self.up_DF = normal("matrix", "DF", up, (D, F), MLP_IN_DF, D**-0.5, dtype)
        self.out_FD = normal("matrix", "FD", out, (F, D), MLP_OUT_FD, F**-0.5, dtype)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D] -> [B, T, D]."""
        x_BTD = jax.reshard(x_BTD, X_BTD)
        f, g = (_ACTIVATIONS[name] for name in self.activations)
        gate_BTF = f(dense(x_BTD, "BTD,DF->BTF", self.gate_DF, X_BTF))
        up_BTF = g(dense(x_BTD, "BTD,DF->BTF", self.up_DF, X_BTF))
        return dense(gate_BTF * up_BTF, "BTF,FD->BTD", self.out_FD, STREAM_BTD)
