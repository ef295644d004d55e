"""Adapters to other schedulers, one file for each. Adapters only translate."""
