"""The keys of configs/base.yml, and those of other trainers."""
