"""How arrays lie on the mesh: every PartitionSpec, under the name of what it lays out.

The letters of a name are the dimensions: A gradient accumulation steps, B rows of a micro batch,
S tokens of a row and the next one; f and N as in `data.relay`.
"""

from jax.sharding import PartitionSpec as P

from maxramp.parallel.axes import AXES, BATCH_AXES

BATCH_ABS = P(None, BATCH_AXES, None)  # a batch
SLOTS_fANS = P(None, None, AXES, None)  # rows on their way to the devices that need them
