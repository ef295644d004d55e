"""Benchmarks: one file for each hot path, and one JSON line for each case."""
