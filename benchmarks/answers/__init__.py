"""Benchmarks of answers: the API, decisions, queues and adapters."""
