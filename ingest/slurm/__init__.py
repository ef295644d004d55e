"""Slurm: read its jobs and nodes by polling, or as it pushes them."""
