"""The search for running jobs to stop, so that a request gets the GPUs that its queue is entitled to."""
