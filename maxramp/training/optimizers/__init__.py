"""Optimizers, a file each, and the table of which weights take which."""
