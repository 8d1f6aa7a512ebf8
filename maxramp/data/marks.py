"""What stands in a row of token ids besides them. This module imports no jax."""

PADDING = -1  # no token: never a target

# Added to the id of a document's first token where several documents share a row (`packing`), so
# that a row stays one array of integers until `batch.take_apart` makes it part of a batch.
START = 1 << 30
