"""What stands in a row of token ids besides them. This module imports no jax."""

PADDING = -1  # no token: never a target

# Added to the id of a document's first token where several documents share a row (`packing`). From
# these marks follow segment ids, positions and which tokens are targets, so that a batch is one
# array of integers whether it is packed or not.
START = 1 << 30
