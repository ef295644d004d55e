"""Benchmarks of the pipeline between its inputs and its answers."""
