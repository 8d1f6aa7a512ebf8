"""Folders of runs and checkpoints, on a disk or in an object storage."""
