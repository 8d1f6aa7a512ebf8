"""The names of the mesh's axes.

`data` holds whole copies of the weights, `fsdp` shards of them, `tensor` shards of each layer's
heads and MLP. Rows of a batch are spread over data x fsdp. This module imports no JAX.
"""

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
