"""The names of the mesh's axes.

`data` holds whole copies of the weights, `stage` consecutive layers of each copy, `fsdp` shards of
them, `tensor` shards of each layer's heads and MLP. Rows of a batch are spread over data x stage x
fsdp: outside the layers, stages share the work as copies do. This module imports no JAX.
"""

AXES = ("data", "stage", "fsdp", "tensor")
BATCH_AXES = ("data", "stage", "fsdp")
COPY_AXES = ("data", "stage")  # those that share the weights outside the layers

# What stands in a key for an axis: ici_pipeline_parallelism is the size of `stage`.
NAME_IN_KEYS = {axis: axis for axis in AXES} | {"stage": "pipeline"}
