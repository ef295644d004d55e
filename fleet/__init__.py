"""The vocabulary of a cluster (metrics, entities, topology, jobs, requests), and tools for files, clocks and texts."""
