"""Published laws of the batch size: tokens of a step (rows x max_target_length) by the tokens that
a run has trained on by then, D. docs/noise.md compares them. Imports no JAX.
"""

from typing import NamedTuple


class Law(NamedTuple):
    """coefficient * D**exponent, in tokens."""

    coefficient: float
    exponent: float

    def batch(self, tokens: float) -> float:
        return self.coefficient * tokens**self.exponent

    def tokens(self, batch: float) -> float:
        return (batch / self.coefficient) ** (1 / self.exponent)


# Bergsma et al., arXiv 2505.13738, figure 1, in sequences of 2,048: AdamW, 111M to 3.3B weights. At
# the critical batch a run takes twice the tokens of small batches, at n times it 1 + n times.
BEST = Law(2048 * 0.0306, 0.383)
CRITICAL = Law(2048 * 0.0471, 0.462)
# Islamov et al., arXiv 2603.21191: D^(2/3), from 256 rows of 1,024 at 1.3B tokens (table 1): Scion,
# which is close to Muon.
SCION = Law(2**18 / 1.3e9 ** (2 / 3), 2 / 3)


def largest_batch(tokens: float) -> float:
    """Returns the batch of the most generous law, in tokens, for `tokens` trained on."""
    return max(CRITICAL.batch(tokens), SCION.batch(tokens))


def tokens_of_largest(batch: float) -> float:
    """Returns the tokens of a run from which on `largest_batch` is at least `batch`."""
    return min(CRITICAL.tokens(batch), SCION.tokens(batch))
