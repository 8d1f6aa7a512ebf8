"""The optimizers, each in a file of its own; `table.py` joins them by the roles of weights."""
