"""The search for running jobs to stop, so that a request that is owed GPUs gets them."""
