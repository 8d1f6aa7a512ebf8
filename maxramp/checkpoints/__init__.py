"""Checkpoints: saving, restoring, and how a restart resumes."""
