"""A row as a file has it: S tokens, T of the row and the one after them. Imports no JAX."""

from typing import NamedTuple

import numpy as np

PADDING = -1  # no token: never a target


class Row(NamedTuple):
    """What a file holds of a row."""

    tokens: np.ndarray  # int32 ids [S]; PADDING is not a token
    begins: np.ndarray | None = None  # of documents, ascending; None: the row is read as one text
    is_target: np.ndarray | None = None  # bool [S], which tokens are to be predicted; None = all
    # float32 [2], of the two answers of a pair under the weights to stay near to; None = not known
    reference_log_probs: np.ndarray | None = None
