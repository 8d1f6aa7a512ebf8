"""Optimizers: a file each, and one table of which weight takes which."""
