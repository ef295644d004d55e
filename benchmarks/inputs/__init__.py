"""Benchmarks of the inputs: pages, events, records and the archive."""
