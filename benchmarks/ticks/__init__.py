"""Benchmarks of the pipeline's work between its inputs and its answers."""
