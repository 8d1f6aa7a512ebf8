"""A row of tokens, between the file that it is read from and the batch. Imports no JAX.

Shapes: S tokens of a row and the next one (max_target_length + 1).
"""

from typing import NamedTuple

import numpy as np

PADDING = -1  # no token: never a target


class Row(NamedTuple):
    """What a file holds of a row.

    Attributes:
      tokens: int32 ids [S]; PADDING is no token.
      begins: where documents begin, ascending; None where the row is read as one text.
      is_target: bool [S], which tokens are to be predicted; None = all.
    """

    tokens: np.ndarray
    begins: np.ndarray | None = None
    is_target: np.ndarray | None = None
