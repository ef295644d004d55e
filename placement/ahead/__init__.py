"""The queue along sampled futures: when each request starts, and on which nodes."""
