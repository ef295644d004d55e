"""The Slurm sources: they poll jobs and nodes, or receive them from Slurm."""
