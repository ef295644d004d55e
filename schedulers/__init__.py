"""Adapters for other schedulers, one file each. They only translate."""
