"""What a cluster is: metrics, entities, topology, jobs, requests. Data only, no I/O."""
