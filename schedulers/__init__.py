"""Adapters to other schedulers, one file each. They translate, and do nothing else."""
