"""Checkpoints, and what a restart makes of them."""
