"""The vocabulary of a cluster: metrics, entities, topology, jobs, requests. Data only, no I/O."""
