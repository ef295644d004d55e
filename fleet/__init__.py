"""The vocabulary of a cluster: metrics, entities, topology, jobs, requests. Data types only, no I/O."""
