"""Job durations and what remains of running jobs."""
