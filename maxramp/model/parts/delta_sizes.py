"""The chunks of a gated delta rule, and the sizes for which it has kernels. Imports no JAX."""

WIDTH = 128
MOST_HEADS = 4  # value heads of a program, whose products the chip does side by side; 16 do not fit


def chunk_length(platform: str | None, tokens: int) -> int:
    """Returns the tokens of a chunk of rows of `tokens`, by what compilers make of them."""
    return min({"tpu": WIDTH, "cpu": 32}.get(platform, 64), tokens)


def has_kernel(platform: str | None, C: int, k: int, v: int, R: int) -> bool:
    """Returns whether a platform has kernels for chunks of C tokens and R value heads of a key
    head, of the widths k and v."""
    return platform == "tpu" and C == k == v == WIDTH and R <= MOST_HEADS
