"""Follows a run from job to job: on this machine, under SLURM, on GKE."""
