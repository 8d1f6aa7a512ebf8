"""Measurements of runs, and the batch sizes that they suggest for another."""
