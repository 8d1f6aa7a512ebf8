"""maxramp: a trainer for language models in which the batch size is a schedule."""

__version__ = "0.1.0"
