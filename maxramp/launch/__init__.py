"""Starting jobs: on this machine, under SLURM, on Kubernetes."""
