"""Adapters to other schedulers, one file for each. They only translate."""
