"""The Slurm sources: jobs and nodes, polled or pushed by Slurm."""
