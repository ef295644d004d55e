"""Benchmarks of what comes in: pages, events, records and the archive."""
